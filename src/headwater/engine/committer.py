"""The committer: makes records durable, then publishes them. There is no other path.

Records submitted in one iteration of the loop are one batch, committed at its end: no delay when idle, larger
batches under load, up to a limit in bytes. Batches are written strictly one after the other.

Where a batch is written is decided for each one (`commit_placement`): on the event loop if that takes a short time;
otherwise on the commit thread, and records submitted during the write form the next batch.

The entries of a batch belong to different requests, so each is completed separately: an exception in one callback is
logged, and the other entries still get their responses.

A failed write is fail-stop: how much of it reached the disk is unknown, so neither it nor anything after it is ever
acknowledged, and a sync is never retried (a second fsync can report success for pages that the first one lost). In a
cluster the process then ends and the shard is opened again, so clients are asked to retry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from headwater.core.errors import StorageUnavailable
from headwater.core.records import Append, Create, Document, Evict, Record, Retain
from headwater.engine.commit_placement import CommitMode, CommitPlacement
from headwater.engine.metrics import Metrics
from headwater.engine.scheduler import Scheduler
from headwater.engine.stream import LiveStream
from headwater.storage.interface import Committed, ReplicaFailedError, Storage

log = logging.getLogger("headwater.engine")

MAX_BATCH_BYTES: Final = 16 * 1024 * 1024
RECORD_OVERHEAD_BYTES: Final = 64
LENGTH_BYTES: Final = 5
"""Maximum size of a message length in a record, for messages below 4 GiB."""
RETRY: Final = (("Retry-After", "1"),)
_committed: Final = tuple.__new__
"""Creates a `Committed` in a third of the time of its constructor."""


class CommitEntry(msgspec.Struct, frozen=True, gc=False):
    """A queued record, or (without a record) a response that must wait for the entries before it.

    A struct, because creating one takes a third of the time of a named tuple.
    """

    stream: LiveStream | None
    record: Record | None
    removed: tuple[int, ...]
    done: Callable[[Any], None] | None
    """Called once: with `result` when everything that it depends on is durable, or with the refusal if that failed."""
    result: object


class Committer:
    def __init__(
        self,
        storage: Storage,
        scheduler: Scheduler,
        metrics: Metrics,
        on_applied: Callable[[CommitEntry, Record], None],
        publish: Callable[[Sequence[CommitEntry]], None],
        mode: CommitMode = "auto",
        *,
        max_batch_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        self._storage = storage
        self._scheduler = scheduler
        self._metrics = metrics
        self._on_applied = on_applied
        """Called for every durable record except appends, before any response that depends on it."""
        self._publish = publish
        self._placement = CommitPlacement(mode, scheduler.timer_s)
        self.submit: Callable[[CommitEntry, int], None] = self._enqueue if storage.waits_for_disk else self._commit_now
        """Commit an entry whose record has this size: at the end of this iteration of the event loop, or at once if
        there is no disk to wait for."""
        self._max_batch_bytes = max_batch_bytes
        self._timer = scheduler.timer_s
        self._queue: list[CommitEntry] = []
        self._queued_bytes = 0
        self._flush_is_due = False
        self._writing: list[CommitEntry] | None = None
        self.failure: str | None = None
        self._is_opened_again = False
        """After a failure: whether another process takes writes soon."""
        self.batch_is_checked = not storage.waits_for_disk
        """Whether this iteration of the loop has a batch whose first record is an append: before that was accepted,
        storage was found to accept writes (see `write_gate`). Memory always accepts them."""
        self.publishes_all = False
        """Whether appends to streams without followers are published too."""

    @property
    def idle(self) -> bool:
        return not self._queue and self._writing is None

    def _enqueue(self, entry: CommitEntry, size_bytes: int) -> None:
        self._queue.append(entry)
        self._queued_bytes += size_bytes
        if not self._flush_is_due and self._writing is None:
            self._flush_is_due = True
            self.batch_is_checked = type(entry.record) is Append
            self._scheduler.soon(self._flush)

    def _commit_now(self, entry: CommitEntry, size_bytes: int) -> None:
        record = entry.record
        stream = entry.stream
        is_append = type(record) is Append
        if record is not None:
            self._storage.publish((_committed(Committed, (record, entry.removed)),))
            _advance(stream, record)
            if not is_append:
                guarded(self._on_applied, entry, record)
        try:
            # An exception of this callback is raised to the request that is calling, which reports it.
            if entry.done is not None:
                entry.done(entry.result)
        finally:
            if not is_append or stream is None or stream.followers is not None or self.publishes_all:
                guarded(self._publish, (entry,))

    def check(self) -> None:
        """Refuse a write that could not be made durable."""
        if self._is_opened_again:
            raise StorageUnavailable("The owner of this stream is changing; retry.", RETRY)
        if self.failure is not None:
            raise StorageUnavailable(
                "Storage failed; writes are disabled until the server is restarted. Reads still work."
            )

    def _flush(self) -> None:
        self._flush_is_due = False
        self.batch_is_checked = False
        if not self._queue or self._writing is not None:
            return
        batch, size_bytes = self._next_batch()
        if self.failure is not None:
            self._refuse(batch)
            return
        committed = [_committed(Committed, (one.record, one.removed)) for one in batch if one.record is not None]
        if not committed:
            self._complete(batch, committed)
        elif self._placement.on_thread(size_bytes, takes_long=self._storage.takes_long()):
            self._write_on_thread(batch, committed, size_bytes)
        else:
            self._write_inline(batch, committed, size_bytes)
        if self._queue and not self._flush_is_due and self._writing is None:
            self._flush_is_due = True
            self._scheduler.soon(self._flush)

    def _next_batch(self) -> tuple[list[CommitEntry], int]:
        """Take queued entries up to the limit in bytes; an entry larger than that is a separate batch."""
        if self._queued_bytes <= self._max_batch_bytes:
            batch, self._queue = self._queue, []
            size_bytes, self._queued_bytes = self._queued_bytes, 0
            return batch, size_bytes
        size_bytes = count = 0
        for entry in self._queue:
            entry_bytes = record_bytes(entry.record)
            if count and size_bytes + entry_bytes > self._max_batch_bytes:
                break
            size_bytes += entry_bytes
            count += 1
        batch, self._queue = self._queue[:count], self._queue[count:]
        self._queued_bytes -= size_bytes
        return batch, size_bytes

    def _write_inline(self, batch: list[CommitEntry], committed: list[Committed], size_bytes: int) -> None:
        started_s = self._timer()
        try:
            self._storage.write(committed)
        except Exception as error:
            self._fail(error, batch)
            return
        self._measure(self._timer() - started_s, len(committed), size_bytes)
        self._complete(batch, committed)

    def _write_on_thread(self, batch: list[CommitEntry], committed: list[Committed], size_bytes: int) -> None:
        self._writing = batch
        seconds = 0.0

        def work() -> None:
            nonlocal seconds
            started_s = self._timer()
            self._storage.write(committed)
            seconds = self._timer() - started_s

        def done(error: BaseException | None) -> None:
            self._writing = None
            if error is not None:
                self._fail(error, batch)
                return
            self._measure(seconds, len(committed), size_bytes)
            self._complete(batch, committed)
            # Entries that were queued during completion may have a flush already: a second one could sync twice.
            if self._queue and not self._flush_is_due:
                self._flush()

        self._scheduler.on_thread(work, done)

    def _measure(self, seconds: float, records: int, size_bytes: int) -> None:
        self._metrics.commit_seconds.observe(seconds)
        self._metrics.batch_sizes.observe(records)
        self._placement.measured(size_bytes, seconds)

    def _complete(self, batch: list[CommitEntry], committed: list[Committed]) -> None:
        if committed:
            try:
                self._storage.publish(committed)
            except Exception as error:
                self._fail(error, batch)
                return
        for entry in batch:
            record = entry.record
            if record is not None:
                _advance(entry.stream, record)
                if type(record) is not Append:
                    guarded(self._on_applied, entry, record)
        for entry in batch:
            done = entry.done
            if done is not None:
                # `guarded` inlined: every append passes here.
                try:
                    done(entry.result)
                except Exception:
                    log_failure(done)
        guarded(self._publish, batch)

    def _fail(self, error: BaseException, batch: list[CommitEntry]) -> None:
        self.failure = str(error) or type(error).__name__
        if isinstance(error, ReplicaFailedError):
            self._is_opened_again = True
            log.error("nothing more is written until the shard is opened again: %s", self.failure)
        else:
            log.critical("storage failed, writes are disabled until a restart: %s", self.failure, exc_info=error)
        self._refuse(batch)
        queued, self._queue = self._queue, []
        self._queued_bytes = 0
        self._refuse(queued)

    def _refuse(self, batch: list[CommitEntry]) -> None:
        if self._is_opened_again:
            refusal = StorageUnavailable(
                "The owner of this stream is changing, and whether the write was stored is unknown; retry as a"
                " producer, or read the stream first.",
                RETRY,
            )
        else:
            refusal = StorageUnavailable(
                "The write failed in storage; whether it was stored is unknown until the server is restarted."
            )
        for entry in batch:
            if entry.done is not None:
                guarded(entry.done, refusal)


def record_bytes(record: Record | None) -> int:
    """Estimate the size of a record in the journal: its data, and an allowance for the rest."""
    if record is None:
        return 0
    if type(record) is Append or type(record) is Create:
        return RECORD_OVERHEAD_BYTES + len(record.payload) + LENGTH_BYTES * len(record.lengths)
    if type(record) is Document and record.value is not None:
        return RECORD_OVERHEAD_BYTES + len(record.value)
    if type(record) is Evict:
        return RECORD_OVERHEAD_BYTES + sum(map(len, record.producer_ids))
    return RECORD_OVERHEAD_BYTES


def guarded(callback: Callable[..., None], *arguments: object) -> None:
    """Call a callback of one request or reader; an exception is logged and does not affect the others."""
    try:
        callback(*arguments)
    except Exception:
        log_failure(callback)


def log_failure(callback: Callable[..., None]) -> None:
    log.exception("a callback of the engine failed: %r", callback)


def _advance(stream: LiveStream | None, record: Record) -> None:
    """Update the stream's durable state with the record. A document has no stream."""
    if stream is None:
        return
    stream.in_flight -= 1
    if type(record) is Append:
        stream.durable_index = record.message_index + len(record.lengths)
        stream.durable_position = record.byte_position + len(record.payload)
        if record.close:
            stream.durable_closed = True
    elif type(record) is Create:
        stream.durable_index += len(record.lengths)
        stream.durable_position += len(record.payload)
        stream.durable_closed = record.closed
        stream.visible = True
    elif type(record) is Retain:
        stream.durable_retained_index = record.message_index
        stream.durable_retained_position = record.byte_position
        if record.snapshot is not None:
            stream.durable_snapshot = record.snapshot
        elif stream.durable_snapshot is not None and stream.durable_snapshot.message_index < record.message_index:
            stream.durable_snapshot = None
