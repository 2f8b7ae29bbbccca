"""Remove the bytes of deleted streams and dropped messages from a data directory at once.

The readable data is copied to a new store next to the old one; the copy is verified and then replaces it. So a complete
store exists at any time: under its own name, or under `.purged` or `.before-purge` after a crash between the two
renames. Backups and the blocks of the disk are not changed.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from headwater.storage.directory import lock_directory
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal_location import moved_journals, remove_journals
from headwater.storage.offline.division import CopiedStore
from headwater.storage.offline.store_copy import copy_between
from headwater.storage.tiering.claimed_prefix import read_mark
from headwater.storage.worker_stores import store_directories


@dataclass(frozen=True, slots=True)
class PurgedStore:
    kept: CopiedStore
    bytes_before: int
    bytes_after: int


def purge(directory: Path, mode: str, *, shard_count: int, map_bytes: int) -> PurgedStore:
    """Rewrite the store in `directory`, which no server has open. The disk needs space for both copies."""
    directory = directory.resolve()
    mark = read_mark(RealFilesystem(), directory)
    if mark is not None:
        raise StorageError(
            f"The packs of {directory} are in {mark.url}, which a purge does not rewrite. Copy the store into a plain"
            " directory with `headwater store copy`."
        )
    fresh = directory.with_name(f"{directory.name}.purged")
    before = directory.with_name(f"{directory.name}.before-purge")
    for path in (fresh, before):
        if path.exists():
            raise StorageError(
                f"{path} exists: a purge was interrupted. If {directory} exists, remove {path}; otherwise rename it to"
                f" {directory}."
            )
    if directory.is_mount():
        raise StorageError(
            f"{directory} is a mount point, and cannot be replaced. Copy the store with `headwater store copy`, and use"
            " the copy."
        )
    try:
        kept = copy_between(directory, mode, fresh, mode, shard_count=shard_count, map_bytes=map_bytes)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    filesystem = RealFilesystem()
    bytes_before, bytes_after = _size(directory), _size(fresh)
    lock = lock_directory(filesystem, directory, create=False)
    try:
        directory.rename(before)
        fresh.rename(directory)
        filesystem.sync_directory(directory.parent)
    except OSError as error:
        raise StorageError(f"{fresh} cannot replace {directory}: {error}") from error
    finally:
        lock.release()
    remove_journals(moved_journals(store_directories(before)))
    shutil.rmtree(before)
    return PurgedStore(kept, bytes_before, bytes_after)


def _size(directory: Path) -> int:
    return sum(
        path.stat().st_size
        for each in (directory, *moved_journals(store_directories(directory)))
        for path in each.rglob("*")
        if path.is_file()
    )
