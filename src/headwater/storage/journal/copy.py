"""Copy a journal while a server may append to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.storage.filesystem import Filesystem
from headwater.storage.journal.replay import Replay
from headwater.storage.journal.segments import segment_numbers, segment_path


def copy_journal(
    filesystem: Filesystem, source: Path, target: Path, first_number: int, copy_file: Callable[[Path, Path], object]
) -> Replay:
    """Copy the segments from `first_number` on, up to the last whole batch. FileNotFoundError if one was trimmed.

    A batch that was being written is copied in part: it was not acknowledged when the copy reached it, and is cut.
    """
    for number in segment_numbers(filesystem, source):
        if number >= first_number:
            copy_file(segment_path(source, number), segment_path(target, number))
    if not filesystem.exists(segment_path(target, first_number)):
        raise FileNotFoundError(segment_path(source, first_number))
    replay = Replay(filesystem, target, first_number, lambda _: None)
    for _ in replay.batches():
        pass
    replay.repair()
    return replay
