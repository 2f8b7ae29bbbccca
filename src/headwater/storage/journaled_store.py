"""Storage modes `file-fast` and `file-durable`: a shared log, hot tails in memory, the rest in packs.

A write is one append to the log, synced in `file-durable`; it touches nothing that readers use. What is in the log but
not yet in a pack is held in memory: when half of `hot_tail_bytes` is full a checkpoint begins. A write never waits for
it; when twice `hot_tail_bytes` are full, the store is `busy` and takes no new writes for a moment. Both modes have the
same format, so a directory can change between them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from headwater.core.records import Append, Create, Delete, Document, Record
from headwater.storage import stream_data
from headwater.storage.directory import Directory, open_directory
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
from headwater.storage.maintenance import LOOK_EVERY, SEGMENTS_MAX, Maintenance, UnsavedState, document_bytes
from headwater.storage.packs.checkpoint import MaintenanceContext
from headwater.storage.packs.manifest import REWRITE_FLOOR_BYTES, Manifest
from headwater.storage.packs.pack_set import FANOUT, OPEN_MAX, PackSet
from headwater.storage.packs.recovery import LOG_NAME, PACKS_NAME, Recovery, name_of
from headwater.storage.stream_data import DamagedRangeError, StreamData, memory_of
from headwater.storage.worker import ThreadWorker, Worker

log = logging.getLogger("headwater.storage")

FREE_CHECK_S: Final = 1.0
FAMILY: Final = "log"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The sizes that shape a store. The defaults suit a server; tests make them tiny."""

    segment_bytes: int = 64 * 1024 * 1024
    hot_tail_bytes: int = 64 * 1024 * 1024
    busy_floor_bytes: int = 16 * 1024 * 1024
    """However small the hot tail is, the store is not busy while less than this waits for a checkpoint."""
    reserve_bytes: int | None = None
    """New writes are turned down when less is free. By default enough for a checkpoint and two segments."""
    big_bytes: int = 1024 * 1024
    """Extents of this size are not merged any more."""
    segments_max: int = SEGMENTS_MAX
    fanout: int = FANOUT
    open_packs_max: int = OPEN_MAX
    manifest_floor_bytes: int = REWRITE_FLOOR_BYTES
    look_every: int = LOOK_EVERY

    @property
    def reserve(self) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return self.hot_tail_bytes + 2 * self.segment_bytes


@dataclass(frozen=True, slots=True)
class LogStats:
    """What a store is made of."""

    streams: int
    payload_bytes: int
    memory_bytes: int
    segments: int
    packs: int
    live_bytes: int
    dead_bytes: int
    free_bytes: int


