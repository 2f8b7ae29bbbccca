"""The real server, with workers that are killed at a chosen write to a journal.

    python -m tests.cluster.killed_at_writes serve --port 0

While its working directory has a plan (`kill_at`), the batches that its workers write are counted together. The chosen
one ends its worker, or all workers, with SIGKILL: before the write, in the middle of it, or after it and before anyone
is told. The plan is removed then, so that the restarted workers live.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from headwater.cli import main
from headwater.storage.filesystem import Bytes, write_whole
from headwater.storage.journal.frames import FRAME
from headwater.storage.journal.segments import FileJournal

MOMENTS: Final = ("before", "middle", "after")
_PLAN: Final = "kill_at"
_COUNT: Final = "writes"
_append: Final[Callable[..., None]] = FileJournal._append


def kill_at(directory: Path, write: int, moment: str, *, everyone: bool) -> None:
    """Plan the end of the worker that performs this write, counted from now on, or of all workers."""
    (directory / _COUNT).write_bytes(b"")
    (directory / f"{_PLAN}.new").write_text(json.dumps([write, moment, everyone]))
    (directory / f"{_PLAN}.new").replace(directory / _PLAN)


def is_planned(directory: Path) -> bool:
    """Whether the planned write has not been reached."""
    return (directory / _PLAN).exists()


def count_of_writes(directory: Path) -> int:
    return (directory / _COUNT).stat().st_size


def _is_reached(write: int) -> bool:
    """Count a write of this worker; whether it is the one that was chosen."""
    with Path(_COUNT).open("ab", buffering=0) as count:
        count.write(b".")
        return count.tell() == write


def _kill(*, everyone: bool) -> None:
    Path(_PLAN).unlink()
    if everyone:
        for worker in psutil.Process(os.getppid()).children():
            if worker.pid != os.getpid():
                os.kill(worker.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def append_and_kill(journal: FileJournal, frame: bytearray, rest: Sequence[Bytes] = ()) -> None:
    """In place of `FileJournal._append`."""
    try:
        write, moment, everyone = json.loads(Path(_PLAN).read_text())
    except FileNotFoundError:
        _append(journal, frame, rest)
        return
    # A frame without records only marks that those before it are complete.
    is_reached = (len(frame) > FRAME.size or bool(rest)) and _is_reached(write)
    if is_reached and moment == "middle":
        whole = b"".join((frame, *rest))
        write_whole(journal._file, whole[: len(whole) // 2])
    if is_reached and moment != "after":
        _kill(everyone=everyone)
    _append(journal, frame, rest)
    if is_reached:
        _kill(everyone=everyone)


if __name__ == "__main__":
    type.__setattr__(FileJournal, "_append", append_and_kill)
    main(sys.argv[1:])
