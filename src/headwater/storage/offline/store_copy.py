"""Copy a store into a new one, of any mode and with any number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwater.storage.directory import FAMILY_OF_MODE, SHARDS_DEFAULT, read_format, set_shards
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.offline.atomic_install import atomic_install
from headwater.storage.offline.division import CopiedStore, all_in_one, divide
from headwater.storage.offline.families import family_of
from headwater.storage.worker_stores import shards_of, store_directories


def copy_between(
    source: Path,
    source_mode: str,
    target: Path,
    target_mode: str,
    *,
    shard_count: int,
    map_bytes: int,
    shards: int | None = None,
) -> CopiedStore:
    """Copy the store in `source`, which no server has open, into `target`, which must be new or empty.

    The stores of several workers become one. It has the same number of shards unless `shards` is given.
    """
    sources = store_directories(source)
    for directory in sources:
        family_of(directory, source_mode)
    if source.resolve() == target.resolve():
        raise StorageError(f"{source} cannot be copied onto itself; name another target.")
    with atomic_install(target) as unfinished:
        copied = divide(sources, [unfinished], target_mode, all_in_one, shard_count=shard_count, map_bytes=map_bytes)
        set_shards(RealFilesystem(), unfinished, shards or shards_of(source) or 1)
    return copied


def join(sources: Sequence[Path], target: Path, *, shard_count: int, map_bytes: int) -> CopiedStore:
    """Copy several stores of one family, which no server has open, into one that workers can divide.

    Files that an interrupted run left in `target` are replaced.
    """
    filesystem = RealFilesystem()
    families = {read_format(filesystem, source).family for source in sources}
    if len(families) > 1:
        raise StorageError(
            f"The stores are of different families ({', '.join(sorted(families))}) and cannot be joined; copy"
            " them to one mode first."
        )
    mode = {family: mode for mode, family in FAMILY_OF_MODE.items()}[families.pop()]
    with atomic_install(target, replace=True) as unfinished:
        copied = divide(sources, [unfinished], mode, all_in_one, shard_count=shard_count, map_bytes=map_bytes)
        set_shards(filesystem, unfinished, SHARDS_DEFAULT)
    return copied
