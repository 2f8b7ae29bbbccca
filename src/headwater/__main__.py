"""`python -m headwater` is the same command as `headwater`."""

from headwater.cli import main

if __name__ == "__main__":
    main()
