"""Check a data directory that no server has open: every checksum, every index, every snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from headwater.core.catalog import Catalog, StreamState
from headwater.storage.blobs import BLOBS_NAME, PAGE_BYTES, FileBlobs
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError
from headwater.storage.offline.families import family_of, locked, tools_of
from headwater.storage.offline.interface import open_reader
from headwater.storage.tiering.open import files_of
from headwater.storage.worker_stores import store_directories


def check(directory: Path, mode: str | None = None) -> Iterator[str]:
    """Yield one sentence for each problem. Raises `StorageError` if the directory cannot be opened."""
    family_of(directory, mode)
    for store in store_directories(directory):
        where = f"{store.relative_to(directory)}: " if store != directory else ""
        yield from (where + problem for problem in _check_store(store))


def _check_store(directory: Path) -> Iterator[str]:
    filesystem = files_of(directory)
    tools = tools_of(directory)
    with locked(filesystem, directory):
        found = False
        for problem in tools.problems(filesystem, directory):
            found = True
            yield problem
        if found:
            return
        with open_reader(tools, filesystem, directory) as reader:
            for gap in reader.gaps():
                found = True
                yield gap
        if not found:
            yield from _check_blobs(filesystem, directory, reader.catalog)


def _check_blobs(filesystem: Filesystem, directory: Path, catalog: Catalog[StreamState]) -> Iterator[str]:
    """Check that the snapshot of every stream exists and that the checksums of its pages match."""
    if not (directory / BLOBS_NAME).exists():
        yield from _missing(stream for stream in catalog if stream.snapshot is not None and not stream.deleted)
        return
    blobs = FileBlobs(filesystem, directory / BLOBS_NAME, durable=False)
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
