"""Looking into a data directory of whatever mode: is it whole, and what does it hold.

The directory says itself of which family it is; these commands ask it, and take a mode only to contradict it early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Delete
from headwater.storage.acid import check as acid_check
from headwater.storage.acid.layout import DIRECTORY as ACID_DIRECTORY
from headwater.storage.acid.layout import read_manifest
from headwater.storage.blobs import BLOBS_NAME, PAGE_BYTES, FileBlobs
from headwater.storage.directory import Format, open_directory, read_format
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.packs import check as pack_check
from headwater.storage.packs.manifest import NAME as MANIFEST_NAME
from headwater.storage.packs.offline_reader import PackReader
from headwater.storage.packs.recovery import LOG_NAME, PACKS_NAME
from headwater.storage.stats import StreamStats, stream_stats

FAMILY_OF_MODE: Final[Mapping[str, str]] = {"file-fast": "log", "file-durable": "log", "acid": "acid"}


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What `headwater store stats` tells."""

    family: str
    contents: StreamStats
    disk_bytes: int
    """What all files of the directory take."""
    free_bytes: int
    """Space left on the file system."""
    parts: dict[str, int] = field(default_factory=dict)
    """What the store is made of, by the words of its mode."""


def family_of(directory: Path, mode: str | None = None) -> str:
    """The family that a data directory is of. Raises `StorageError` if it is none of ours, or not of this mode."""
    filesystem = RealFilesystem()
    found: Format = read_format(filesystem, directory)
    if found.family not in FAMILY_OF_MODE.values():
        raise StorageError(f"Data directory {directory} was written by an unknown storage mode ({found.family!r}).")
    if mode is not None and FAMILY_OF_MODE[mode] != found.family:
        # Says what the directory is, in the words of a start.
        open_directory(filesystem, directory, FAMILY_OF_MODE[mode], create=False).close()
    return found.family


def check(directory: Path, mode: str | None = None) -> Iterator[str]:
    """Every problem found in a directory at rest, a sentence each; none when all is well.

    Raises `StorageError` if it cannot even look.
    """
    family = family_of(directory, mode)
    catalog: Catalog[StreamState] = Catalog(StreamState)
    if family == "acid":
        if not (directory / ACID_DIRECTORY).exists():
            # Locked once and stopped before it began: as a start would find it.
            return
        found = False
        for problem in acid_check.check(directory):
            found = True
            yield problem
        if found:
            return
        read_acid_states(directory, catalog)
    else:
        findings = log_findings(directory)
        yield from findings
        if findings:
            return
        with _viewed(directory, catalog) as view:
            gaps = tuple(view.gaps(catalog))
        yield from gaps
        if gaps:
            return
    yield from _check_blobs(directory, catalog)


def stats_at_rest(directory: Path) -> StoreStats:
    """What a directory holds that no server has open."""
    family = family_of(directory)
    catalog: Catalog[StreamState] = Catalog(StreamState)
    parts: dict[str, int]
    if family == "acid":
        with closing(open_directory(RealFilesystem(), directory, family, create=False)):
            parts = acid_parts(directory)
            read_acid_states(directory, catalog)
    else:
        parts = log_parts(directory)
        with _viewed(directory, catalog):
            pass
    return StoreStats(
        family, stream_stats(catalog), disk_bytes(directory), RealFilesystem().free_bytes(directory), parts
    )


def stats_beside(directory: Path, contents: Mapping[str, int], parts: Mapping[str, int]) -> StoreStats:
    """What a directory holds that a server has open, by what it tells and by what its files show."""
    family = family_of(directory)
    if family == "acid":
        shown = acid_parts(directory)
    else:
        logs = [path for path in (directory / LOG_NAME).iterdir() if path.suffix == ".log"]
        packs = [path for path in (directory / PACKS_NAME).iterdir() if path.suffix == ".pack"]
        shown = {"log_bytes": _sizes(logs), "pack_bytes": _sizes(packs)}
    return StoreStats(
        family,
        StreamStats(**contents),
        disk_bytes(directory),
        RealFilesystem().free_bytes(directory),
        {**parts, **shown},
    )


def log_findings(directory: Path) -> list[str]:
    """What is wrong with a store of the log at rest."""
    filesystem = RealFilesystem()
    if filesystem.exists(directory / MANIFEST_NAME):
        return [str(finding) for finding in pack_check.check(filesystem, directory)]
    try:
        # Either it was never used, or its manifest is lost.
        with _viewed(directory, Catalog(StreamState)):
            return []
    except CorruptError as error:
        return [str(error)]


