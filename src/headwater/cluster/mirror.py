"""A mirror of the streams of other workers: in the coordinator all, in other workers those that they are home of.

Subscriptions, the registry and the listing use it instead of the coordinator's engine. A mirrored stream has the name,
the type and the tail offset that its owner last reported; it can be followed like any other, but has no messages.
While a worker is being restarted, its streams stay in the mirror; its next feed shows which of them were deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, Protocol

import msgspec

from headwater.cluster import feed
from headwater.cluster.feed import FedStream
from headwater.cluster.peers import PeerLostError, Peers
from headwater.cluster.relay import Relay
from headwater.core.errors import Conflict, InvalidOffset, Refusal
from headwater.core.offsets import ZERO, Offset, parse_token
from headwater.core.producers import ProducerHeaders
from headwater.core.records import Image
from headwater.core.rules import AppendOutcome, CreateRequest
from headwater.engine.committer import guarded
from headwater.engine.engine import Engine
from headwater.engine.metrics import Metrics
from headwater.engine.reading import ReadChunk
from headwater.engine.results import Appended, OnAppended, OnCreated, OnDeleted
from headwater.engine.stream import LiveStream, StreamFollower
from headwater.engine.stream_refusals import not_found

log = logging.getLogger("headwater.cluster")


class MirroredStream(LiveStream):
    """A stream of another worker. That worker reports its expiry."""

    __slots__ = ()

    def expired(self, now_ms: int) -> bool:
        return False


def image_of(fed: FedStream) -> Image:
    """The state of a stream as its worker described it."""
    return Image(
        fed.id,
        fed.name,
        fed.created_ms,
        fed.content_type,
        fed.ttl_secs,
        fed.expires_at_ms,
        fed.message_index,
        fed.byte_position,
        0,
        fed.written_ms,
        fed.closed,
        fork=fed.fork,
        retained_index=fed.retained_index,
        retained_position=fed.retained_position,
        snapshot=fed.snapshot,
    )


class Mirror:
    """The streams of the other workers."""

    def __init__(self, peers: Peers) -> None:
        self._workers: dict[int, dict[int, LiveStream]] = {
            worker: {} for worker in range(peers.workers) if worker != peers.worker
        }
        self._listed: dict[int, set[int]] = {}
        """For each worker that is sending all its streams: those that it has sent so far."""
        self._complete: set[int] = set()
        self.by_name: dict[str, LiveStream] = {}
        self.owners: dict[int, int] = {}
        """The worker of each mirrored incarnation."""
        self.fenced: dict[int, str] = {}
        """The names of the fenced streams, by incarnation."""
        self.is_complete = asyncio.Event()
        """Every worker has sent all its streams at least once."""
        self.on_created: list[Callable[[LiveStream], None]] = []
        self.on_deleted: list[Callable[[LiveStream], None]] = []
        self.on_changed: list[Callable[[LiveStream], None]] = []
        self.on_removed: list[Callable[[str], None]] = []
        """Called with the name of a deleted stream when the last fork that needed it is deleted as well."""
        if not self._workers:
            self.is_complete.set()

    def __iter__(self) -> Iterator[LiveStream]:
        return iter(self.by_name.values())

    def on_feed(self, worker: int, event: Any) -> None:
        kind, content = event
        if kind == feed.STREAMS:
            for stream in msgspec.convert(content, tuple[FedStream, ...]):
                self._on_stream(worker, stream)
        elif kind == feed.GONE:
            for stream_id in content:
                self._on_gone(worker, stream_id)
        elif kind == feed.REMOVED:
            for name in content:
                for on_removed in self.on_removed:
                    guarded(on_removed, name)
        elif kind == feed.BEGIN:
            self._listed[worker] = set()
        elif kind == feed.COMPLETE:
            listed = self._listed.pop(worker, set())
            for stream_id in [stream_id for stream_id in self._workers[worker] if stream_id not in listed]:
                self._on_gone(worker, stream_id)
            self._complete.add(worker)
            if len(self._complete) == len(self._workers):
                self.is_complete.set()

    def _on_stream(self, worker: int, fed: FedStream) -> None:
        if worker in self._listed:
            self._listed[worker].add(fed.id)
        stream = self._workers[worker].get(fed.id)
        if stream is None:
            self._create(worker, fed)
            return
        if (stream.durable_index, stream.durable_closed, stream.durable_retained_index) == (
            fed.message_index,
            fed.closed,
            fed.retained_index,
        ) and stream.durable_snapshot == fed.snapshot:
            return
        stream.message_index = stream.durable_index = fed.message_index
        stream.byte_position = stream.durable_position = fed.byte_position
        stream.closed = stream.durable_closed = fed.closed
        stream.retained_index = stream.durable_retained_index = fed.retained_index
        stream.retained_position = stream.durable_retained_position = fed.retained_position
        stream.snapshot = stream.durable_snapshot = fed.snapshot
        stream.written_ms = fed.written_ms
        self._notify(self.on_changed, stream)
        for follower in tuple(stream.followers or ()):
            guarded(follower.wake)

    def _create(self, worker: int, fed: FedStream) -> None:
        stream = MirroredStream(image_of(fed))
        earlier = self.by_name.get(fed.name)
        if earlier is not None:
            self._on_gone(self.owners[earlier.id], earlier.id)
        self._workers[worker][fed.id] = stream
        self.by_name[fed.name] = stream
        self.owners[fed.id] = worker
        if fed.is_fenced:
            self.fenced[fed.id] = fed.name
        self._notify(self.on_created, stream)
        self._notify(self.on_changed, stream)

    def _on_gone(self, worker: int, stream_id: int) -> None:
        stream = self._workers[worker].pop(stream_id, None)
        if stream is None:
            return
        del self.owners[stream_id]
        self.fenced.pop(stream_id, None)
        if self.by_name.get(stream.name) is stream:
            del self.by_name[stream.name]
        for follower in tuple(stream.followers or ()):
            guarded(follower.gone, not_found(stream.name))
        self._notify(self.on_deleted, stream)
        self._notify(self.on_changed, stream)

    def _notify(self, observers: list[Callable[[LiveStream], None]], stream: LiveStream) -> None:
        for observer in observers:
            guarded(observer, stream)


class AllStreamsCatalog:
    """The streams of all workers. The documents are the coordinator's."""

    def __init__(self, engine: Engine, mirror: Mirror) -> None:
        self._engine = engine
        self._mirror = mirror
        self.by_name: Mapping[str, LiveStream] = ChainMap(engine.catalog.by_name, mirror.by_name)
        self.documents: Mapping[str, bytes] = engine.catalog.documents

    def __iter__(self) -> Iterator[LiveStream]:
        return chain(self._engine.catalog, self._mirror)


