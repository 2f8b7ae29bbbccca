"""`headwater logs`: what the parts wrote, all of them or one, and with -f what they write from now on."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import IO, Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.output import readers_may_leave
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.printable import printable
from headwater.stack.state import StackDirectory

_POLL_S = 0.2


def logs(
    part: Annotated[str, typer.Argument(help="Only this part.", show_default=False)] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Print the logs of the stack's parts."""
    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    known = sorted(directory.logs.glob("*.log")) if directory.logs.is_dir() else []
    chosen = [log for log in known if not part or log.stem == part]
    if not chosen:
        there = ", ".join(log.stem for log in known) or "nothing yet"
        raise CommandError(f"there is no log of {part or 'a stack'} in {directory.logs}; there is: {there}", USAGE)
    with readers_may_leave():
        tails = [_Tail(log, f"{log.stem} | " if len(chosen) > 1 else "", lines) for log in chosen]
        while follow:
            time.sleep(_POLL_S)
            for tail in tails:
                tail.go_on()


class _Tail:
    """One log file: its last lines now, and what is added later."""

    def __init__(self, path: Path, prefix: str, lines: int) -> None:
        self._path, self._prefix = path, prefix
        self._file: IO[str] = path.open(encoding="utf-8", errors="replace")
        for line in deque(self._file, maxlen=lines):
            self._print(line)

    def go_on(self) -> None:
        for line in self._file:
            self._print(line)
        # A log that was begun anew under the same name is another file.
        try:
            renamed = self._path.stat().st_ino != _inode(self._file)
        except FileNotFoundError:
            return
        if renamed:
            self._file.close()
            self._file = self._path.open(encoding="utf-8", errors="replace")

    def _print(self, line: str) -> None:
        print(f"{self._prefix}{printable(line.rstrip())}", flush=True)


def _inode(file: IO[str]) -> int:
    import os

    return os.fstat(file.fileno()).st_ino
