"""The storage modes with a journal: `file-fast` and `file-durable` over packs, `acid` over LMDB shards.

A write is one append to the journal, synced in `file-durable` and `acid`; it does not change anything that readers use.
Data that is in the journal but not yet in the cold store is held in memory: when it reaches half of `hot_tail_bytes`, a
checkpoint begins. A write never waits for it; at twice `hot_tail_bytes`, the store is `busy` and refuses new writes for
a moment. Invariant: what is readable is in the cold store or in memory, without a gap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from headwater.core.records import Append, Create, Delete, Document, Record
from headwater.storage.arrival_times import TimeRun
from headwater.storage.cold_store import ColdStore, UnsavedState, document_bytes
from headwater.storage.directory import Directory
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import (
    Committed,
    CorruptError,
    ImageOf,
    StorageError,
    Usage,
    WriteFailedError,
    check_batch,
)
from headwater.storage.journal.segments import FileJournal
from headwater.storage.maintenance import SEGMENTS_MAX, Maintenance
from headwater.storage.stream_data import DamagedRangeError, memory_of, new_stream
from headwater.storage.worker import ThreadWorker, Worker

log = logging.getLogger("headwater.storage")

FREE_CHECK_S: Final = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Sizes and limits of a store. The defaults suit a server; tests use very small ones."""

    segment_bytes: int = 64 * 1024 * 1024
    hot_tail_bytes: int = 64 * 1024 * 1024
    busy_floor_bytes: int = 16 * 1024 * 1024
    """The store is not busy while less than this is unsaved, even if `hot_tail_bytes` is smaller."""
    reserve_bytes: int | None = None
    """New writes are refused when less is free. By default enough for a checkpoint and two segments."""
    segments_max: int = SEGMENTS_MAX
    big_bytes: int = 1024 * 1024
    """In packs: extents of this size are no longer merged."""
    fanout: int = 8
    """In packs: this many of one tier are merged into one of the next."""
    open_packs_max: int = 128
    manifest_floor_bytes: int = 1024 * 1024
    """In packs: a smaller manifest is never rewritten."""
    journal_dir: Path | None = None
    """The directory of the journal, if not in the data directory: absolute, and without links."""
    clock_check_every: int = 16
    """Streams that maintenance handles between two checks of the clock."""

    @property
    def reserve(self) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return self.hot_tail_bytes + 2 * self.segment_bytes


