"""Fill new stores from existing ones: each stream goes to one of them, with its state, bytes and snapshot.

A stream keeps its id, so forks find their sources, and every ETag and offset stays valid. The bytes of a stream are
copied once, however many forks read them; bytes that cannot be read any more are not copied. At the end the new stores
are read and compared, state by state and byte by byte.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Document
from headwater.storage.blobs import BLOBS_NAME, PAGE_BYTES, FileBlobs
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.offline.check import check
from headwater.storage.offline.families import locked, tools_of, tools_of_mode
from headwater.storage.offline.interface import OfflineReader, StoredRun, open_reader
from headwater.storage.tiering.open import files_of

RUN_BYTES: Final = 8 * 2**20
"""Bytes that are copied at a time: the memory for a stream during a copy, and about the size of an extent."""


@dataclass(frozen=True, slots=True)
class CopiedStore:
    streams: int
    documents: int
    payload_bytes: int
    snapshots: int


@dataclass(frozen=True, slots=True)
class DivisionPlan:
    """The streams and documents of each new store."""

    targets: Mapping[int, int]
    """The store of each stream, by incarnation."""
    documents: Sequence[Mapping[str, bytes]]


Plan: TypeAlias = Callable[[Sequence[Catalog[StreamState]]], DivisionPlan]


def all_in_one(catalogs: Sequence[Catalog[StreamState]]) -> DivisionPlan:
    """A plan that puts everything into one store."""
    documents: dict[str, bytes] = {}
    for catalog in reversed(catalogs):
        documents |= catalog.documents
    return DivisionPlan({stream.id: 0 for catalog in catalogs for stream in catalog}, [documents])


def divide(
    sources: Sequence[Path],
    targets: Sequence[Path],
    mode: str,
    plan: Plan,
    *,
    shard_count: int,
    map_bytes: int,
    within: AbstractContextManager[None] | None = None,
) -> CopiedStore:
    """Fill the stores in `targets`, which are empty directories, from those in `sources`, which no server has open.

    `within` is entered when the sources are locked, and left while they still are.
    """
    filesystem = RealFilesystem()
    tools = tools_of_mode(mode)
    with ExitStack() as resources:
        readers = []
        for source in sources:
            resources.enter_context(locked(filesystem, source))
            readers.append(resources.enter_context(open_reader(tools_of(source), files_of(source), source)))
        if within is not None:
            resources.enter_context(within)
        catalogs = [reader.catalog for reader in readers]
        planned = plan(catalogs)
        digests: dict[int, StreamDigest] = {}
        with ExitStack() as loading:
            loads = [
                loading.enter_context(
                    closing(tools.bulk_load(filesystem, target, shard_count=shard_count, map_bytes=map_bytes))
                )
                for target in targets
            ]
            for reader, stream in _by_id(readers):
                digest = digests[stream.id] = StreamDigest()
                runs = digest.follow(reader.runs(stream, RUN_BYTES))
                loads[planned.targets[stream.id]].add_stream(stream.image(), runs)
            for load, documents in zip(loads, planned.documents, strict=True):
                for key, value in sorted(documents.items()):
                    load.add_document(Document(key, value))
                load.finish()
        snapshots = 0
        for number, target in enumerate(targets):
            for source, catalog in zip(sources, catalogs, strict=True):
                wanted = (stream for stream in catalog if planned.targets[stream.id] == number)
                snapshots += _copy_blobs(source, target, wanted)
            _verify(target, number, catalogs, planned, digests)
    payload = sum(digest.size for digest in digests.values())
    return CopiedStore(len(digests), sum(map(len, planned.documents)), payload, snapshots)


class StreamDigest:
    """A digest of a stream's own messages, independent of how they are divided into runs."""

    __slots__ = ("_bytes", "_lengths", "_times", "size")

    def __init__(self) -> None:
        self._bytes = hashlib.blake2b()
        self._lengths = hashlib.blake2b()
        self._times = hashlib.blake2b()
        self.size = 0

    def follow(self, runs: Iterable[StoredRun]) -> Iterator[StoredRun]:
        for run in runs:
            self._lengths.update(array("Q", run.lengths).tobytes())
            for messages, at_ms in run.times:
                self._times.update(array("Q", [at_ms]) * messages)
            for piece in run.pieces:
                self._bytes.update(piece)
                self.size += len(piece)
            yield run

    def digest(self) -> tuple[int, bytes, bytes, bytes]:
        return self.size, self._bytes.digest(), self._lengths.digest(), self._times.digest()


def _by_id(readers: Sequence[OfflineReader]) -> list[tuple[OfflineReader, StreamState]]:
    """All streams in the order of their ids, which is the order in which a store is filled."""
    found = [(reader, stream) for reader in readers for stream in reader.catalog]
    return sorted(found, key=lambda item: item[1].id)


def _copy_blobs(source: Path, target: Path, streams: Iterable[StreamState]) -> int:
    wanted = {
        stream.snapshot.blob_id: stream.name for stream in streams if stream.snapshot is not None and not stream.deleted
    }
    if not wanted:
        return 0
    here = FileBlobs(files_of(source), source / BLOBS_NAME, durable=False)
    there = FileBlobs(RealFilesystem(), target / BLOBS_NAME, durable=True)
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


def _verify(
    directory: Path,
    number: int,
    catalogs: Sequence[Catalog[StreamState]],
    planned: DivisionPlan,
    digests: dict[int, StreamDigest],
) -> None:
    for problem in check(directory):
        raise StorageError(f"The copy has a problem: {problem}")
    filesystem = RealFilesystem()
    with locked(filesystem, directory), open_reader(tools_of(directory), filesystem, directory) as reader:
        found = reader.catalog
        expected = {
            stream.id: stream.image()
            for catalog in catalogs
            for stream in catalog
            if planned.targets[stream.id] == number
        }
        if {stream.id: stream.image() for stream in found} != expected or found.documents != planned.documents[number]:
            raise StorageError("The copy differs from the original in the states of streams or documents.")
        for stream in found:
            digest = StreamDigest()
            for _ in digest.follow(reader.runs(stream, RUN_BYTES)):
                pass
            if digest.digest() != digests[stream.id].digest():
                raise StorageError(f"The copy of stream {stream.name!r} differs from the original.")
