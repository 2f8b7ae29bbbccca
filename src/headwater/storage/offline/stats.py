"""Store statistics: the content of a data directory, and its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from headwater.storage.filesystem import RealFilesystem
from headwater.storage.journal_location import moved_journals
from headwater.storage.offline.families import family_of, locked, tools_of
from headwater.storage.offline.interface import open_reader
from headwater.storage.stream_stats import StreamStats, stream_stats
from headwater.storage.tiering.open import files_of
from headwater.storage.tiering.tier import TieredFilesystem
from headwater.storage.worker_stores import store_directories


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The figures of `headwater store stats`."""

    family: str
    contents: StreamStats
    disk_bytes: int
    """The disk space of all files of the directory."""
    free_bytes: int
    """Free space of the file system."""
    parts: dict[str, int] = field(default_factory=dict)
    """Figures about the files, which differ between the storage modes."""


def offline_stats(directory: Path) -> StoreStats:
    """Statistics of a directory that no server has open, summed over its stores."""
    tools = tools_of(directory)
    contents: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for store in store_directories(directory):
        filesystem = files_of(store)
        with locked(filesystem, store):
            with open_reader(tools, filesystem, store) as reader:
                contents.update(asdict(stream_stats(reader.catalog)))
            parts.update(tools.parts(filesystem, store))
            if isinstance(filesystem, TieredFilesystem):
                parts.update(filesystem.parts())
    return _stats(directory, StreamStats(**contents), dict(parts))


def live_stats(directory: Path, contents: Mapping[str, int], parts: Mapping[str, int]) -> StoreStats:
    """Statistics of a directory that a server has open, from the server's report and from the files."""
    shown: Counter[str] = Counter()
    for store in store_directories(directory):
        shown.update(tools_of(store).live_parts(RealFilesystem(), store))
    return _stats(directory, StreamStats(**contents), {**shown, **parts})


def _stats(directory: Path, contents: StreamStats, parts: dict[str, int]) -> StoreStats:
    free_bytes = RealFilesystem().free_bytes(directory)
    return StoreStats(family_of(directory), contents, _disk_bytes(directory), free_bytes, parts)


def _disk_bytes(directory: Path) -> int:
    total = 0
    directories = (directory, *moved_journals(store_directories(directory)))
    for path in chain.from_iterable(each.rglob("*") for each in directories):
        try:
            if path.is_file():
                # Its allocated blocks, not its length: a database file is sparse.
                total += path.stat().st_blocks * 512
        except FileNotFoundError:
            # A running server may have removed it just now.
            continue
    return total
