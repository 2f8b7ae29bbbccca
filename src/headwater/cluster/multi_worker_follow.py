"""One event stream over streams of all workers: joins the events that each worker sends for the streams that it owns.

The worker that got the request assigns the id, records what was sent, and has the connection. Every worker gets the
whole request and follows the streams that it owns. The owner of a name reports a stream that does not exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from headwater.cluster import frames
from headwater.cluster.peers import NO_ORIGIN, Peer, TunnelServer
from headwater.cluster.placements import Placements
from headwater.cluster.relay import Relay
from headwater.cluster.shards import ShardMap
from headwater.core.errors import Refusal, TooManyFollowed
from headwater.engine.multi_stream_follow import FollowRequest
from headwater.http.context import Context
from headwater.http.followed_events import EncodedEvent, FollowedEvents, LocalEvents
from headwater.http.scopes import Scope

AHEAD_BYTES: Final = 256 * 1024
"""The most events of one other worker that wait for the client to read them."""
TURN_BYTES: Final = 256 * 1024
"""The most events that a worker sends in one iteration of its event loop."""

_EVENT, _COMPLETE, _FAILED = range(3)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode


def worker_of(session_id: str, workers: int) -> int | None:
    """The worker that assigned an id; None if no worker did."""
    number, dot, _ = session_id.partition(".")
    known = dot and number.isascii() and number.isdigit() and len(number) <= 4 and int(number) < workers
    return int(number) if known else None


class MultiWorkerFollow:
    """The access of followers of many streams to their worker."""

    def __init__(self, context: Context, shard_map: ShardMap, relay: Relay, placements: Placements) -> None:
        self._context = context
        self._map = shard_map
        self._relay = relay
        self._placements = placements
        context.follow_sessions.id_prefix = f"{relay.peers.worker}."
        context.open_events = self._open

    def _open(self, wanted: FollowRequest, scope: Scope, on_ready: Callable[[], None]) -> FollowedEvents:
        return JoinedEvents(self._relay, self.here(wanted, scope, on_ready), wanted, scope, on_ready)

    def here(self, wanted: FollowRequest, scope: Scope, on_ready: Callable[[], None]) -> LocalEvents:
        """The events of this worker's streams."""
        return LocalEvents(self._context.engine, wanted, scope, on_ready, self._is_here)

    def serve(self, peer: Peer, number: int) -> TunnelServer:
        return SentEvents(self, peer, number, self._relay.loop.call_soon)

    def _is_here(self, name: str) -> bool:
        if name in self._context.engine.catalog.by_name:
            return True
        return self._map.owner_of(name) == self._relay.peers.worker and name not in self._placements.by_name


