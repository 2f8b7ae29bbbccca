"""Looking into a data directory that no server has open: is everything in it sound, and what is it made of?

`check` reads every byte of manifest, packs and log against its checksum, every index against what it must be, and all
of them against each other. It changes nothing, and goes on after what it finds: one report names all damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from headwater.core.records import Image, Record
from headwater.storage.directory import open_directory
from headwater.storage.extents import split
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.journal.replay import Replay
from headwater.storage.journal.segments import segment_numbers, segment_path
from headwater.storage.journaled_store import FAMILY
from headwater.storage.packs.manifest import NAME, Manifest
from headwater.storage.packs.pack import PAGE_BYTES, DamagedPageError, Located, Pack, PackInfo, pack_path
from headwater.storage.packs.recovery import LOG_NAME, PACKS_NAME, Recovery


class Finding(NamedTuple):
    """Something that is not as it was written."""

    path: Path
    stream: str | None
    """The stream that is harmed, where it can be told."""
    position: int | None
    """The first position of the stream that may be harmed."""
    what: str

    def __str__(self) -> str:
        if self.stream is None:
            return self.what
        return f"{self.stream} is damaged from position {self.position} on: {self.what}"


@dataclass(frozen=True, slots=True)
class AtRest:
    """What a directory is made of."""

    streams: int
    payload_bytes: int
    log_segments: int
    log_bytes: int
    packs: int
    pack_bytes: int
    live_bytes: int
    dead_bytes: int
    manifest_bytes: int
    free_bytes: int


def check(filesystem: Filesystem, path: Path) -> list[Finding]:
    """Everything that is wrong with a directory; nothing means that it is sound."""
    directory = open_directory(filesystem, path, FAMILY, create=False)
    try:
        return list(_findings(filesystem, path))
    finally:
        directory.close()


def stats(filesystem: Filesystem, path: Path) -> AtRest:
    """The figures of a sound directory. Raises `CorruptError` for one that is not."""
    directory = open_directory(filesystem, path, FAMILY, create=False)
    try:
        manifest = Manifest(filesystem, path)
        recovery = Recovery(filesystem, path, manifest)
        for _ in recovery.records():
            pass
        logs = [segment_path(path / LOG_NAME, n) for n in segment_numbers(filesystem, path / LOG_NAME)]
        live = sum(extent.length for stored in recovery.streams.values() for extent in split(stored.extents))
        data = sum(info.data_bytes for info in manifest.packs.values())
        return AtRest(
            streams=len(recovery.streams),
            payload_bytes=sum(stored.payload_bytes for stored in recovery.streams.values()),
            log_segments=len(logs),
            log_bytes=sum(map(filesystem.size, logs)),
            packs=len(manifest.packs),
            pack_bytes=sum(info.size for info in manifest.packs.values()),
            live_bytes=live,
            dead_bytes=data - live,
            manifest_bytes=filesystem.size(path / NAME),
            free_bytes=filesystem.free_bytes(path),
        )
    finally:
        directory.close()


def _findings(filesystem: Filesystem, path: Path) -> Iterator[Finding]:
    manifest = Manifest(filesystem, path)
    names: dict[int, str] = {}
    try:
        for kept in manifest.load():
            if isinstance(kept.state, Image):
                names[kept.state.id] = kept.state.name
    except (CorruptError, OSError) as error:
        # Without it nobody knows which packs count, and where the log begins.
        yield Finding(path / NAME, None, None, str(error))
        return

    def name_of(stream_id: int) -> str | None:
        name = names.get(stream_id)
        return f"stream {name!r} ({stream_id:016x})" if name is not None else None

    packs_are_whole = True
    for info in manifest.packs.values():
        for finding in _pack_findings(filesystem, path / PACKS_NAME, info, name_of):
            packs_are_whole = packs_are_whole and finding.stream is not None
            yield finding
    try:
        if packs_are_whole:
            # Goes over the manifest and the packs' directories once more, now against each other and the log.
            _exhaust(Recovery(filesystem, path, Manifest(filesystem, path)).records())
        else:
            for _ in Replay(filesystem, path / LOG_NAME, manifest.segment, name_of).batches():
                pass
    except (StorageError, OSError) as error:
        yield Finding(path / LOG_NAME, None, None, str(error))


def _exhaust(records: Iterator[Record]) -> None:
    for _ in records:
        pass


def _pack_findings(
    filesystem: Filesystem, directory: Path, info: PackInfo, name_of: Callable[[int], str | None]
) -> Iterator[Finding]:
    path = pack_path(directory, info.number)
    try:
        pack = Pack(filesystem, directory, info)
    except (CorruptError, OSError) as error:
        yield Finding(path, None, None, str(error))
        return
    try:
        found = list(pack.extents())
        damage = list(pack.check_all())
        for each in damage:
            yield from _harmed(path, each, found, name_of)
        if not damage:
            yield from _index_findings(path, pack, found, name_of)
    except (CorruptError, OSError) as error:
        yield Finding(path, None, None, str(error))
    finally:
        pack.close()


def _harmed(
    path: Path, damage: DamagedPageError, found: list[Located], name_of: Callable[[int], str | None]
) -> Iterator[Finding]:
    """The streams that a damaged page harms: those with bytes or index in it."""
    nobody = True
    for stream_id, extent in found:
        index_end = extent.offset + extent.length + 3 + 4 * extent.messages
        if extent.offset < damage.offset + PAGE_BYTES and damage.offset < index_end and name_of(stream_id) is not None:
            nobody = False
            position = extent.position + min(max(damage.offset - extent.offset, 0), extent.length)
            yield Finding(path, name_of(stream_id), position, str(damage))
    if nobody:
        yield Finding(path, None, None, f"{damage} (no living stream has bytes there)")


def _index_findings(
    path: Path, pack: Pack, found: list[Located], name_of: Callable[[int], str | None]
) -> Iterator[Finding]:
    for stream_id, extent in found:
        ends = pack.ends(extent).slice(0, extent.messages).tolist()
        if ends[-1] != extent.length or any(later <= earlier for earlier, later in pairwise([0, *ends])):
            name = name_of(stream_id) or f"stream {stream_id:016x}"
            yield Finding(path, name, extent.position, f"{path}: the index at byte {extent.offset} makes no sense")
