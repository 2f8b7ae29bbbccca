"""Copying a store into a new one, of whatever mode: streams with all their state, what forks share, documents, blobs.

A stream keeps its incarnation's id, so forks find their sources, and every ETag and offset stays good. The bytes of an
incarnation are copied once, however many forks read them; what nobody can ask for any more stays behind. When all is
there it is read back and compared, state by state and byte by byte.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from headwater.core.catalog import Catalog, StreamState
from headwater.core.floors import floors, own_start
from headwater.core.offsets import Offset
from headwater.core.records import Append, Document, Image, Record
from headwater.storage.acid import AcidStorage
from headwater.storage.acid.layout import DIRECTORY as ACID_DIRECTORY
from headwater.storage.acid.layout import read_manifest
from headwater.storage.acid.live_copy import copy_store
from headwater.storage.blobs import BLOBS_NAME, PAGE_BYTES, FileBlobs
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Committed, StorageError
from headwater.storage.offline.atomic_install import atomic_install
from headwater.storage.offline.backup import BACKUP_NAME
from headwater.storage.offline.check import FAMILY_OF_MODE, check, family_of
from headwater.storage.packs.bulk_load import PackBulkLoad, Run
from headwater.storage.packs.offline_reader import PackReader

RUN_BYTES: Final = 8 * 2**20
"""Copied at a time, and about the size of an extent: what a copy holds in memory of a stream."""
BATCH_BYTES: Final = 4 * 2**20
HOT_BYTES: Final = 64 * 2**20


class Source(Protocol):
    """A store to copy from."""

    def recover(self) -> Iterable[Record]: ...

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]: ...

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]: ...

    def read(self, stream_id: int, position: int, end_position: int) -> Sequence[bytes | memoryview]: ...

    def close(self) -> None: ...


class Sink(Protocol):
    """A new store to copy into. Streams come in the order of their ids."""

    def add_stream(self, image: Image, runs: Iterable[Run]) -> None: ...

    def add_document(self, document: Document) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Copied:
    streams: int
    documents: int
    payload_bytes: int
    snapshots: int


def copy_between(
    source: Path, source_mode: str, target: Path, target_mode: str, *, shard_count: int, map_bytes: int
) -> Copied:
    """Copy the store in `source`, which no server has open, into `target`, which must be new or empty."""
    family_of(source, source_mode)
    if source.resolve() == target.resolve():
        raise StorageError(f"{source} cannot be copied onto itself.")
    with atomic_install(target) as place, _opened(source, map_bytes, place) as (opened, catalog):
        digests: dict[int, Digest] = {}
        with closing(_sink(place, target_mode, shard_count, map_bytes)) as sink:
            _fill(sink, opened, catalog, digests)
        snapshots = _copy_blobs(source, place, catalog)
        _verify(place, map_bytes, catalog, digests)
    payload = sum(digest.size for digest in digests.values())
    return Copied(len(catalog), len(catalog.documents), payload, snapshots)


class Digest:
    """What a stream's own messages come to, however they are cut into runs."""

    __slots__ = ("_bytes", "_lengths", "size")

    def __init__(self) -> None:
        self._bytes = hashlib.blake2b()
        self._lengths = hashlib.blake2b()
        self.size = 0

    def follow(self, runs: Iterable[Run]) -> Iterator[Run]:
        for run in runs:
            self._lengths.update(array("Q", run.lengths).tobytes())
            for piece in run.pieces:
                self._bytes.update(piece)
                self.size += len(piece)
            yield run

    def digest(self) -> tuple[int, bytes, bytes]:
        return self.size, self._bytes.digest(), self._lengths.digest()


def _fill(sink: Sink, source: Source, catalog: Catalog[StreamState], digests: dict[int, Digest]) -> None:
    floor_of = floors(catalog)
    for stream in sorted(catalog, key=lambda stream: stream.id):
        digest = digests[stream.id] = Digest()
        runs = _runs(source, stream, own_start(stream, floor_of[stream.id]))
        sink.add_stream(stream.image(), digest.follow(runs))
    for key, value in sorted(catalog.documents.items()):
        sink.add_document(Document(key, value))
    sink.finish()


def _runs(source: Source, stream: StreamState, start: Offset) -> Iterator[Run]:
    """A stream's own messages from `start` on, some at a time."""
    index, position = start.message_index, start.byte_position
    while index < stream.message_index:
        end_index, end_position = source.cut(stream.id, index, position, stream.message_index, RUN_BYTES)
        pieces = source.read(stream.id, position, end_position)
        yield Run(index, position, pieces, source.lengths(stream.id, index, end_index))
        index, position = end_index, end_position


