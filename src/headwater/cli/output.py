"""Output of the stream commands: messages to stdout as JSON lines or raw bytes, and a progress bar to stderr.

Invariant: only messages are written to stdout, so that it can be piped; everything else goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec


class Progress(Protocol):
    def __call__(self, advance: int, total: int | None = None) -> None:
        """Advance by a number of bytes; `total` is passed once it is known."""


class MessagePrinter:
    """Prints messages to stdout: JSON as one line each, unchanged unless a message spans lines; others unchanged.

    `pretty` indents JSON. With `lines`, a message of another type that does not end a line gets a line end.
    """

    def __init__(self, *, is_json: bool, raw: bool, pretty: bool, limit: int | None, lines: bool) -> None:
        self._is_json = is_json and not raw
        self._indent = 2 if pretty else -1
        self._ends_lines = lines and not is_json and not raw
        self._left = limit

    @property
    def is_done(self) -> bool:
        """Whether the limit is reached."""
        return self._left == 0

    def print(self, messages: list[bytes]) -> bool:
        """Print messages up to the limit; return whether all were printed."""
        chosen = messages if self._left is None else messages[: self._left]
        if self._left is not None:
            self._left -= len(chosen)
        out = sys.stdout.buffer
        for message in chosen:
            out.write(self._line(message) if self._is_json else message)
            if self._ends_lines and not message.endswith(b"\n"):
                out.write(b"\n")
        out.flush()
        return len(chosen) == len(messages)

    def _line(self, message: bytes) -> bytes:
        if self._indent > 0 or b"\n" in message or b"\r" in message:
            message = msgspec.json.format(message, indent=self._indent)
        return message + b"\n"


@contextmanager
def progress_bar(what: str, wanted: bool | None) -> Iterator[Progress]:
    """A progress bar on stderr: if requested, or if stderr is a terminal and stdout is not."""
    shown = wanted if wanted is not None else sys.stderr.isatty() and not sys.stdout.isatty()
    if not shown:
        yield _silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True, force_terminal=wanted or None)
    with Bars(*columns, TimeRemainingColumn(), console=console, transient=False) as bars:
        task = bars.add_task(what, total=None)

        def advance_by(advance: int, total: int | None = None) -> None:
            bars.update(task, advance=advance)
            if total is not None:
                bars.update(task, total=total)

        yield advance_by


def _silent(advance: int, total: int | None = None) -> None:
    """No bar."""


@contextmanager
def quiet_broken_pipe() -> Iterator[None]:
    """Exit quietly if the reader of stdout closes the pipe, as in `headwater read … | head`."""
    try:
        yield
    except BrokenPipeError:
        # Otherwise Python prints another error when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