def log_parts(directory: Path) -> dict[str, int]:
    """What a store of the log at rest is made of."""
    filesystem = RealFilesystem()
    names = ("segments", "log_bytes", "packs", "pack_bytes", "live_bytes", "dead_bytes")
    if not filesystem.exists(directory / MANIFEST_NAME):
        return dict.fromkeys(names, 0)
    found = pack_check.stats(filesystem, directory)
    return dict(
        zip(
            names,
            (
                found.log_segments,
                found.log_bytes,
                found.packs,
                found.pack_bytes,
                found.live_bytes,
                found.dead_bytes,
            ),
            strict=True,
        )
    )


@contextmanager
def _viewed(directory: Path, catalog: Catalog[StreamState]) -> Iterator[PackReader]:
    """A store of the log at rest, with what it knows of its streams."""
    filesystem = RealFilesystem()
    with (
        closing(open_directory(filesystem, directory, "log", create=False)),
        closing(PackReader(filesystem, directory)) as view,
    ):
        for record in view.recover():
            catalog.apply(record)
        yield view


def acid_parts(directory: Path) -> dict[str, int]:
    """What an `acid` store is made of. The server may be running, in another process."""
    if not (directory / ACID_DIRECTORY).exists():
        return {"shards": 0, "shard_bytes": 0, "used_bytes": 0, "journal_entries": 0, "journal_bytes": 0}
    found = acid_check.stats(directory)
    return {
        "shards": len(found.shards),
        "shard_bytes": sum(shard.file_bytes for shard in found.shards),
        "used_bytes": sum(shard.used_bytes for shard in found.shards),
        "journal_entries": found.journal_entries,
        "journal_bytes": found.journal_bytes,
    }


def read_acid_states(directory: Path, catalog: Catalog[StreamState]) -> None:
    """What the shards know, and then what only the journal does, in the order in which it was written."""
    root = directory / ACID_DIRECTORY
    if not root.exists():
        return
    manifest = read_manifest(root)
    reached: list[int] = []
    for number in range(manifest.shard_count):
        with closing(acid_check.open_shard(root, number, manifest)) as shard:
            reached.append(shard.ledger.seq)
            for state in shard.states():
                catalog.apply(state)
    with closing(acid_check.open_journal(root, manifest)) as journal:
        for seq, batch in journal.entries():
            for routed in batch:
                if reached[routed.shard] < seq:
                    if isinstance(routed.record, Delete):
                        # What goes with it is told beside: some of it may be gone from its shard already.
                        catalog.by_id[routed.record.id].deleted = True
                    else:
                        catalog.apply(routed.record)
                for stream_id, owner in routed.removed:
                    if reached[owner] < seq:
                        gone = catalog.by_id.pop(stream_id)
                        if catalog.by_name.get(gone.name) is gone:
                            del catalog.by_name[gone.name]


def disk_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                # What it takes, not how long it says it is: a database has holes.
                total += path.stat().st_blocks * 512
        except FileNotFoundError:
            # A server that runs may have removed it just now.
            continue
    return total


def _sizes(paths: Iterable[Path]) -> int:
    total = 0
    for path in paths:
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _check_blobs(directory: Path, catalog: Catalog[StreamState]) -> Iterator[str]:
    """Whether the snapshot of every stream is there, and every page of it is what was written."""
    if not (directory / BLOBS_NAME).exists():
        yield from _missing(stream for stream in catalog if stream.snapshot is not None and not stream.deleted)
        return
    blobs = FileBlobs(RealFilesystem(), directory / BLOBS_NAME, durable=False)
    seen: set[int] = set()
    for stream in catalog:
        ref = stream.snapshot
        if ref is None or stream.deleted or ref.blob_id in seen:
            continue
        seen.add(ref.blob_id)
        try:
            blob = blobs.open(ref.blob_id)
        except CorruptError as error:
            yield f"Stream {stream.name!r}: its snapshot at position {ref.byte_position} cannot be read: {error}"
            continue
        with closing(blob):
            if blob.size != ref.size:
                yield f"Stream {stream.name!r}: its snapshot has {blob.size} bytes instead of {ref.size}."
                continue
            for start in range(0, blob.size, PAGE_BYTES):
                try:
                    blob.read(start, min(start + PAGE_BYTES, blob.size))
                except (CorruptError, OSError) as error:
                    yield f"Stream {stream.name!r}: its snapshot at position {ref.byte_position} is damaged: {error}"


def _missing(streams: Iterable[StreamState]) -> Iterator[str]:
    for stream in streams:
        yield f"Stream {stream.name!r}: its snapshot is missing."
