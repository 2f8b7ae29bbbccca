"""What spark-submit runs: `headwater sync` with the arguments behind the file, on the master that it was given."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    # A file that is run has its own directory first on the path, where our modules would be taken for others.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [place for place in sys.path if str(Path(place).resolve()) != here]
    sys.argv[1:] = ["sync", *sys.argv[1:]]
    runpy.run_module("headwater", run_name="__main__")


if __name__ == "__main__":
    main()