class JournaledStorage:
    def __init__(
        self,
        filesystem: Filesystem,
        directory: Directory,
        cold: ColdStore,
        *,
        durable: bool,
        settings: StoreSettings | None = None,
        worker: Worker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._path: Final[Path] = directory.path
        self._cold = cold
        self._durable = durable
        self._settings = settings if settings is not None else StoreSettings()
        self._worker = worker if worker is not None else ThreadWorker()
        self._clock = clock
        self._unsaved = UnsavedState()
        self._streams = self._unsaved.streams
        self._payload_bytes = 0
        self._journal: FileJournal | None = None
        self._maintenance: Maintenance | None = None
        self._reserve_bytes = self._settings.reserve
        self._free_bytes = 0
        self._free_checked_at: float | None = None

    @property
    def waits_for_disk(self) -> bool:
        # Also without syncs: a write is a system call, one for a whole loop iteration, and may block.
        return True

    # -- startup and shutdown --------------------------------------------------------------------------------------

    def recover(self) -> Iterator[Record]:
        unsaved = self._unsaved
        settings = self._settings
        try:
            yield from self._cold.recover(unsaved)
            self._journal = self._cold.open_journal(segment_bytes=settings.segment_bytes, durable=self._durable)
        except OSError as error:
            # A file that cannot be read may contain acknowledged data: starting without it would lose that.
            raise StorageError(f"Data directory {self._path} cannot be recovered: {error}") from error
        self._streams = unsaved.streams
        unsaved.bytes = sum(document_bytes(key, value) for key, value in unsaved.documents.items())
        for stored in unsaved.streams.values():
            self._payload_bytes += stored.payload_bytes
            unsaved.bytes += memory_of(stored.tail)
        unsaved.removed_bytes = sum(stored.payload_bytes for stored in unsaved.removed.values())
        self._maintenance = Maintenance(
            self._cold,
            unsaved,
            self._journal,
            self._worker,
            hot_tail_bytes=settings.hot_tail_bytes,
            busy_floor_bytes=settings.busy_floor_bytes,
            segments_max=settings.segments_max,
            clock=self._clock,
        )

    def close(self) -> None:
        """Shut down cleanly. Records that are only in the journal stay there for the next start."""
        self._worker.close()
        journal = self._journal
        if journal is not None:
            try:
                if journal.failure is None:
                    self._cold.finish()
                journal.mark_complete()
            except (WriteFailedError, OSError) as error:
                log.error("the store was not closed cleanly: %s", error)
            journal.close()
        self._cold.close()
        self._directory.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def takes_long(self) -> bool:
        assert self._journal is not None
        return self._journal.takes_long()

    def write(self, batch: Sequence[Committed]) -> None:
        assert self._journal is not None
        check_batch(batch)
        self._journal.append(batch)

    def publish(self, batch: Sequence[Committed]) -> None:
        unsaved = self._unsaved
        streams = self._streams
        dirty = unsaved.dirty
        for record, removed in batch:
            if type(record) is Append:
                stream_id = record.id
                dirty.add(stream_id)
                payload = record.payload
                if payload:
                    stored = streams[stream_id]
                    tail = stored.tail
                    if tail is None:
                        tail = stored.growing_tail()
                        unsaved.bytes += memory_of(tail)
                    unsaved.bytes += tail.extend(payload, record.lengths, record.at_ms)
                    self._payload_bytes += len(payload)
            elif isinstance(record, Document):
                self._publish_document(record)
            else:
                dirty.add(record.id)
                if isinstance(record, Create):
                    self._publish_create(record)
                elif isinstance(record, Delete) and record.id not in removed:
                    unsaved.deleted.add(record.id)
            if removed:
                for stream_id in removed:
                    self._remove(stream_id, unsaved.lsn)
            unsaved.lsn += 1

    def trim(self, stream_id: int, message_index: int, byte_position: int) -> None:
        stored = self._streams[stream_id]
        if message_index > stored.base_index:
            unsaved = self._unsaved
            self._payload_bytes -= byte_position - stored.base_position
            unsaved.bytes -= stored.unsaved_memory
            stored.trim(self._cold, stream_id, message_index, byte_position)
            unsaved.bytes += stored.unsaved_memory

    def maintain(self, image_of: ImageOf) -> None:
        assert self._maintenance is not None
        self._maintenance.maintain(image_of)

    def checkpoint_soon(self) -> None:
        """Request a checkpoint; the next calls of `maintain` run it."""
        assert self._maintenance is not None
        self._maintenance.requested = True

    @property
    def published_lsn(self) -> int:
        """The last record that readers see."""
        return self._unsaved.lsn

    @property
    def failure(self) -> str | None:
        """Why nothing can be written until the store is reopened, or None."""
        return self._journal.failure if self._journal is not None else None

    def refusal(self) -> str | None:
        journal, maintenance = self._journal, self._maintenance
        if journal is not None and journal.failure is not None:
            return journal.failure
        if maintenance is not None and maintenance.problem is not None:
            return maintenance.problem
        free = self._free()
        if free < self._reserve_bytes:
            if maintenance is not None and self._unsaved.removed:
                # The space of deleted streams is freed only after a checkpoint without them.
                maintenance.requested = True
            return (
                f"The disk is nearly full: {free} bytes are free in {self._path}, and {self._reserve_bytes}"
                " are kept in reserve."
            )
        return self._cold.refusal()

    def busy(self) -> str | None:
        if self._maintenance is not None and self._maintenance.must_refuse_writes:
            return "Data arrives faster than the disk can save it; retry in a moment."
        return self._cold.busy()

    # -- reading ---------------------------------------------------------------------------------------------------

    def boundary(self, stream_id: int, message_index: int) -> int | None:
        stored = self._streams[stream_id]
        tail = stored.tail
        if tail is not None and message_index >= tail.message_index:
            return tail.boundary(message_index)
        return self._read_cold(stream_id, lambda: stored.boundary(self._cold, stream_id, message_index))

    def cut(
        self, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        stored = self._streams[stream_id]
        tail = stored.tail
        if tail is not None and message_index >= tail.message_index:
            return tail.cut(message_index, byte_position, end_index, max_bytes)
        return self._read_cold(
            stream_id, lambda: stored.cut(self._cold, stream_id, message_index, byte_position, end_index, max_bytes)
        )

    def lengths(self, stream_id: int, message_index: int, end_index: int) -> Sequence[int]:
        stored = self._streams[stream_id]
        return self._read_cold(stream_id, lambda: stored.lengths(self._cold, stream_id, message_index, end_index))

    def arrivals(self, stream_id: int, message_index: int, end_index: int) -> Sequence[TimeRun]:
        stored = self._streams[stream_id]
        return self._read_cold(stream_id, lambda: stored.arrivals(self._cold, stream_id, message_index, end_index))

    def first_since(self, stream_id: int, at_ms: int) -> int:
        stored = self._streams[stream_id]
        return self._read_cold(stream_id, lambda: stored.first_since(self._cold, stream_id, at_ms))

    def read(self, stream_id: int, byte_position: int, end_position: int) -> Sequence[bytes | memoryview]:
        stored = self._streams[stream_id]
        tail = stored.tail
        if tail is not None and byte_position >= tail.byte_position:
            return tail.read(byte_position, end_position)
        return self._read_cold(stream_id, lambda: stored.read(self._cold, stream_id, byte_position, end_position))

    # -- figures ---------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        return Usage(self._payload_bytes, self._unsaved.memory_bytes + self._unsaved.cached_bytes)

    def parts(self) -> dict[str, int]:
        """Figures about the files, as `headwater store stats` names them."""
        assert self._journal is not None
        return {"segments": len(self._journal.segments), **self._cold.parts()}

    # -- implementation --------------------------------------------------------------------------------------------

    def _publish_create(self, record: Create) -> None:
        stored = self._streams[record.id] = new_stream(record.fork)
        if record.payload:
            tail = stored.growing_tail()
            tail.extend(record.payload, record.lengths, record.at_ms)
            self._unsaved.bytes += memory_of(tail)
            self._payload_bytes += len(record.payload)

    def _publish_document(self, record: Document) -> None:
        unsaved = self._unsaved
        if record.key in unsaved.documents:
            unsaved.bytes -= document_bytes(record.key, unsaved.documents[record.key])
        unsaved.documents[record.key] = record.value
        unsaved.bytes += document_bytes(record.key, record.value)

    def _remove(self, stream_id: int, lsn: int) -> None:
        unsaved = self._unsaved
        stored = self._streams.pop(stream_id)
        self._payload_bytes -= stored.payload_bytes
        self._cold.capture(stream_id, stored, lsn)
        unsaved.bytes -= stored.unsaved_memory
        stored.tail = None
        unsaved.dirty.discard(stream_id)
        unsaved.removed_ids.append(stream_id)
        unsaved.removed[stream_id] = stored
        unsaved.removed_bytes += stored.payload_bytes

    def _read_cold(self, stream_id: int, read: Callable[[], T]) -> T:
        """Read from the cold store, and report damage with the stream's name."""
        try:
            return read()
        except DamagedRangeError as damage:
            name = self._cold.name_of(stream_id)
            raise CorruptError(f"{name} is damaged at position {damage.byte_position}: {damage}") from damage

    def _free(self) -> int:
        now = self._clock()
        if self._free_checked_at is None or now - self._free_checked_at >= FREE_CHECK_S:
            self._free_checked_at = now
            try:
                directories = filter(None, (self._path, self._directory.journal))
                self._free_bytes = min(map(self._filesystem.free_bytes, directories))
            except OSError as error:
                log.warning("free space of %s is unknown: %s", self._path, error)
        return self._free_bytes
