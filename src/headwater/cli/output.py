"""What the stream commands print: messages to stdout as JSON lines or raw bytes, and a progress bar to stderr.

Invariant: stdout carries nothing but messages, so that it can be piped; what is meant for eyes goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Progress(Protocol):
    def __call__(self, advance: int, total: int | None = None) -> None:
        """So many bytes more; `total` once it is known."""


def write_messages(messages: Iterable[bytes], *, is_json: bool, raw: bool) -> None:
    """JSON as one line each, to the byte unless a message spans lines; anything else as it is."""
    out = sys.stdout.buffer
    for message in messages:
        if is_json and not raw:
            line = msgspec.json.format(message, indent=-1) if b"\n" in message or b"\r" in message else message
            out.write(line + b"\n")
        else:
            out.write(message)
    out.flush()


@contextmanager
def progress_bar(what: str, wanted: bool | None) -> Iterator[Progress]:
    """A bar on stderr: when asked for, or when it is a terminal and stdout is not."""
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
def readers_may_leave() -> Iterator[None]:
    """`headwater read … | head` is not an error: the reader of our output may stop."""
    try:
        yield
    except BrokenPipeError:
        # Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
