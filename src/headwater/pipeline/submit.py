"""The file for spark-submit: run `headwater sync` with the arguments after the file, on spark-submit's master."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    # Python puts the directory of this file first on the path, where our modules would shadow others.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [place for place in sys.path if str(Path(place).resolve()) != here]
    sys.argv[1:] = ["sync", *sys.argv[1:]]
    runpy.run_module("headwater", run_name="__main__")


if __name__ == "__main__":
    main()
