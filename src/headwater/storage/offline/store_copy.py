"""Copy a store into a new one, of any mode: streams with all their state, what forks share, documents, blobs.

A stream keeps its id, so forks find their sources, and every ETag and offset stays valid. The bytes of a stream are
copied once, however many forks read them; what cannot be read any more is left out. At the end the copy is read back
and compared, state by state and byte by byte.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Document, Image
from headwater.storage.blobs import BLOBS_NAME, PAGE_BYTES, FileBlobs
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.offline.atomic_install import atomic_install
from headwater.storage.offline.check import check
from headwater.storage.offline.families import family_of, locked, tools_of, tools_of_mode
from headwater.storage.offline.interface import BulkLoad, OfflineReader, StoredRun, open_reader

RUN_BYTES: Final = 8 * 2**20
"""Copied at a time: what a copy holds in memory of a stream, and about the size of an extent."""


@dataclass(frozen=True, slots=True)
class CopiedStore:
    streams: int
    documents: int
    payload_bytes: int
    snapshots: int


def copy_between(
    source: Path, source_mode: str, target: Path, target_mode: str, *, shard_count: int, map_bytes: int
) -> CopiedStore:
    """Copy the store in `source`, which no server has open, into `target`, which must be new or empty."""
    family_of(source, source_mode)
    if source.resolve() == target.resolve():
        raise StorageError(f"{source} cannot be copied onto itself.")
    filesystem = RealFilesystem()
    with (
        atomic_install(target) as place,
        locked(filesystem, source),
        open_reader(tools_of(source), filesystem, source) as reader,
    ):
        digests: dict[int, StreamDigest] = {}
        tools = tools_of_mode(target_mode)
        with closing(tools.bulk_load(filesystem, place, shard_count=shard_count, map_bytes=map_bytes)) as load:
            _fill(load, reader, digests)
        snapshots = _copy_blobs(source, place, reader.catalog)
        _verify(place, reader.catalog, digests)
    payload = sum(digest.size for digest in digests.values())
    return CopiedStore(len(reader.catalog), len(reader.catalog.documents), payload, snapshots)


class StreamDigest:
    """A digest of a stream's own messages, independent of how they are divided into runs."""

    __slots__ = ("_bytes", "_lengths", "size")

    def __init__(self) -> None:
        self._bytes = hashlib.blake2b()
        self._lengths = hashlib.blake2b()
        self.size = 0

    def follow(self, runs: Iterable[StoredRun]) -> Iterator[StoredRun]:
        for run in runs:
            self._lengths.update(array("Q", run.lengths).tobytes())
            for piece in run.pieces:
                self._bytes.update(piece)
                self.size += len(piece)
            yield run

    def digest(self) -> tuple[int, bytes, bytes]:
        return self.size, self._bytes.digest(), self._lengths.digest()


def _fill(load: BulkLoad, reader: OfflineReader, digests: dict[int, StreamDigest]) -> None:
    for stream in sorted(reader.catalog, key=lambda stream: stream.id):
        digest = digests[stream.id] = StreamDigest()
        load.add_stream(stream.image(), digest.follow(reader.runs(stream, RUN_BYTES)))
    for key, value in sorted(reader.catalog.documents.items()):
        load.add_document(Document(key, value))
    load.finish()


# -- blobs, and the comparison -----------------------------------------------------------------------------------------


def _copy_blobs(source: Path, target: Path, catalog: Catalog[StreamState]) -> int:
    wanted = {
        stream.snapshot.blob_id: stream.name for stream in catalog if stream.snapshot is not None and not stream.deleted
    }
    if not wanted:
        return 0
    filesystem = RealFilesystem()
    here = FileBlobs(filesystem, source / BLOBS_NAME, durable=False)
    there = FileBlobs(filesystem, target / BLOBS_NAME, durable=True)
    for blob_id, name in wanted.items():
        try:
            with closing(here.open(blob_id)) as blob:
                writer = there.create(blob_id)
                for start in range(0, blob.size, PAGE_BYTES):
                    writer.write(blob.read(start, min(start + PAGE_BYTES, blob.size)))
                writer.finish()
        except StorageError as error:
            raise StorageError(f"Stream {name!r}: its snapshot cannot be copied: {error}") from error
    return len(wanted)


def _verify(directory: Path, catalog: Catalog[StreamState], digests: dict[int, StreamDigest]) -> None:
    for problem in check(directory):
        raise StorageError(f"The copy is not sound: {problem}")
    filesystem = RealFilesystem()
    with locked(filesystem, directory), open_reader(tools_of(directory), filesystem, directory) as reader:
        found = reader.catalog
        if _states(found) != _states(catalog) or found.documents != catalog.documents:
            raise StorageError("The copy's states are not those of the original.")
        for stream in found:
            digest = StreamDigest()
            for _ in digest.follow(reader.runs(stream, RUN_BYTES)):
                pass
            if digest.digest() != digests[stream.id].digest():
                raise StorageError(f"The copy of stream {stream.name!r} differs from the original.")


def _states(catalog: Catalog[StreamState]) -> dict[int, Image]:
    return {stream.id: stream.image() for stream in catalog}