# -- stores to copy from -----------------------------------------------------------------------------------------------


@contextmanager
def _opened(directory: Path, map_bytes: int, scratch: Path) -> Iterator[tuple[Source, Catalog[StreamState]]]:
    with _source(directory, map_bytes, scratch) as source:
        catalog: Catalog[StreamState] = Catalog(StreamState)
        for record in source.recover():
            catalog.apply(record)
        yield source, catalog


@contextmanager
def _source(directory: Path, map_bytes: int, scratch: Path) -> Iterator[Source]:
    if family_of(directory) == "log":
        filesystem = RealFilesystem()
        with (
            closing(open_directory(filesystem, directory, "log", create=False)),
            closing(PackReader(filesystem, directory)) as view,
        ):
            yield view
        return
    if not (directory / ACID_DIRECTORY).exists():
        raise StorageError(f"{directory} has no store in it: it was never started.")
    with ExitStack() as resources:
        if (directory / BACKUP_NAME).exists():
            # To be opened it must be written to (its journal is carried into the shards), and a backup must not change.
            temporary = resources.enter_context(tempfile.TemporaryDirectory(dir=scratch, prefix=".copy-"))
            copy_store(directory, Path(temporary))
            directory = Path(temporary)
        shards = read_manifest(directory / ACID_DIRECTORY).shard_count
        yield resources.enter_context(closing(AcidStorage(directory, shards, map_bytes, HOT_BYTES)))


# -- stores to copy into -----------------------------------------------------------------------------------------------


def _sink(directory: Path, mode: str, shard_count: int, map_bytes: int) -> Sink:
    if FAMILY_OF_MODE[mode] == "log":
        return PackBulkLoad(RealFilesystem(), directory)
    return _AcidSink(AcidStorage(directory, shard_count, map_bytes, HOT_BYTES))


class _AcidSink:
    """Fills an `acid` store by way of its interface: the stream without its bytes, its bytes, then its whole state."""

    def __init__(self, storage: AcidStorage) -> None:
        self._storage = storage
        self._batch: list[Committed] = []
        self._size = 0
        for _ in storage.recover():
            raise AssertionError("a new store is empty")

    def add_stream(self, image: Image, runs: Iterable[Run]) -> None:
        begun = False
        for run in runs:
            if not begun:
                self._put(_bare(image, run.index, run.position), 0)
                begun = True
            payload = b"".join(run.pieces)
            lengths = tuple(run.lengths)
            self._put(Append(image.id, image.written_ms, run.index, run.position, payload, lengths), len(payload))
        self._put(image, 0)

    def add_document(self, document: Document) -> None:
        self._put(document, len(document.value or b""))

    def finish(self) -> None:
        self._write()

    def close(self) -> None:
        self._storage.close()

    def _put(self, record: Record, size: int) -> None:
        self._batch.append(Committed(record))
        self._size += size + 256
        if self._size >= BATCH_BYTES:
            self._write()

    def _write(self) -> None:
        if self._batch:
            self._storage.write(self._batch)
            self._storage.publish(self._batch)
            self._storage.maintain(lambda _: None)
        self._batch = []
        self._size = 0


def _bare(image: Image, index: int, position: int) -> Image:
    """A stream before any of its bytes are there."""
    return msgspec.structs.replace(
        image,
        message_index=index,
        byte_position=position,
        closed=False,
        closed_by=None,
        producers={},
        ages=None,
        deleted=False,
    )


# -- blobs, and whether all is there -----------------------------------------------------------------------------------


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


def _verify(directory: Path, map_bytes: int, catalog: Catalog[StreamState], digests: dict[int, Digest]) -> None:
    for problem in check(directory):
        raise StorageError(f"The copy is not sound: {problem}")
    with _opened(directory, map_bytes, directory) as (copy, found):
        if _states(found) != _states(catalog) or found.documents != catalog.documents:
            raise StorageError("The copy's states are not those of the original.")
        floor_of = floors(found)
        for stream in found:
            digest = Digest()
            for _ in digest.follow(_runs(copy, stream, own_start(stream, floor_of[stream.id]))):
                pass
            if digest.digest() != digests[stream.id].digest():
                raise StorageError(f"The copy of stream {stream.name!r} differs from the original.")


def _states(catalog: Catalog[StreamState]) -> dict[int, Image]:
    return {stream.id: stream.image() for stream in catalog}