class AllStreamsAnnouncer:
    """Announces the creation and deletion of streams of all workers."""

    def __init__(self, engine: Engine, mirror: Mirror) -> None:
        self.on_created: list[Callable[[LiveStream], None]] = []
        self.on_deleted: list[Callable[[LiveStream], None]] = []
        for source in (engine.publisher, mirror):
            source.on_created.append(self._created)
            source.on_deleted.append(self._deleted)

    def _created(self, stream: LiveStream) -> None:
        for on_created in self.on_created:
            guarded(on_created, stream)

    def _deleted(self, stream: LiveStream) -> None:
        for on_deleted in self.on_deleted:
            guarded(on_deleted, stream)


class AllStreamsReader:
    """Offsets of streams of all workers. Owners have already checked those of mirrored streams."""

    def __init__(self, engine: Engine, mirror: Mirror) -> None:
        self._reader = engine.reader
        self._owners = mirror.owners
        self.problems: dict[tuple[int, str], str] = {}
        """Errors that owners found in offsets, by incarnation and offset."""
        self._placed = ZERO

    def parse_offset(self, stream: LiveStream, text: str) -> Offset:
        if stream.id not in self._owners:
            return self._reader.parse_offset(stream, text)
        problem = self.problems.get((stream.id, text))
        token = parse_token(text)
        if problem or token is None:
            raise InvalidOffset(
                problem or f"Offset {text!r} is malformed. Use -1, now, or one that the server returned."
            )
        self._placed = token.offset
        return token.offset

    def boundary(self, stream: LiveStream, message_index: int) -> int | None:
        if stream.id not in self._owners:
            return self._reader.boundary(stream, message_index)
        return self._placed.byte_position if message_index == self._placed.message_index else None

    def chunk(self, stream: LiveStream, start: Offset, max_bytes: int) -> ReadChunk:
        return self._reader.chunk(stream, start, max_bytes)

    def buffers(self, chunk: ReadChunk) -> Sequence[bytes | memoryview]:
        return self._reader.buffers(chunk)


class Barrier(Protocol):
    @property
    def is_open(self) -> bool:
        """Whether nothing has to wait."""

    def then(self, do: Callable[[], None]) -> None:
        """Call `do`, after everything that has to be stored before."""


