"""`headwater logs`: print the logs of the stack's services, and follow them with -f."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import IO, Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.output import quiet_broken_pipe
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.printable import printable
from headwater.stack.state import StackDirectory

_POLL_S = 0.2


def logs(
    service: Annotated[str, typer.Argument(help="Print only this service.", show_default=False)] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines as they are written.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of lines to print from the end.")] = 50,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Print the logs of the stack's services."""
    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    known = sorted(directory.logs.glob("*.log")) if directory.logs.is_dir() else []
    chosen = [log for log in known if not service or log.stem == service]
    if not chosen:
        available = ", ".join(log.stem for log in known)
        hint = f"available: {available}" if available else "`headwater up` starts a stack"
        raise CommandError(f"no log of {service or 'a stack'} in {directory.logs}; {hint}", USAGE)
    with quiet_broken_pipe():
        files = [_LogFile(log, f"{log.stem} | " if len(chosen) > 1 else "", lines) for log in chosen]
        while follow:
            time.sleep(_POLL_S)
            for log_file in files:
                log_file.print_new()


class _LogFile:
    """One log file: prints its last lines, then lines that are added."""

    def __init__(self, path: Path, prefix: str, lines: int) -> None:
        self._path, self._prefix = path, prefix
        self._file: IO[str] = path.open(encoding="utf-8", errors="replace")
        for line in deque(self._file, maxlen=lines):
            self._print(line)

    def print_new(self) -> None:
        for line in self._file:
            self._print(line)
        # After a rotation, the name refers to a new file.
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
