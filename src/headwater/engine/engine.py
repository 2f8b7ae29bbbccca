"""The engine: connects the rules with storage.

Every operation is one synchronous step on the event loop: find the stream, let the rules decide against its pending
state, apply the record, queue it. A callback gets the response when the record is durable; a response that depends
on the pending record of another request (a duplicate, a conflict) waits for that record too. Reads see durable state
only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from headwater.core.catalog import Catalog, apply_append
from headwater.core.content import Messages
from headwater.core.errors import Conflict, Refusal, StorageBusy
from headwater.core.fencing import WriteCredentials
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders
from headwater.core.records import Create, Delete, Document, Evict, Image, Record, Retain, Touch
from headwater.core.retention import RetentionRule
from headwater.core.rules import AppendOutcome, CreateRequest, check_same_config, decide_append
from headwater.engine.background_threads import AtOnce, Background
from headwater.engine.buckets import Buckets
from headwater.engine.clock import AdjustableClock
from headwater.engine.clock_guard import DOCUMENT_KEY, ClockGuard, JumpRule
from headwater.engine.cold_reads import Deferring
from headwater.engine.commit_placement import CommitMode
from headwater.engine.committer import MAX_BATCH_BYTES, CommitEntry, Committer, guarded, record_bytes
from headwater.engine.creation import new_fork, new_stream
from headwater.engine.durable_view import DurableView
from headwater.engine.fences import Fences
from headwater.engine.leases import WriterLeases
from headwater.engine.metrics import Metrics
from headwater.engine.multi_stream_follow import Follows
from headwater.engine.plain_appends import PlainAppend, PlainAppends
from headwater.engine.producer_limit import ProducerLimit
from headwater.engine.publisher import StreamPublisher
from headwater.engine.quota import (
    PRODUCER_BYTES,
    EngineLimits,
    Quota,
    checked_size,
    document_bytes,
    metadata_of,
    stream_bytes,
)
from headwater.engine.range_splits import split_range
from headwater.engine.reading import StreamReader
from headwater.engine.results import (
    Appended,
    Created,
    Deleted,
    OnAppended,
    OnCreated,
    OnDeleted,
    accepted_producer,
    duplicate_append,
)
from headwater.engine.retention import RetentionKeeper
from headwater.engine.scheduler import Scheduler, Timer
from headwater.engine.snapshots import Snapshots
from headwater.engine.stream import LiveStream
from headwater.engine.stream_index import StreamIndex
from headwater.engine.stream_refusals import not_found, read_only, soft_deleted
from headwater.engine.stream_uses import StreamUses
from headwater.engine.sweeper import Sweeper
from headwater.engine.waiting_appends import WAITS_FROM_BYTES, WaitingAppends
from headwater.engine.write_gate import WriteGate
from headwater.storage.blobs import BlobStore, MemoryBlobs
from headwater.storage.interface import Storage, Usage

log = logging.getLogger("headwater.engine")

T = TypeVar("T")

MAINTAIN_INTERVAL_S = 1.0


class Engine:
    def __init__(
        self,
        storage: Storage,
        clock: AdjustableClock,
        scheduler: Scheduler,
        limits: EngineLimits,
        *,
        sweep_interval_s: float = 1.0,
        jumps: JumpRule | None = None,
        commit: CommitMode = "auto",
        max_batch_bytes: int = MAX_BATCH_BYTES,
        blobs: BlobStore | None = None,
        background: Background | None = None,
        deferring: Deferring | None = None,
        retention: RetentionRule | None = None,
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._scheduler = scheduler
        self._limits = limits
        self.quota = Quota(limits)
        self._maintain_timer: Timer | None = None
        self.server_streams: set[str] = set()
        """Streams that only the server writes to. The limit for one stream does not apply to them."""
        self.metrics = Metrics()
        self.catalog: Catalog[LiveStream] = Catalog(LiveStream)
        self._view = DurableView(self.catalog)
        self.reader = StreamReader(storage, self._view.by_id, deferring)
        self.publisher = StreamPublisher(scheduler, clock, self.metrics)
        self._committer = Committer(
            storage,
            scheduler,
            self.metrics,
            self._on_applied,
            self._publish,
            commit,
            max_batch_bytes=max_batch_bytes,
        )
        self._waiting = WaitingAppends(storage, scheduler, self._continue_maintenance)
        self._gate = WriteGate(storage, self._committer, self._waiting.on_busy)
        self._uses = StreamUses(self.catalog.by_id, clock, self.quota, self._save_use)
        self.touch = self._uses.touch
        self.follow = self._uses.follow
        self.unfollow = self._uses.unfollow
        self._sweeper = Sweeper(self.catalog.by_id, clock, scheduler, sweep_interval_s, self._expire, self.touch)
        self.clock_guard = ClockGuard(
            clock, jumps if jumps is not None else JumpRule(), self._save_clock, self._sweeper.release
        )
        self.deferring = deferring
        """Set if data can be in an object store: the context for reads that must not wait for it."""
        self._background: Background = background if background is not None else AtOnce()
        self.snapshots = Snapshots(
            self,
            blobs if blobs is not None else MemoryBlobs(),
            self._background,
            limits.max_snapshot_bytes,
        )
        self.retention = RetentionKeeper(
            self.catalog.by_id,
            storage,
            self.reader,
            clock,
            scheduler,
            retention if retention is not None else RetentionRule(),
            self.quota.trimmed,
            self._drop_front,
            lambda: self.clock_guard.jump is None,
        )
        self._producer_limit = ProducerLimit(
            limits.max_producers, limits.producer_idle_days, self._evict, lambda: self.clock_guard.jump is None
        )
        self.buckets = Buckets(self, scheduler)
        self.fences = Fences(self)
        self.leases = WriterLeases(self, scheduler, limits.max_leases, limits.max_lease_ms)
        self.index = StreamIndex(self, self.publisher, scheduler)
        self.follows = Follows(self, scheduler, limits.max_followed_streams)
        self.plain_appends = PlainAppends(
            self.catalog.by_name,
            self.server_streams,
            self.fences.streams,
            self.quota,
            self.metrics,
            clock,
            self._gate,
            self._committer,
            storage,
            self.append,
            self._after_pending,
        )
        self.append_plain: PlainAppend = self.plain_appends.append
        """`append` for a request that has only a body and its type: most appends. Returns the next offset if the append
        is complete, or None if the callback gets the result."""

    # -- startup and shutdown --------------------------------------------------------------------------------------

    def replay(self, record: Record) -> None:
        """Apply a record that another process has committed, before `start`. Readers see it at once."""
        if isinstance(record, Document | Create | Image):
            self.catalog.apply(record)
            return
        stream = self.catalog.by_id[record.id]
        self.catalog.apply(record)
        stream.publish_pending()
        if isinstance(record, Delete):
            self.publisher.end_followers(stream)
        else:
            self.publisher.wake(stream)

    def start(self) -> None:
        """Rebuild the catalog from storage, then start the sweeper and storage maintenance."""
        for record in self._storage.recover():
            self.catalog.apply(record)
        documents = self.catalog.documents.items()
        self.quota.metadata_bytes = sum(document_bytes(key, value) for key, value in documents)
        now_ms = self._clock.now_ms()
        last_used_ms = max((max(stream.accessed_ms, stream.written_ms) for stream in self.catalog), default=0)
        self.clock_guard.start(self.catalog.documents.get(DOCUMENT_KEY), last_used_ms)
        for stream in self.catalog:
            stream.publish_pending()
            self.quota.add(stream.name, stream.byte_position - stream.base_position, metadata_of(stream), 1)
            if stream.ttl_secs is not None:
                self._uses.recover(stream, stream.ttl_secs, self.clock_guard.latest_use_ms(stream, now_ms))
            self._sweeper.watch(stream)
        self.snapshots.start()
        self.retention.start()
        self.buckets.start()
        self.fences.start()
        self.leases.start()
        self._sweeper.start()
        self._maintain_timer = self._scheduler.later(MAINTAIN_INTERVAL_S, self._maintain)

    def stop(self) -> None:
        """Stop sweeping and close storage. Nothing may be queued (see `idle`)."""
        self._sweeper.stop()
        self.leases.stop()
        self.retention.stop()
        self._waiting.stop()
        if self._maintain_timer is not None:
            self._maintain_timer.cancel()
        self._scheduler.close()
        self._background.close()
        self._storage.close()

    @property
    def idle(self) -> bool:
        return self._committer.idle and not self._waiting

    @property
    def failure(self) -> str | None:
        """Why writes are refused, or None."""
        return self._gate.failure

    @property
    def total_bytes(self) -> int:
        return self.quota.content_bytes

    def storage_usage(self) -> Usage:
        return self._storage.usage()

    def now_ms(self) -> int:
        return self._clock.now_ms()

    # -- operations ------------------------------------------------------------------------------------------------

    def create(self, request: CreateRequest, done: OnCreated, *, by_server: bool = False) -> None:
        if request.name in self.server_streams and not by_server:
            raise read_only(request.name)
        now_ms = self._clock.now_ms()
        stream = self._existing(request.name, now_ms)
        if stream is not None:
            try:
                if stream.deleted:
                    raise Conflict(
                        f"The name {request.name!r} is taken by a deleted stream that forks still read from; delete the"
                        " forks first, or choose another name."
                    )
                check_same_config(stream, request)
                self.fences.check_same(stream, request)
            except Refusal as refusal:
                self._after_pending(stream, done, refusal)
                return
            self._after_pending(stream, done, Created(stream, False, stream.tail, stream.closed))
            return
        self.check_writable()
        if request.name in self.catalog.by_name:
            raise Conflict(
                f"Stream {request.name!r} has expired and its data is kept for now, because the server's clock jumped;"
                " the name is free again when the data is deleted. Choose another name, or run `headwater store"
                " confirm-expiry` if the clock is right."
            )
        record = self._decide_create(request, now_ms)
        checked_size(record)
        metadata_bytes = stream_bytes(record.name, record.content_type)
        if record.name not in self.server_streams:
            self.quota.check_stream(len(record.payload))
        self.quota.check_create(record.name, len(record.payload), metadata_bytes)
        if request.fenced:
            self.fences.create(record.id)
        self.catalog.apply(record)
        stream = self.catalog.by_id[record.id]
        stream.visible = stream.durable_closed = False
        stream.durable_index = stream.base_index
        stream.durable_position = stream.base_position
        self.quota.add(record.name, len(record.payload), metadata_bytes, 1)
        self.metrics.created += 1
        self.metrics.appended_messages += len(record.lengths)
        self.metrics.append_bytes += len(record.payload)
        self._sweeper.watch(stream)
        self._submit(stream, record, (), done, Created(stream, True, stream.tail, stream.closed))

    def append(
        self,
        name: str,
        content_type: str | None,
        body: bytes,
        producer: ProducerHeaders | None,
        stream_seq: str | None,
        close: bool,
        done: OnAppended,
        *,
        by_server: bool = False,
        messages: Messages | None = None,
        credentials: WriteCredentials | None = None,
    ) -> None:
        if name in self.server_streams and not by_server:
            raise read_only(name)
        now_ms = self._clock.now_ms()
        stream = self.catalog.by_name.get(name)
        if stream is None or stream.deleted or (stream.mortal and stream.expired(now_ms)):
            try:
                stream = self._live(name, now_ms)
            except Refusal as refusal:
                self._after_deletion(name, done, refusal)
                return
        claim = None
        try:
            if self.fences.streams and not by_server:
                claim = self.fences.check(stream, producer, credentials)
            decision = decide_append(stream, content_type, body, producer, stream_seq, close, now_ms, messages)
        except Refusal as refusal:
            self._after_pending(stream, done, refusal)
            return
        if isinstance(decision, AppendOutcome):
            if decision is AppendOutcome.DUPLICATE:
                self.metrics.duplicates += 1
                result = duplicate_append(stream, producer)
            else:
                accepted = accepted_producer(stream, producer)
                result = Appended(
                    decision, stream.message_index, stream.byte_position, stream.closed, accepted, stream.id
                )
            self._after_pending(stream, done, result)
            return
        if not self._committer.batch_is_checked:
            try:
                self._gate.check()
            except StorageBusy as busy:
                if len(body) < WAITS_FROM_BYTES:
                    raise
                again = partial(
                    self.append, name, content_type, body, producer, stream_seq, close, done,
                    by_server=by_server, messages=messages, credentials=credentials,
                )  # fmt: skip
                self._waiting.add(len(body), again, done, busy)
                return
        metadata_bytes = 0
        if decision.producer_id is not None and decision.producer_id not in (stream.producers or ()):
            self._producer_limit.make_room(stream, now_ms)
            metadata_bytes = PRODUCER_BYTES
        if decision.stream_seq is not None:
            metadata_bytes += len(decision.stream_seq) - len(stream.stream_seq or "")
        record_size = checked_size(decision)
        size = len(decision.payload)
        quota = self.quota
        if by_server:
            quota.check(size, metadata_bytes)
        else:
            quota.check_append(stream.name, stream.byte_position - stream.floor_position, size, metadata_bytes)
        if claim is not None:
            self.fences.accept(stream, decision)
        apply_append(stream, decision)
        quota.add(stream.name, size, metadata_bytes, 0)
        metrics = self.metrics
        metrics.appends += 1
        metrics.append_bytes += size
        metrics.appended_messages += len(decision.lengths)
        stream.in_flight += 1
        if producer is not None and decision.producer_id is None:
            producer = accepted_producer(stream, producer)
        result = Appended(
            AppendOutcome.ACCEPTED, stream.message_index, stream.byte_position, stream.closed, producer, stream.id
        )
        self._committer.submit(CommitEntry(stream, decision, (), done, result), record_size)

    def delete(self, name: str, done: OnDeleted, *, by_server: bool = False) -> None:
        if name in self.server_streams and not by_server:
            raise read_only(name)
        try:
            stream = self._live(name, self._clock.now_ms())
        except Refusal as refusal:
            self._after_deletion(name, done, refusal)
            return
        # A full disk refuses writes that need space; a deletion frees it.
        self._gate.check_failure()
        self.metrics.deleted += 1
        self._remove(stream, Delete(stream.id, self._clock.now_ms()), done)

    def look_up(self, name: str, *, touch: bool = False) -> LiveStream:
        """The stream that readers see under a name. A read (`touch`) restarts a sliding window."""
        now_ms = self._clock.now_ms()
        stream = self.seen(name)
        if stream is None:
            raise not_found(name)
        if stream.mortal and stream.expired(now_ms):
            self._expire(stream)
            raise soft_deleted(name) if self._view.is_soft_deleted(stream) else not_found(name)
        if self._view.is_soft_deleted(stream):
            raise soft_deleted(name)
        if touch:
            self.touch(stream)
        return stream

    def seen(self, name: str) -> LiveStream | None:
        """The stream that readers see under a name, in any state."""
        return self._view.find(name)

    def watch_changes(self, on_changed: Callable[[LiveStream], None]) -> None:
        """Call `on_changed` for every later record that changes what readers see of a stream."""
        earlier = self.publisher.on_changed

        def both(stream: LiveStream) -> None:
            assert earlier is not None
            guarded(earlier, stream)
            on_changed(stream)

        self.publisher.on_changed = on_changed if earlier is None else both
        self._committer.publishes_all = True

    def names(self) -> Iterator[str]:
        """The names of all streams, pending ones included."""
        return iter(self.catalog.by_name)

    def put_document(self, key: str, value: bytes | None, done: Callable[..., None] | None, result: object) -> None:
        """Store a small value under a key. It is durable when `done` is called. None removes the value."""
        self.check_writable()
        record = Document(key, value)
        size = checked_size(record)
        self.quota.count(0, document_bytes(key, value) - document_bytes(key, self.catalog.documents.get(key)))
        self.catalog.apply(record)
        self._committer.submit(CommitEntry(None, record, (), done, result), size)

    def after_all_pending(self, done: Callable[..., None], result: object) -> None:
        """Call `done` when everything that is queued so far is durable: for responses that depend on documents."""
        if self._committer.idle:
            done(result)
        else:
            self._committer.submit(CommitEntry(None, None, (), done, result), 0)

    def split(
        self,
        stream: LiveStream,
        start: Offset,
        end: Offset,
        count: int,
        convert: Callable[[Offset, Offset], T],
        done: Callable[[list[T] | Refusal], None],
    ) -> None:
        """Split a range into about `count` runs of equal size and convert each, in slices."""
        split_range(self.reader, self._scheduler, stream, start, end, count, convert, done)

    def retain(self, stream: LiveStream, record: Retain, done: Callable[..., None] | None, result: object) -> None:
        """Move the earliest retained offset of a stream. The caller has checked the record."""
        assert record.message_index >= stream.retained_index, "the earliest retained offset never moves back"
        self.catalog.apply(record)
        self._submit(stream, record, (), done, result)

    def expire_due(self) -> None:
        """Delete expired streams now, for responses that count streams."""
        self._sweeper.sweep()

    def confirm_expiry(self, done: Callable[..., None]) -> None:
        """Delete the expired streams that are kept after a clock jump, and call `done` with their number."""
        held = self._sweeper.held
        self.clock_guard.confirm()
        self.after_all_pending(done, held)

    @property
    def held_streams(self) -> int:
        """Expired streams that are kept after a clock jump."""
        return self._sweeper.held

    def claim_bytes(self, size: int) -> None:
        """Count bytes that are stored beside streams (snapshots) against the total limit."""
        self.quota.check(size)
        self.quota.count(size, 0)

    def release_bytes(self, size: int) -> None:
        self.quota.count(-size, 0)

    def check_writable(self) -> None:
        """Refuse a write that storage cannot accept."""
        self._gate.check()

    # -- implementation --------------------------------------------------------------------------------------------

    def _existing(self, name: str, now_ms: int) -> LiveStream | None:
        """The stream under a name in its pending state, if it has not ended."""
        stream = self.catalog.by_name.get(name)
        if stream is not None and not stream.deleted and stream.expired(now_ms):
            self._expire(stream)
            # If storage failed, the stream cannot be deleted, but it counts as expired.
            stream = self.catalog.by_name.get(name)
            return stream if stream is not None and stream.deleted else None
        return stream

    def _decide_create(self, request: CreateRequest, now_ms: int) -> Create:
        rule = self.retention.rule
        if request.fork is None:
            return new_stream(request, rule, now_ms)
        source = self._existing(request.fork.source_name, now_ms)
        return new_fork(request, request.fork, source, self.reader, rule, self._limits.max_fork_depth, now_ms)

    def _live(self, name: str, now_ms: int) -> LiveStream:
        stream = self._existing(name, now_ms)
        if stream is None:
            raise not_found(name)
        if stream.deleted:
            raise soft_deleted(name)
        return stream

    def _submit(
        self,
        stream: LiveStream,
        record: Record,
        removed: tuple[int, ...],
        done: Callable[..., None] | None,
        result: object,
    ) -> None:
        stream.in_flight += 1
        self._committer.submit(CommitEntry(stream, record, removed, done, result), record_bytes(record))

    def _after_pending(self, stream: LiveStream, done: Callable[..., None], result: object) -> None:
        """Call `done` now, or when the pending records of the stream are durable."""
        if stream.in_flight:
            self._committer.submit(CommitEntry(stream, None, (), done, result), 0)
        else:
            done(result)

    def _after_deletion(self, name: str, done: Callable[..., None], refusal: Refusal) -> None:
        """Refuse now, or when the deletion that causes the refusal is durable. An expiry needs no record."""
        ending = self._view.deleting(name)
        if ending is None or (ending.mortal and ending.expired(self._clock.now_ms())):
            raise refusal
        self._after_pending(ending, done, refusal)

    def _remove(self, stream: LiveStream, record: Delete, done: OnDeleted | None) -> None:
        owned = {each.id: each for each in self._cascade(stream)}
        removed = self.catalog.apply(record)
        self._sweeper.forget(stream)
        gone = [owned[stream_id] for stream_id in removed]
        for each in gone:
            self.quota.add(each.name, each.floor_position - each.byte_position, -metadata_of(each), -1)
        self._view.on_deletion_decided(stream, gone)
        self._submit(stream, record, removed, done, Deleted(stream.name))

    def _cascade(self, stream: LiveStream) -> Iterator[LiveStream]:
        """The stream, and the deleted sources above it that are removed with it because it is their last fork."""
        current: LiveStream | None = stream
        while current is not None:
            yield current
            source = self.catalog.by_id.get(current.fork.source_id) if current.fork is not None else None
            current = source if source is not None and source.deleted and source.children == 1 else None

    def _expire(self, stream: LiveStream) -> bool:
        """Delete an expired stream; False while it is kept after a clock jump."""
        if self.clock_guard.holds(stream):
            self.publisher.end_followers(stream)
            return False
        if self._committer.failure is None and not stream.deleted and stream.id in self.catalog.by_id:
            self.metrics.expired += 1
            self._remove(stream, Delete(stream.id, self._clock.now_ms(), expired=True), None)
        return True

    def _save_use(self, stream: LiveStream, record: Touch) -> None:
        if self._committer.failure is None:
            self.catalog.apply(record)
            self._submit(stream, record, (), None, None)

    def _evict(self, stream: LiveStream, record: Evict) -> None:
        self.catalog.apply(record)
        self.quota.count(0, -PRODUCER_BYTES * len(record.producer_ids))
        self.metrics.evicted_producers += len(record.producer_ids)
        self._submit(stream, record, (), None, None)

    def _save_clock(self, document: bytes) -> bool:
        if not self._storage.waits_for_disk:
            return True
        try:
            self.put_document(DOCUMENT_KEY, document, None, None)
        except Refusal:
            return False
        return True

    def _publish(self, batch: Sequence[CommitEntry]) -> None:
        self.publisher.publish(batch)
        if self._storage.waits_for_disk:
            self._continue_maintenance()

    def _continue_maintenance(self) -> None:
        guarded(self._storage.maintain, self._image_of)

    def _on_applied(self, entry: CommitEntry, record: Record) -> None:
        """Update derived state, before any response that depends on this record."""
        stream = entry.stream
        if type(record) is Document:
            self.buckets.document_stored(record)
        elif stream is None:
            return
        elif type(record) is Create:
            is_deleted = stream.deleted or stream.id not in self.catalog.by_id
            self._view.on_creation_durable(stream, is_deleted=is_deleted)
            guarded(self.snapshots.inherited, record)
            guarded(self.retention.created, stream)
            guarded(self.buckets.stream_created, stream)
        elif type(record) is Retain:
            guarded(self.snapshots.retained, record)
            guarded(self.retention.retained, stream)
        elif type(record) is Delete:
            self._view.on_deletion_durable(stream, entry.removed)
            guarded(self.snapshots.ended, stream.id)
            guarded(self.fences.ended, entry.removed)
            guarded(self.retention.ended, stream, entry.removed)
            guarded(self.buckets.stream_ended, stream)

    def _drop_front(self, stream: LiveStream, record: Retain) -> None:
        # This also runs on a nearly full disk, because it frees space.
        if self._committer.failure is None:
            self.retain(stream, record, None, None)

    def _image_of(self, stream_id: int) -> Image | None:
        stream = self.catalog.by_id.get(stream_id)
        return stream.image() if stream is not None and not stream.in_flight else None

    def _maintain(self) -> None:
        guarded(self.clock_guard.tick)
        self._continue_maintenance()
        guarded(self._gate.report)
        self._maintain_timer = self._scheduler.later(MAINTAIN_INTERVAL_S, self._maintain)
