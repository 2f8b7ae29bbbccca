"""The interface of the offline tools to a family of storage modes.

The tools (`check`, `stats`, `backup`, `store_copy`) work on a data directory without knowing its storage mode. The
directory says to which family it belongs; `TOOLS` has the implementation of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from headwater.core.catalog import Catalog, StreamState
from headwater.core.floors import floors, own_start
from headwater.core.records import Document, Image, Record
from headwater.storage import extents
from headwater.storage.arrival_times import TimeRun
from headwater.storage.cold_store import UnsavedState
from headwater.storage.filesystem import Bytes, Filesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.stream_data import ColdRuns, DamagedRangeError, StreamData

CopyFile: TypeAlias = Callable[[Path, Path], object]
"""Copy a file up to the size that it has when it is opened, and sync the copy, but not its directory."""


class OfflineSource(ColdRuns, Protocol):
    """A store that is read without being changed: its states, and its bytes by extent."""

    def recover(self, unsaved: UnsavedState) -> Iterator[Record]:
        """Return the records that rebuild the catalog; fill `unsaved`."""

    def name_of(self, stream_id: int) -> str: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Consecutive messages of a stream."""

    message_index: int
    byte_position: int
    pieces: Sequence[Bytes]
    lengths: Sequence[int]
    times: Sequence[TimeRun]


class BulkLoad(Protocol):
    """A new store that is filled from another. Streams are added in order of their ids."""

    def add_stream(self, image: Image, runs: Iterable[StoredRun]) -> None: ...

    def add_document(self, document: Document) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


class OfflineTools(Protocol):
    """The offline operations of one family of storage modes."""

    def problems(self, filesystem: Filesystem, directory: Path) -> Iterator[str]:
        """Yield one sentence for each damaged or inconsistent part of the files."""

    def open(self, filesystem: Filesystem, directory: Path) -> OfflineSource: ...

    def parts(self, filesystem: Filesystem, directory: Path) -> dict[str, int]:
        """Figures about the files of an undamaged directory that no server has open."""

    def live_parts(self, filesystem: Filesystem, directory: Path) -> dict[str, int]:
        """Figures about the files while a server may have them open."""

    def copy(self, filesystem: Filesystem, source: Path, target: Path, copy_file: CopyFile) -> None:
        """Take a consistent copy of the store, while a server may write to it."""

    def bulk_load(self, filesystem: Filesystem, directory: Path, *, shard_count: int, map_bytes: int) -> BulkLoad: ...


class OfflineReader:
    """The whole content of a store, as of its last complete batch."""

    def __init__(self, source: OfflineSource) -> None:
        self._source = source
        self._unsaved = UnsavedState()
        self.catalog: Catalog[StreamState] = Catalog(StreamState)
        for record in source.recover(self._unsaved):
            self.catalog.apply(record)
        self._floors = floors(self.catalog)

    def runs(self, stream: StreamState, max_bytes: int) -> Iterator[StoredRun]:
        """A stream's own messages from the first that can still be read, about `max_bytes` at a time."""
        start = own_start(stream, self._floors[stream.id])
        message_index, byte_position = start.message_index, start.byte_position
        stored, source = self._unsaved.streams[stream.id], self._source
        try:
            while message_index < stream.message_index:
                end_index, end_position = stored.cut(
                    source, stream.id, message_index, byte_position, stream.message_index, max_bytes
                )
                pieces = stored.read(source, stream.id, byte_position, end_position)
                lengths = stored.lengths(source, stream.id, message_index, end_index)
                times = stored.arrivals(source, stream.id, message_index, end_index)
                yield StoredRun(message_index, byte_position, pieces, lengths, times)
                message_index, byte_position = end_index, end_position
        except DamagedRangeError as damage:
            name = source.name_of(stream.id)
            raise CorruptError(f"{name} is damaged at position {damage.byte_position}: {damage}") from damage

    def gaps(self) -> Iterator[str]:
        """Yield a sentence for each gap in the readable bytes of a stream."""
        for stream in self.catalog:
            stored = self._unsaved.streams.get(stream.id)
            if stored is None:
                yield f"Stream {stream.name!r}: its bytes are missing."
                continue
            start = own_start(stream, self._floors[stream.id]).byte_position
            if stored.base_position > start:
                yield f"Stream {stream.name!r}: its bytes from position {start} to {stored.base_position} are missing."
            yield from _chain_gaps(stream, stored)


def _chain_gaps(stream: StreamState, stored: StreamData) -> Iterator[str]:
    if stored.end != (stream.message_index, stream.byte_position):
        yield (
            f"Stream {stream.name!r} ends at position {stream.byte_position} after {stream.message_index} messages,"
            f" but its bytes end at {stored.end[1]} after {stored.end[0]}."
        )
    at = stored.base_index, stored.base_position
    for extent in extents.split(stored.extents):
        if (extent.first_index, extent.byte_position) != at:
            yield f"Stream {stream.name!r}: bytes are missing or duplicated before position {extent.byte_position}."
        at = extent.end_index, extent.end_position


@contextmanager
def open_reader(tools: OfflineTools, filesystem: Filesystem, directory: Path) -> Iterator[OfflineReader]:
    """Read a store in a directory that this process has locked."""
    with ExitStack() as resources:
        try:
            source = resources.enter_context(closing(tools.open(filesystem, directory)))
            reader = OfflineReader(source)
        except OSError as error:
            raise StorageError(f"Data directory {directory} cannot be read: {error}") from error
        yield reader
