"""Writer leases: end a stream whose writer stopped renewing its lease.

A lease is a document beside its stream, so it survives a restart; renewals are only in memory, and after a restart
every lease lasts for its full time again. When it expires, the server appends the message that the writer provided, and
closes the stream or fences the writer's producer. Invariant: that happens once. A closed or deleted stream has no
lease, and an expiry that is repeated after a crash is a duplicate append of the same producer.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeAlias

import msgspec

from headwater.core.catalog import Catalog
from headwater.core.errors import (
    LeaseHeld,
    LeaseNotFound,
    Refusal,
    StreamClosed,
    TooManyLeases,
)
from headwater.core.leases import LeaseTerms, check_terms, decode_terms, encode_terms
from headwater.core.producers import ProducerHeaders
from headwater.core.rules import CLOSED_HEADER
from headwater.engine.alarms import Alarms
from headwater.engine.quota import Quota, document_bytes
from headwater.engine.results import Appended, OnAppended
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import DocumentWriter, StreamAppender
from headwater.engine.stream_refusals import read_only

log = logging.getLogger("headwater.engine")

LEASE_PREFIX: Final = "lease/"
RETRY_MS: Final = 5_000
"""Delay before the end of a stream is retried after storage refused it."""


_PERMANENT: Final = frozenset((403, 404, 409, 410))
"""Statuses of refusals for which a retry is useless."""


class LeaseView(msgspec.Struct, frozen=True):
    """A lease as its holder sees it."""

    holder: str
    ttl_ms: int
    expires_in_ms: int


OnLease: TypeAlias = Callable[[LeaseView | Refusal], None]


class LeaseHost(DocumentWriter, StreamAppender, Protocol):
    """The part of the engine that leases use."""

    catalog: Catalog[LiveStream]
    quota: Quota
    server_streams: set[str]

    def now_ms(self) -> int: ...

    def check_writable(self) -> None: ...

    def look_up(self, name: str) -> LiveStream: ...


class WriterLease:
    """One lease. Every renewal changes `until_ms`; None while the end of the stream is being written.

    `terms` lacks the last message, which only the lease's document has: it is large, and rarely needed.
    """

    __slots__ = ("alarm_ms", "stream_id", "terms", "until_ms")

    def __init__(self, stream_id: int, terms: LeaseTerms, now_ms: int) -> None:
        self.stream_id = stream_id
        self.terms = msgspec.structs.replace(terms, final=b"")
        self.until_ms: int | None = now_ms + terms.ttl_ms
        self.alarm_ms: int | None = None

    @property
    def key(self) -> str:
        return f"{LEASE_PREFIX}{self.stream_id:016x}"

    def deadline_ms(self) -> int | None:
        return self.until_ms

    def has_expired(self, now_ms: int) -> bool:
        return self.until_ms is None or self.until_ms <= now_ms


class WriterLeases:
    def __init__(self, engine: LeaseHost, scheduler: Scheduler, max_leases: int, ttl_max_ms: int) -> None:
        self._engine = engine
        self.max_leases: Final = max_leases
        self.elsewhere = 0
        """The number of leases in other workers of the server."""
        self.on_change: Callable[[], None] | None = None
        self.ttl_max_ms: Final = ttl_max_ms
        self._alarms: Alarms[WriterLease] = Alarms(engine, scheduler, self._on_alarm)
        self._slices = Slices(scheduler)
        self._by_stream: dict[int, WriterLease] = {}
        self._due: deque[WriterLease] = deque()
        """Expired leases whose streams have not been ended yet."""
        self.expired = 0
        """Leases that ended a stream."""

    def __len__(self) -> int:
        return len(self._by_stream)

    def start(self) -> None:
        """Restore the leases from their documents, each for its full time."""
        now_ms = self._engine.now_ms()
        for key, value in list(self._engine.catalog.documents.items()):
            if not key.startswith(LEASE_PREFIX):
                continue
            lease = WriterLease(int(key.removeprefix(LEASE_PREFIX), 16), decode_terms(value), now_ms)
            if lease.terms.epoch is not None:
                lease.until_ms = now_ms
            self._by_stream[lease.stream_id] = lease
            if self._open_stream(lease) is None:
                self._forget(lease)
            else:
                self._alarms.set(lease)

    def stop(self) -> None:
        self._alarms.stop()

    def acquire(self, name: str, terms: LeaseTerms, *, take_over: bool, done: OnLease) -> None:
        """Take the lease of a stream, or replace its terms. `done` is called when that is durable."""
        stream = self._writable_stream(name)
        check_terms(terms, self.ttl_max_ms)
        now_ms = self._engine.now_ms()
        known = self._by_stream.get(stream.id)
        if known is not None:
            if known.has_expired(now_ms):
                self._end(known)
                raise LeaseHeld(
                    "The lease of this stream has expired, and its end is being written; retry in a moment."
                )
            if known.terms.holder != terms.holder and not take_over:
                raise _held(known)
        elif len(self._by_stream) + self.elsewhere >= self.max_leases:
            raise TooManyLeases(
                f"The server has {self.max_leases} writer leases, which is the limit (limits.max_leases); release"
                " leases"
                " of writers that have finished, or raise it."
            )
        lease = WriterLease(stream.id, terms, now_ms)
        value = encode_terms(terms)
        self._engine.check_writable()
        self._engine.quota.check(0, document_bytes(lease.key, value))
        self._by_stream[stream.id] = lease
        self._alarms.set(lease)
        self._changed()
        self._engine.put_document(lease.key, value, done, self._view(lease))

    def renew(self, name: str, holder: str) -> LeaseView:
        """Renew a lease for its full time."""
        lease = self._held_by(name, holder)
        lease.until_ms = self._engine.now_ms() + lease.terms.ttl_ms
        return self._view(lease)

    def release(self, name: str, holder: str, done: Callable[[Refusal | None], None]) -> None:
        """End a lease without ending the stream."""
        lease = self._held_by(name, holder)
        del self._by_stream[lease.stream_id]
        self._changed()
        lease.until_ms = None
        self._engine.put_document(lease.key, None, done, None)

    def show(self, name: str) -> LeaseView:
        return self._view(self._lease_of(self._engine.look_up(name)))

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _writable_stream(self, name: str) -> LiveStream:
        if name in self._engine.server_streams:
            raise read_only(name)
        stream = self._engine.look_up(name)
        if stream.closed:
            raise StreamClosed("The stream is closed, so it has no writer; write to another stream.", (CLOSED_HEADER,))
        return stream

    def _lease_of(self, stream: LiveStream) -> WriterLease:
        lease = self._by_stream.get(stream.id)
        if lease is None or stream.closed:
            raise LeaseNotFound(f"There is no writer lease on {stream.name!r}; acquire one with ?lease=acquire.")
        return lease

    def _held_by(self, name: str, holder: str) -> WriterLease:
        """The lease of a stream, if this writer holds it. An expired lease counts as expired before its timer fires."""
        lease = self._lease_of(self._writable_stream(name))
        if lease.terms.holder != holder:
            raise _held(lease)
        if lease.has_expired(self._engine.now_ms()):
            self._end(lease)
            raise LeaseHeld("The lease has expired, and the server ends the stream; stop this writer.")
        return lease

    def _view(self, lease: WriterLease) -> LeaseView:
        left_ms = max(0, (lease.until_ms or 0) - self._engine.now_ms())
        return LeaseView(lease.terms.holder, lease.terms.ttl_ms, left_ms)

    def _on_alarm(self, lease: WriterLease) -> None:
        self._due.append(lease)
        if len(self._due) == 1:
            # In slices, because many may expire at once, and each of them is an append.
            self._slices.add(self._end_due(), _log_failure)

    def _end_due(self) -> Iterator[None]:
        while self._due:
            lease = self._due[0]
            # Skip a lease that was replaced by another one.
            if self._by_stream.get(lease.stream_id) is lease:
                if lease.has_expired(self._engine.now_ms()):
                    self._end(lease)
                else:
                    self._alarms.set(lease)
            self._due.popleft()
            yield

    def _end(self, lease: WriterLease) -> None:
        """Append the last message, and close the stream or fence the producer."""
        stream = self._open_stream(lease)
        if stream is None:
            self._forget(lease)
            return
        if lease.until_ms is None:
            return
        lease.until_ms = None

        def done(result: Appended | Refusal) -> None:
            self._ended(lease, stream.name, result)

        try:
            self._append_end(lease, stream, done)
        except Refusal as refusal:
            done(refusal)

    def _append_end(self, lease: WriterLease, stream: LiveStream, done: OnAppended) -> None:
        terms, producer = decode_terms(self._engine.catalog.documents[lease.key]), None
        producer_id, epoch = terms.producer_id, terms.epoch
        if producer_id is not None:
            if epoch is None:
                known = (stream.producers or {}).get(producer_id)
                epoch = known.epoch + 1 if known is not None else 0
                terms = msgspec.structs.replace(terms, epoch=epoch)
                self._engine.put_document(lease.key, encode_terms(terms), None, None)
            producer = ProducerHeaders(producer_id, epoch, 0)
        content_type = stream.type.header
        self._engine.append(stream.name, content_type, terms.final, producer, None, terms.close, done, by_server=True)

    def _ended(self, lease: WriterLease, name: str, result: Appended | Refusal) -> None:
        if isinstance(result, Refusal) and result.status not in _PERMANENT:
            # Storage or memory is full, or failed.
            lease.until_ms = self._engine.now_ms() + RETRY_MS
            self._alarms.set(lease)
            return
        if isinstance(result, Appended):
            self.expired += 1
            log.warning("stream %r was ended: its writer %r did not renew its lease", name, lease.terms.holder)
        else:
            # Another writer has taken over, or the stream was closed or deleted.
            log.info("stream %r was not ended when its writer's lease expired: %s", name, result.detail)
        self._forget(lease)

    def _open_stream(self, lease: WriterLease) -> LiveStream | None:
        """The stream of a lease while it is open; None if it was closed or deleted."""
        stream = self._engine.catalog.by_id.get(lease.stream_id)
        return None if stream is None or stream.deleted or stream.closed else stream

    def _forget(self, lease: WriterLease) -> None:
        if self._by_stream.get(lease.stream_id) is not lease:
            return
        del self._by_stream[lease.stream_id]
        self._changed()
        lease.until_ms = None
        try:
            self._engine.put_document(lease.key, None, None, None)
        except Refusal:
            # The next start removes the document: it removes leases of streams that have ended.
            log.warning("the document %s could not be removed", lease.key)


def _held(lease: WriterLease) -> LeaseHeld:
    return LeaseHeld(
        f"{lease.terms.holder!r} holds the lease of this stream; stop this writer, or acquire it with take_over."
    )


def _log_failure(error: Exception | None) -> None:
    if error is not None:
        log.error("expired writer leases were not handled", exc_info=error)