class FileStorage:
    def __init__(
        self,
        filesystem: Filesystem,
        directory: Path,
        *,
        durable: bool,
        settings: StoreSettings | None = None,
        worker: Worker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._filesystem = filesystem
        self._path = directory
        self._durable = durable
        self._settings = settings if settings is not None else StoreSettings()
        self._worker = worker if worker is not None else ThreadWorker()
        self._clock = clock
        self._directory: Directory = open_directory(filesystem, directory, FAMILY)
        self._manifest = Manifest(filesystem, directory, rewrite_floor=self._settings.manifest_floor_bytes)
        self._pack_set = PackSet(
            filesystem,
            directory / PACKS_NAME,
            fanout=self._settings.fanout,
            open_max=self._settings.open_packs_max,
        )
        self._unsaved = UnsavedState()
        self._streams = self._unsaved.streams
        self._payload_bytes = 0
        self._writer: FileJournal | None = None
        self._tender: Maintenance | None = None
        self._free_bytes = 0
        self._free_checked_at: float | None = None

    @property
    def waits_for_disk(self) -> bool:
        # Without syncs too: a write goes to the kernel, one for all that a tick brought, and may have to wait there.
        return True

    # -- life ------------------------------------------------------------------------------------------------------

    def recover(self) -> Iterator[Record]:
        recovery = Recovery(self._filesystem, self._path, self._manifest)
        try:
            yield from recovery.records()
            self._writer = recovery.settle(durable=self._durable, segment_bytes=self._settings.segment_bytes)
        except OSError as error:
            # A file that cannot be read may hold anything: going on without it would lose what it holds.
            raise StorageError(f"Data directory {self._path} cannot be recovered: {error}") from error
        unsaved = self._unsaved
        unsaved.streams = self._streams = recovery.streams
        unsaved.dirty = recovery.dirty
        unsaved.documents = recovery.documents
        unsaved.gone = list(recovery.condemned)
        unsaved.condemned = recovery.condemned
        unsaved.lsn = recovery.last_lsn
        unsaved.bytes = sum(document_bytes(key, value) for key, value in unsaved.documents.items())
        for info in self._manifest.packs.values():
            self._pack_set.add(info)
        for stored in unsaved.streams.values():
            self._pack_set.hold(stored.extents)
            self._payload_bytes += stored.payload_bytes
            unsaved.bytes += memory_of(stored.tail)
        for stored in unsaved.condemned.values():
            self._pack_set.hold(stored.extents)
            unsaved.condemned_bytes += stored.payload_bytes
        self._pack_set.settle(self._manifest.packs.values())
        context = MaintenanceContext(
            self._filesystem,
            self._path / LOG_NAME,
            self._path / PACKS_NAME,
            self._manifest,
            self._writer.segments,
            itertools.count(recovery.last_pack + 1).__next__,
            unsaved.extents_of,
            self._settings.big_bytes,
        )
        self._tender = Maintenance(
            context,
            unsaved,
            self._pack_set,
            self._writer,
            self._worker,
            hot_tail_bytes=self._settings.hot_tail_bytes,
            busy_floor_bytes=self._settings.busy_floor_bytes,
            segments_max=self._settings.segments_max,
            look_every=self._settings.look_every,
            clock=self._clock,
        )

    def close(self) -> None:
        """End in good order. What is only in the log stays there for the next start."""
        self._worker.close()
        if self._writer is not None:
            try:
                self._writer.rest()
            except WriteFailedError as error:
                log.error("the log could not be marked as whole: %s", error)
            self._writer.close()
        self._manifest.close()
        self._pack_set.close()
        self._directory.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def write(self, batch: Sequence[Committed]) -> None:
        assert self._writer is not None
        check_batch(batch)
        self._writer.write(batch)

    def publish(self, batch: Sequence[Committed]) -> None:
        unsaved = self._unsaved
        streams = self._streams
        dirty = unsaved.dirty
        for record, removed in batch:
            if isinstance(record, Append):
                stream_id = record.id
                dirty.add(stream_id)
                payload = record.payload
                if payload:
                    stored = streams[stream_id]
                    tail = stored.tail
                    if tail is None:
                        tail = stored.growing_tail()
                        unsaved.bytes += memory_of(tail)
                    tail.extend(payload, record.lengths)
                    size = len(payload)
                    unsaved.bytes += size + 8 * len(record.lengths)
                    self._payload_bytes += size
            elif isinstance(record, Document):
                self._publish_document(record)
            else:
                dirty.add(record.id)
                if isinstance(record, Create):
                    self._publish_create(record)
                elif isinstance(record, Delete) and record.id not in removed:
                    unsaved.ended.add(record.id)
            if removed:
                for stream_id in removed:
                    self._remove(stream_id, unsaved.lsn)
            unsaved.lsn += 1

    def trim(self, stream_id: int, index: int, position: int) -> None:
        stored = self._streams[stream_id]
        if index > stored.base_index:
            self._payload_bytes -= position - stored.base_position
            self._unsaved.bytes -= memory_of(stored.tail)
            stored.trim(self._pack_set, index, position)
            self._unsaved.bytes += memory_of(stored.tail)

    def maintain(self, image_of: ImageOf) -> None:
        assert self._tender is not None
        self._tender.maintain(image_of)

    def checkpoint_soon(self) -> None:
        """Ask for a checkpoint, which the next calls of `maintain` will make."""
        assert self._tender is not None
        self._tender.asked = True

    def refusal(self) -> str | None:
        if self._writer is not None and self._writer.failure is not None:
            return self._writer.failure
        if self._tender is not None and self._tender.trouble is not None:
            return self._tender.trouble
        free = self._free()
        if free < self._settings.reserve:
            if self._tender is not None and self._unsaved.condemned:
                # Deleted streams give their space back only once a checkpoint has forgotten them.
                self._tender.asked = True
            return (
                f"The disk is nearly full: {free} bytes are free in {self._path}, and {self._settings.reserve}"
                " are kept in reserve."
            )
        return None

    def busy(self) -> str | None:
        if self._tender is not None and self._tender.overfull:
            return "Data arrives faster than the disk can save it; try again in a moment."
        return None

    # -- reading ---------------------------------------------------------------------------------------------------

    def boundary(self, stream_id: int, index: int) -> int | None:
        stored = self._streams[stream_id]
        tail = stored.tail
        if tail is not None and index >= tail.index:
            return tail.boundary(index)
        return self._guarded(stream_id, lambda: stream_data.boundary(stored, self._pack_set, index))

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        stored = self._streams[stream_id]
        tail = stored.tail
        if tail is not None and index >= tail.index:
            return tail.cut(index, position, end_index, max_bytes)
        return self._guarded(
            stream_id, lambda: stream_data.cut(stored, self._pack_set, index, position, end_index, max_bytes)
        )

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]:
        stored = self._streams[stream_id]
        return self._guarded(stream_id, lambda: stream_data.lengths(stored, self._pack_set, index, end_index))

    def read(self, stream_id: int, position: int, end_position: int) -> Sequence[bytes | memoryview]:
        stored = self._streams[stream_id]
        tail = stored.tail
        if tail is not None and position >= tail.position:
            return tail.read(position, end_position)
        return self._guarded(stream_id, lambda: stream_data.read(stored, self._pack_set, position, end_position))

    # -- figures ---------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        return Usage(self._payload_bytes, self._unsaved.bytes + self._unsaved.frozen_bytes)

    def stats(self) -> LogStats:
        assert self._writer is not None
        live = self._pack_set.live_bytes
        return LogStats(
            streams=len(self._streams),
            payload_bytes=self._payload_bytes,
            memory_bytes=self._unsaved.bytes + self._unsaved.frozen_bytes,
            segments=len(self._writer.segments),
            packs=len(self._pack_set),
            live_bytes=live,
            dead_bytes=self._pack_set.data_bytes - live,
            free_bytes=self._free(),
        )

    # -- inside ----------------------------------------------------------------------------------------------------

    def _publish_create(self, record: Create) -> None:
        fork = record.fork
        stored = StreamData(fork.message_index, fork.byte_position) if fork is not None else StreamData(0, 0)
        self._streams[record.id] = stored
        if record.payload:
            tail = stored.growing_tail()
            tail.extend(record.payload, record.lengths)
            self._unsaved.bytes += memory_of(tail)
            self._payload_bytes += len(record.payload)

    def _publish_document(self, record: Document) -> None:
        unsaved = self._unsaved
        if record.key in unsaved.documents:
            unsaved.bytes -= document_bytes(record.key, unsaved.documents[record.key])
        unsaved.documents[record.key] = record.value
        unsaved.bytes += document_bytes(record.key, record.value)

    def _remove(self, stream_id: int, lsn: int) -> None:
        assert self._tender is not None
        unsaved = self._unsaved
        stored = self._streams.pop(stream_id)
        self._payload_bytes -= stored.payload_bytes
        self._tender.capture(stream_id, stored, lsn)
        unsaved.bytes -= memory_of(stored.tail)
        stored.tail = None
        unsaved.dirty.discard(stream_id)
        unsaved.gone.append(stream_id)
        unsaved.condemned[stream_id] = stored
        unsaved.condemned_bytes += stored.payload_bytes

    def _guarded(self, stream_id: int, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except DamagedRangeError as damage:
            name = name_of(self._manifest, stream_id)
            raise CorruptError(f"{name} is damaged at position {damage.position}: {damage}") from damage

    def _free(self) -> int:
        now = self._clock()
        if self._free_checked_at is None or now - self._free_checked_at >= FREE_CHECK_S:
            self._free_checked_at = now
            try:
                self._free_bytes = self._filesystem.free_bytes(self._path)
            except OSError as error:
                log.warning("free space of %s is unknown: %s", self._path, error)
        return self._free_bytes
