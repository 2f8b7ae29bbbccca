"""Store statistics: what a data directory holds, and the files that it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwater.storage.filesystem import RealFilesystem
from headwater.storage.offline.families import family_of, locked, tools_of
from headwater.storage.offline.interface import open_reader
from headwater.storage.stream_stats import StreamStats, stream_stats


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `headwater store stats` reports."""

    family: str
    contents: StreamStats
    disk_bytes: int
    """What all files of the directory take."""
    free_bytes: int
    """Space left on the file system."""
    parts: dict[str, int] = field(default_factory=dict)
    """Figures about the files, which differ between the storage modes."""


def offline_stats(directory: Path) -> StoreStats:
    """Statistics of a directory that no server has open."""
    filesystem = RealFilesystem()
    tools = tools_of(directory)
    with locked(filesystem, directory):
        with open_reader(tools, filesystem, directory) as reader:
            contents = stream_stats(reader.catalog)
        parts = tools.parts(filesystem, directory)
    return _stats(directory, contents, parts)


def live_stats(directory: Path, contents: Mapping[str, int], parts: Mapping[str, int]) -> StoreStats:
    """Statistics of a directory that a server has open, from what it reports and from the files."""
    shown = tools_of(directory).live_parts(RealFilesystem(), directory)
    return _stats(directory, StreamStats(**contents), {**shown, **parts})


def _stats(directory: Path, contents: StreamStats, parts: dict[str, int]) -> StoreStats:
    free_bytes = RealFilesystem().free_bytes(directory)
    return StoreStats(family_of(directory), contents, _disk_bytes(directory), free_bytes, parts)


def _disk_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                # The blocks that it takes, not its length: a database has holes.
                total += path.stat().st_blocks * 512
        except FileNotFoundError:
            # A server that runs may have removed it just now.
            continue
    return total