class SentEvents:
    """The events of this worker's streams, for a follower whose connection is at another worker."""

    def __init__(self, following: MultiWorkerFollow, peer: Peer, number: int, soon: Callable[..., Any]) -> None:
        self._following = following
        self._peer = peer
        self._number = number
        self._soon = soon
        self._events: FollowedEvents | None = None
        self._pauses = int(peer.is_congested)
        self._is_due = False
        self._has_said_complete = False

    def begin(self, origin: bytes, data: bytes) -> None:
        offsets, prefix, start, scope = _decode(data)
        self._events = self._following.here(FollowRequest(offsets, prefix, start), Scope(*scope), self._on_ready)
        self._events.start()

    def feed(self, data: bytes) -> None:
        raise AssertionError("the request is one frame")

    def pause(self) -> None:
        self._pauses += 1

    def resume(self) -> None:
        self._pauses = max(0, self._pauses - 1)
        self._on_ready()

    def cancel(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def _on_ready(self) -> None:
        if not self._is_due and not self._pauses:
            self._is_due = True
            self._soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        left, events = TURN_BYTES, self._events
        while events is not None and not self._pauses:
            if events.failure is not None:
                self._say((_FAILED, events.failure.detail))
                self._peer.send(frames.END, self._number)
                self._peer.forget_server(self._number)
                self.cancel()
                return
            if left < 0:
                self._on_ready()
                return
            event = events.next_event()
            if event is None:
                if events.is_complete and not self._has_said_complete:
                    self._has_said_complete = True
                    self._say((_COMPLETE,))
                return
            self._say((_EVENT, *event))
            left -= len(event.data)

    def _say(self, message: tuple[object, ...]) -> None:
        self._peer.send(frames.DATA, self._number, _encode(message))


class OthersEvents:
    """The events of one other worker, as they arrive."""

    def __init__(self, relay: Relay, worker: int, request: bytes, on_ready: Callable[[], None]) -> None:
        self._relay = relay
        self._worker = worker
        self._request = request
        self._on_ready = on_ready
        self._peer: Peer | None = None
        self._number = 0
        self._waiting: deque[EncodedEvent] = deque()
        self._waiting_bytes = 0
        self._is_paused = False
        self.failure: Refusal | None = None
        self.has_ended = False
        self.is_complete = False

    def start(self) -> None:
        peer = self._relay.peers.get(self._worker)
        if peer is None:
            self._relay.peers.wait(self._worker, self.start)
            return
        self._peer = peer
        self._number = peer.begin(self, frames.BEGIN_FOLLOW, NO_ORIGIN, self._request)

    def close(self) -> None:
        self._relay.peers.leave(self._worker, self.start)
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.cancel_tunnel(self._number)

    def next_event(self) -> EncodedEvent | None:
        if not self._waiting:
            return None
        event = self._waiting.popleft()
        self._waiting_bytes -= len(event.data)
        if self._is_paused and self._peer is not None and self._waiting_bytes <= AHEAD_BYTES // 2:
            self._is_paused = False
            self._peer.send(frames.RESUME, self._number)
        return event

    # -- as the client of a tunnel ---------------------------------------------------------------------------------

    def on_whole(self, data: bytes) -> None:
        self.on_data(data)
        self.on_end(close=False)

    def on_data(self, data: bytes) -> None:
        kind, *content = _decode(data)
        if kind == _COMPLETE:
            self.is_complete = True
        elif kind == _FAILED:
            self.failure = TooManyFollowed(content[0])
        else:
            event = EncodedEvent(*content)
            self._waiting.append(event)
            self._waiting_bytes += len(event.data)
            if not self._is_paused and self._peer is not None and self._waiting_bytes > AHEAD_BYTES:
                self._is_paused = True
                self._peer.send(frames.PAUSE, self._number)
        self._on_ready()

    def on_end(self, *, close: bool) -> None:
        self._peer = None

    def on_cut(self) -> None:
        self.on_peer_lost()

    def on_peer_lost(self) -> None:
        """End the response: the client reconnects, and the streams continue when the worker has been restarted."""
        self._peer = None
        self.has_ended = True
        self._on_ready()

    def on_hold(self, *, is_held: bool) -> None:
        """Do nothing: the request was already sent."""


class JoinedEvents:
    """The events of all workers, interleaved."""

    def __init__(
        self, relay: Relay, here: LocalEvents, wanted: FollowRequest, scope: Scope, on_ready: Callable[[], None]
    ) -> None:
        request = _encode((dict(wanted.offsets), wanted.prefix, wanted.start, tuple(scope)))
        others = [worker for worker in range(relay.peers.workers) if worker != relay.peers.worker]
        self._sources: deque[FollowedEvents] = deque((here,))
        self._sources.extend(OthersEvents(relay, worker, request, on_ready) for worker in others)

    @property
    def failure(self) -> Refusal | None:
        return next((source.failure for source in self._sources if source.failure is not None), None)

    @property
    def has_ended(self) -> bool:
        return any(source.has_ended for source in self._sources)

    @property
    def is_complete(self) -> bool:
        return all(source.is_complete for source in self._sources)

    def start(self) -> None:
        for source in tuple(self._sources):
            source.start()

    def close(self) -> None:
        for source in self._sources:
            source.close()

    def next_event(self) -> EncodedEvent | None:
        for _ in range(len(self._sources)):
            event = self._sources[0].next_event()
            self._sources.rotate(-1)
            if event is not None:
                return event
        return None