class AllStreams:
    """The streams of all workers, for components that follow them. Only the coordinator's own streams are written."""

    def __init__(self, engine: Engine, mirror: Mirror, relay: Relay) -> None:
        self._engine = engine
        self._mirror = mirror
        self._relay = relay
        self._tasks: set[asyncio.Task[None]] = set()
        self.server_streams = engine.server_streams
        self.metrics: Metrics = engine.metrics
        self.catalog = AllStreamsCatalog(engine, mirror)
        self.publisher = AllStreamsAnnouncer(engine, mirror)
        self.barrier: Barrier | None = None
        """Delays what may show that a claim has ended until the other workers have stored its seals (`fencing`)."""
        self.reader = AllStreamsReader(engine, mirror)

    def now_ms(self) -> int:
        return self._engine.now_ms()

    def seen(self, name: str) -> LiveStream | None:
        return self._engine.seen(name) or self._mirror.by_name.get(name)

    def names(self) -> Iterator[str]:
        return chain(self._engine.names(), self._mirror.by_name)

    def watch_changes(self, on_changed: Callable[[LiveStream], None]) -> None:
        self._engine.watch_changes(on_changed)
        self._mirror.on_changed.append(on_changed)

    def create(self, request: CreateRequest, done: OnCreated, *, by_server: bool = False) -> None:
        self._engine.create(request, done, by_server=by_server)

    def delete(self, name: str, done: OnDeleted, *, by_server: bool = False) -> None:
        self._engine.delete(name, done, by_server=by_server)

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
    ) -> None:
        stream = self._mirror.by_name.get(name)
        if stream is None or name in self._engine.catalog.by_name:
            append = partial(
                self._engine.append, name, content_type, body, producer, stream_seq, close, done, by_server=by_server
            )
            if self.barrier is None or self.barrier.is_open:
                append()
            else:
                self.barrier.then(partial(_reporting, append, done))
            return
        assert producer is not None, "only a repeated append that changes nothing can be sent to another worker"
        work = self._append_elsewhere(self._mirror.owners[stream.id], stream, content_type, body, producer, done)
        # Queued after everything that the append depends on.
        self.after_all_pending(lambda _: self._run(work), None)

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _append_elsewhere(
        self,
        worker: int,
        stream: LiveStream,
        content_type: str | None,
        body: bytes,
        producer: ProducerHeaders,
        done: OnAppended,
    ) -> None:
        try:
            problem = await self._relay.ask(worker, "append", (stream.name, content_type, body, tuple(producer)))
        except Refusal as refusal:
            done(refusal)
            return
        if problem:
            done(Conflict(problem))
        else:
            tail = stream.durable_index, stream.durable_position
            done(Appended(AppendOutcome.ACCEPTED, *tail, stream.durable_closed, producer, stream.id))

    def follow(self, stream: LiveStream, follower: StreamFollower, *, reading: bool = True) -> None:
        self._engine.follow(stream, follower, reading=reading)

    def unfollow(self, stream: LiveStream, follower: StreamFollower) -> None:
        self._engine.unfollow(stream, follower)

    def put_document(self, key: str, value: bytes | None, done: Callable[..., None] | None, result: object) -> None:
        self._engine.put_document(key, value, done, result)

    def after_all_pending(self, done: Callable[..., None], result: object) -> None:
        barrier = self.barrier
        if barrier is not None:
            done = partial(_delayed, barrier, done)
        self._engine.after_all_pending(done, result)

    # -- questions to the other workers ----------------------------------------------------------------------------

    async def sync(self) -> None:
        """Receive everything that any worker has acknowledged. Workers that are being restarted are skipped."""
        await self._ask_connected("sync")

    async def follow_tails(self) -> None:
        """Receive the tail offsets of the other workers' streams from now on."""
        await self._ask_connected("tails")

    async def check_offsets(self, offsets: Sequence[tuple[str, str]]) -> None:
        """Have the owners of mirrored streams check offsets (stream, offset) that a client sent."""
        by_worker: dict[int, list[tuple[str, str]]] = {}
        for name, text in offsets:
            stream = self._mirror.by_name.get(name)
            if stream is not None:
                by_worker.setdefault(self._mirror.owners[stream.id], []).append((name, text))
        self.reader.problems.clear()
        for worker, asked in by_worker.items():
            problems = await self._relay.ask(worker, "check-offsets", asked)
            for (name, text), problem in zip(asked, problems, strict=True):
                stream = self._mirror.by_name.get(name)
                if stream is not None and problem:
                    self.reader.problems[stream.id, text] = problem

    async def _ask_connected(self, question: str) -> None:
        async def ask(worker: int) -> None:
            # The next feed of a lost worker begins with all its streams.
            with suppress(PeerLostError):
                await self._relay.peers.ask(worker, question)

        await asyncio.gather(*(ask(peer.worker) for peer in self._relay.peers.all()))


def _delayed(barrier: Barrier, done: Callable[..., None], result: object) -> None:
    barrier.then(partial(done, result))


def _reporting(append: Callable[[], None], done: OnAppended) -> None:
    """Append, and report a refusal like a result."""
    try:
        append()
    except Refusal as refusal:
        done(refusal)
