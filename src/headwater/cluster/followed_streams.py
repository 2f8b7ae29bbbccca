"""Streams of other workers that live readers here follow: the latest messages, which their owners send (`tails`).

Invariant: the part of a stream that is kept here is durable at its owner, in order and without a gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from headwater.cluster.mirror import MirroredStream, image_of
from headwater.cluster.peers import PeerLostError
from headwater.cluster.relay import Relay, unavailable
from headwater.cluster.tails import TailGone, TailUpdate
from headwater.core.errors import Refusal
from headwater.core.offsets import BEGINNING, NOW, parse_token
from headwater.engine.committer import guarded
from headwater.engine.engine import Engine
from headwater.engine.publisher import AT_ONCE_MAX
from headwater.engine.reading import StreamReader
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream, StreamFollower
from headwater.engine.stream_refusals import not_found
from headwater.storage.memory import MemoryStorage
from headwater.storage.tail import Tail

KEPT_BYTES: Final = 1024 * 1024
"""The most bytes kept of one stream; beyond that, it is cut to half of this."""
KEPT_MAX_BYTES: Final = 64 * 1024 * 1024
"""The most bytes kept of all streams. Beyond that, readers of further streams are relayed."""
LINGER_S: Final = 5.0
"""How long a stream without readers is still followed: a long-poll client reconnects soon."""

_decode: Final = msgspec.msgpack.Decoder(TailUpdate | TailGone).decode


class KeptTails(MemoryStorage):
    """The bytes of followed streams."""

    def begin(self, stream_id: int, message_index: int, byte_position: int) -> None:
        self.forget(stream_id)
        self.tails[stream_id] = Tail(message_index, byte_position)

    def extend(self, stream_id: int, data: bytes, lengths: Sequence[int], at_ms: int) -> None:
        if data:
            self.tails[stream_id].extend(data, lengths, at_ms)
            self._bytes += len(data)

    def forget(self, stream_id: int) -> None:
        tail = self.tails.pop(stream_id, None)
        if tail is not None:
            self._bytes -= tail.size

    def shrink(self, stream_id: int) -> tuple[int, int]:
        """Keep only the last part of a stream; return where it begins."""
        tail = self.tails[stream_id]
        if tail.size > KEPT_BYTES:
            self.trim(
                stream_id,
                *tail.cut(tail.message_index, tail.byte_position, tail.end_index, tail.size - KEPT_BYTES // 2),
            )
        return tail.message_index, tail.byte_position


class FollowedStream:
    """The kept part of a stream of another worker."""

    def __init__(self, owner: int, update: TailUpdate) -> None:
        self.owner: Final = owner
        self.stream: Final = MirroredStream(msgspec.structs.replace(image_of(update.stream), fork=None))
        self.kept_index = update.message_index
        self.retained_index = update.stream.retained_index
        self.leaving: asyncio.TimerHandle | None = None
        self.is_waking = False
        self.must_wake_again = False

    def serves(self, token: str | None, *, is_bucketed: bool) -> bool:
        """Whether a reader can start at an offset."""
        if token == NOW:
            return True
        if token == BEGINNING:
            return self.kept_index <= self.retained_index and not (is_bucketed and self.retained_index)
        parsed = parse_token(token) if token is not None else None
        if parsed is None or parsed.incarnation not in (None, self.stream.id):
            return False
        return self.kept_index <= parsed.offset.message_index <= self.stream.durable_index


class FollowedStreams:
    """The engine interface of live readers, for streams of other workers."""

    deferring = None
    """All kept data is in memory."""

    def __init__(self, engine: Engine, relay: Relay, scheduler: Scheduler) -> None:
        self._storage = KeptTails()
        self._by_id: dict[int, LiveStream] = {}
        self._followed: dict[int, FollowedStream] = {}
        self._by_name: dict[str, FollowedStream] = {}
        self._relay = relay
        self._slices = Slices(scheduler)
        self._begun: dict[str, asyncio.Future[None]] = {}
        self._to_sync: dict[int, tuple[set[int], asyncio.Future[None]]] = {}
        """By owner: the streams of readers that start in this iteration of the event loop."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self.reader: Final = StreamReader(self._storage, self._by_id)
        self.quota: Final = engine.quota
        self.buckets: Final = engine.buckets
        self.metrics: Final = engine.metrics
        self.now_ms: Final = engine.now_ms
        relay.peers.on_tail = self._on_tail
        relay.peers.on_disconnected.append(self._on_disconnected)

    # -- as the engine of live readers -------------------------------------------------------------------------------

    def look_up(self, name: str, *, touch: bool = False) -> LiveStream:
        found = self._by_name.get(name)
        if found is None:
            raise not_found(name)
        return found.stream

    def touch(self, stream: LiveStream) -> None:
        """Do nothing: the owner knows that the stream is being read."""

    def follow(self, stream: LiveStream, follower: StreamFollower) -> None:
        if stream.followers is None:
            stream.followers = {}
        stream.followers[follower] = True
        if self.quota.namespaces is not None:
            self.quota.namespaces.add(stream.name, readers=1)
        found = self._followed.get(stream.id)
        if found is not None and found.leaving is not None:
            found.leaving.cancel()
            found.leaving = None

    def unfollow(self, stream: LiveStream, follower: StreamFollower) -> None:
        if stream.followers is None or not stream.followers.pop(follower, False):
            return
        if self.quota.namespaces is not None:
            self.quota.namespaces.add(stream.name, readers=-1)
        if not stream.followers:
            stream.followers = None
            stream.frame = None
            found = self._followed.get(stream.id)
            if found is not None:
                self._linger(found)

    # -- following ---------------------------------------------------------------------------------------------------

    async def ready(self, owner: int, name: str) -> FollowedStream | None:
        """The stream with everything that its owner has acknowledged; None if it is not followed."""
        found = self._by_name.get(name)
        with suppress(PeerLostError):
            if found is not None:
                await self._sync(found)
            elif self._storage.usage().payload_bytes < KEPT_MAX_BYTES:
                await self._begin(owner, name)
        return self._by_name.get(name)

    async def _begin(self, owner: int, name: str) -> None:
        begun = self._begun.get(name)
        if begun is not None:
            await asyncio.shield(begun)
            # The owner may have answered before it acknowledged data that this reader must see.
            found = self._by_name.get(name)
            if found is not None:
                await self._sync(found)
            return
        begun = self._begun[name] = self._relay.loop.create_future()
        try:
            await self._relay.peers.ask(owner, "follow-tail", name)
        finally:
            del self._begun[name]
            begun.set_result(None)

    async def _sync(self, found: FollowedStream) -> None:
        """Wait for everything that the owner has acknowledged. Readers that start in one iteration share a request."""
        waiting = self._to_sync.get(found.owner)
        if waiting is None:
            waiting = self._to_sync[found.owner] = (set(), self._relay.loop.create_future())
            task = self._relay.loop.create_task(self._ask_to_send(found.owner))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        waiting[0].add(found.stream.id)
        await asyncio.shield(waiting[1])

    async def _ask_to_send(self, owner: int) -> None:
        stream_ids, done = self._to_sync.pop(owner)
        try:
            with suppress(PeerLostError):
                await self._relay.peers.ask(owner, "send-tails", tuple(stream_ids))
        finally:
            done.set_result(None)

    def _linger(self, found: FollowedStream) -> None:
        if found.leaving is None:
            # Following a stream keeps it from expiring.
            linger_s = 0.0 if found.stream.ttl_secs is not None else LINGER_S
            found.leaving = self._relay.loop.call_later(linger_s, self._leave, found)

    def _leave(self, found: FollowedStream) -> None:
        found.leaving = None
        if self._followed.get(found.stream.id) is found and not found.stream.followers:
            self._forget(found)
            peer = self._relay.peers.get(found.owner)
            if peer is not None:
                peer.leave_tail(found.stream.id)

    def _forget(self, found: FollowedStream, refusal: Refusal | None = None) -> None:
        """Stop to follow a stream. Its readers get the refusal, by default one that says that it may still exist."""
        stream = found.stream
        if found.leaving is not None:
            found.leaving.cancel()
            found.leaving = None
        del self._followed[stream.id], self._by_id[stream.id]
        if self._by_name.get(stream.name) is found:
            del self._by_name[stream.name]
        for follower in tuple(stream.followers or ()):
            guarded(follower.gone, refusal or unavailable(found.owner, 0))
        self._storage.forget(stream.id)

    # -- what owners send --------------------------------------------------------------------------------------------

    def _on_tail(self, worker: int, payload: bytes) -> None:
        update = _decode(payload)
        if isinstance(update, TailGone):
            gone = self._followed.get(update.stream_id)
            if gone is not None:
                self._forget(gone, not_found(gone.stream.name))
            return
        found = self._followed.get(update.stream.id)
        if update.is_first:
            for earlier in (found, self._by_name.get(update.stream.name)):
                if earlier is not None and earlier.stream.id in self._followed:
                    self._forget(earlier)
            found = self._add(worker, update)
        elif found is None:
            return  # The reader has disconnected.
        self._apply(found, update)

    def _add(self, worker: int, update: TailUpdate) -> FollowedStream:
        found = FollowedStream(worker, update)
        stream = found.stream
        self._followed[stream.id] = self._by_name[stream.name] = found
        self._by_id[stream.id] = stream
        self._storage.begin(stream.id, update.message_index, update.byte_position)
        self._linger(found)
        return found

    def _apply(self, found: FollowedStream, update: TailUpdate) -> None:
        stream, state = found.stream, update.stream
        if not update.is_first and update.message_index != stream.durable_index:
            # A gap: readers at earlier offsets cannot be served here.
            self._storage.begin(stream.id, update.message_index, update.byte_position)
        self._storage.extend(stream.id, update.data, update.lengths, state.written_ms)
        kept_index, kept_position = self._storage.shrink(stream.id)
        found.kept_index, found.retained_index = kept_index, state.retained_index
        stream.durable_index, stream.durable_position = state.message_index, state.byte_position
        stream.durable_closed = state.closed
        stream.written_ms, stream.used_ms = state.written_ms, self.now_ms()
        stream.floor_index, stream.floor_position = kept_index, kept_position
        # A reader at an offset that is no longer kept must stop.
        if kept_index > state.retained_index:
            stream.durable_retained_index, stream.durable_retained_position = kept_index, kept_position
        else:
            stream.durable_retained_index = state.retained_index
            stream.durable_retained_position = state.retained_position
        self._wake(found)

    def _wake(self, found: FollowedStream) -> None:
        followers = tuple(found.stream.followers or ())
        if found.is_waking:
            found.must_wake_again = True
        elif len(followers) <= AT_ONCE_MAX:
            for follower in followers:
                guarded(follower.wake)
            self._observe_lag(found, bool(followers))
        else:
            found.is_waking = True
            self._slices.add(self._waking_all(found), _ignore)

    def _waking_all(self, found: FollowedStream) -> Iterator[None]:
        """Wake the followers in slices, as `StreamPublisher` does, and once more if there was another change."""
        found.must_wake_again = True
        while found.must_wake_again:
            found.must_wake_again = False
            for follower in tuple(found.stream.followers or ()):
                if follower in (found.stream.followers or ()):
                    guarded(follower.wake)
                yield
        found.is_waking = False
        self._observe_lag(found, True)

    def _observe_lag(self, found: FollowedStream, has_readers: bool) -> None:
        if has_readers and found.stream.written_ms:
            lag_ms = max(self.now_ms() - found.stream.written_ms, 0)
            self.metrics.delivery_lag_seconds.observe(lag_ms / 1000)

    def _on_disconnected(self, worker: int) -> None:
        for found in [found for found in self._followed.values() if found.owner == worker]:
            self._forget(found)


def _ignore(error: Exception | None) -> None:
    """Do nothing: each follower handles its own errors."""
