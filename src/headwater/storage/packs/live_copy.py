"""A copy of a store of the log while a server goes on writing to it.

The server keeps its files meanwhile (see `storage.keeping`), so the order is all there is to it: the manifest first,
then the packs that it names, then the log from the segment that it names. The log is then at least as new as the
manifest, and each is a prefix of what was written. Together they are the store as of the last whole batch of that log:
no earlier than when the copy was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.storage.filesystem import Filesystem
from headwater.storage.journal.replay import Replay
from headwater.storage.journal.segments import segment_numbers, segment_path
from headwater.storage.packs.manifest import NAME, Manifest
from headwater.storage.packs.pack import pack_path
from headwater.storage.packs.recovery import LOG_NAME, PACKS_NAME


def copy_log(filesystem: Filesystem, source: Path, target: Path, copy: Callable[[Path, Path], object]) -> None:
    """Copy with `copy(from, to)`, which takes a file as far as it reaches when it is opened, and makes it durable."""
    for name in (LOG_NAME, PACKS_NAME):
        filesystem.make_directory(target / name)
    if not filesystem.exists(source / NAME):
        # A store that was never started has nothing else either.
        return
    copy(source / NAME, target / NAME)
    manifest = Manifest(filesystem, target)
    for _ in manifest.load():
        pass
    for number in manifest.packs:
        copy(pack_path(source / PACKS_NAME, number), pack_path(target / PACKS_NAME, number))
    for number in segment_numbers(filesystem, source / LOG_NAME):
        if number >= manifest.segment:
            copy(segment_path(source / LOG_NAME, number), segment_path(target / LOG_NAME, number))
    replay = Replay(filesystem, target / LOG_NAME, manifest.segment, lambda _: None)
    for _ in replay.batches():
        pass
    # A batch that was just being written is there in part: it was not acknowledged when the copy reached it.
    replay.settle()
