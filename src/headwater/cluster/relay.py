"""Relay a request to the worker that owns its stream, and the response back to the client.

A relayed request is a live response of its connection: the owner's bytes are written to the client unchanged, in the
connection's order. Only requests that were certainly not processed are retried, and once those reads whose owner died
before it responded. For any other request the connection is closed, as if the only server process had died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from headwater.cluster import frames
from headwater.cluster.peers import NO_ORIGIN, RETRY, Peer, PeerLostError, Peers, TunnelClient
from headwater.cluster.uploads import RelayedUpload
from headwater.core.errors import Refusal, WorkerUnavailable
from headwater.engine.uploads import BlobUpload
from headwater.http.connection import Connection
from headwater.http.context import Context
from headwater.http.deadlines import Deadline, Deadlines
from headwater.http.flow import TURN_BYTES
from headwater.http.head_cache import KnownHead
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Channel
from headwater.http.routing import Handler, Router
from headwater.http.states import RELAYED, TAKE_REFUSED, WRITING

MOVE_AFTER: Final = 16
"""Number of requests in a row for streams of one other worker after which a connection moves again."""
RETRIES: Final = 1
"""How often a read, or a question, is sent again because the worker that processed it died: it may be the cause."""
MOVED_MAX_BYTES: Final = 32 * 1024
"""The largest request that a connection can be handed over with."""
_NOT_RELAYED: Final = frozenset((b"expect", b"transfer-encoding", b"content-length"))
"""Headers to drop: the body is complete, so its length is known and `Expect` is already satisfied."""
_SAFE: Final = frozenset((b"GET", b"HEAD", b"OPTIONS"))


class RelayingConnection(Connection):
    """A connection whose requests other workers may process; such a response ends when that worker reports its end."""

    __slots__ = ("_refused", "_relay", "_streak", "_streak_owner", "has_moved", "is_movable", "origin")

    def __init__(self, context: Context, router: Router, relay: Relay) -> None:
        super().__init__(context, router)
        self._relay = relay
        self.origin = b""
        """The client's address, after a byte with its length; empty until it is needed."""
        self.is_movable = False
        """Whether the socket can be handed over: it is a client's and has no TLS state in this process."""
        self.has_moved = False
        self._streak = 0
        self._streak_owner = -1
        self._refused = b""
        """The response to an upload that its owner refused before the body was complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.is_movable = transport.get_extra_info("sslcontext") is None

    def should_stay(self, owner: int) -> bool:
        """Count a request for a stream of another worker; return whether the connection stays here.

        It moves to the owner at its first request, and after it has used streams of that worker for a while.
        """
        if owner != self._streak_owner:
            self._streak_owner, self._streak = owner, 0
        self._streak += 1
        return self.has_moved and self._streak < MOVE_AFTER

    def can_move(self) -> bool:
        """Whether the connection can be handed over with the current request."""
        return (
            self.is_movable
            and self._input.is_empty
            and not self._input.reasons
            and not self._is_last
            and not self._context.draining
            and not self._transport.get_write_buffer_size()
        )

    def move(self, send: Callable[[int], bool]) -> bool:
        """Pass the socket to `send`; False if that fails, in which case the connection stays here for a while."""
        self.has_moved = True
        self._streak = 0
        context, namespace = self._context, self._namespace
        # The other worker counts it from now on, and must not find it counted here as well.
        context.connections.discard(self)
        self._leave_namespace()
        if not send(self._transport.get_extra_info("socket").fileno()):
            context.connections.add(self)
            if namespace is not None and context.limited_namespaces is not None:
                self._namespace = context.limited_namespaces.resume_request(namespace)
            return False
        # The socket stays open in the other worker.
        self._live = None
        self._transport.abort()
        return True

    def write_relayed(self, data: bytes) -> None:
        """Send the whole response of the owner."""
        if self._live is not None:
            self._live = None
            if self._namespace is not None:
                self._leave_namespace()
            self._transport.write(data)
            self._turn_bytes += len(data)
            if self._turn_bytes >= TURN_BYTES:
                self._schedule_turn()
            self._finish()

    def end_relayed(self, *, close: bool) -> None:
        """End a response that its owner reports as complete."""
        if self._live is not None:
            self._live = None
            self._is_last = self._is_last or close
            self._finish()

    def begin_upload(self, head: Request) -> BlobUpload | None:
        upload = super().begin_upload(head)
        if isinstance(upload, RelayedUpload):
            upload.on_response = partial(self._end_upload, upload)
        return upload

    def on_expect_continue(self) -> None:
        upload = self._input.parser.upload
        if isinstance(upload, RelayedUpload):
            upload.on_continue = super().on_expect_continue  # Its owner may refuse it instead.
        else:
            super().on_expect_continue()

    def _end_upload(self, upload: RelayedUpload, response: bytes) -> None:
        """If the owner of an upload has refused it before its body is complete, do not read the rest."""
        parser = self._input.parser
        if parser.upload is upload:
            self._refused = response
            parser.refuse(unavailable(upload.worker, 0))  # Reads no more; the response is that of the owner.
            self._serve()

    def _answer_refused(self, refusal: Refusal) -> None:
        if not self._refused:
            super()._answer_refused(refusal)
            return
        self._writing = WRITING[self._writing][TAKE_REFUSED]
        self._request = self._input.parser.refused_request()
        self._transport.write(self._refused)
        self._finish()

    def find_origin(self) -> bytes:
        """Find out the client's address, once, because that is a system call."""
        peer = self._transport.get_extra_info("peername")
        address = f"{peer[0]}:{peer[1]}".encode() if isinstance(peer, tuple) else b""
        self.origin = b"%c%b" % (len(address), address)
        return self.origin

    def _answer(self, request: Request, began_s: float, known: KnownHead | None = None) -> None:
        check = self._relay.peers.check
        if check is not None:
            check()
        super()._answer(request, began_s, known)
        live = self._live
        if type(live) is not RelayedAnswer:
            self._streak = 0
        elif known is not None and live.may_move and self._context.limited_namespaces is None:
            # A repetition skips the routing, and with it the count of connections.
            known.operation, known.owner = self._operation, live.worker

    def _answer_known(self, known: KnownHead, body: bytes, began_s: float) -> None:
        """Process a request with a known head. If that head was relayed before, skip the routing."""
        check = self._relay.peers.check
        if check is not None:
            check()
        owner = known.owner
        if owner < 0 or self._is_proxied or self._context.request_log.is_debug:
            if known.repeat is not None:
                self._streak = 0
            super()._answer_known(known, body, began_s)
            return
        self._request = request = known.request
        self._operation = known.operation
        self._writing = RELAYED
        answer = RelayedAnswer(self._relay, owner, known.head + body, request.method in _SAFE, frames.BEGIN)
        answer.may_move = True
        self._live = answer
        answer.start(self)


class Relay:
    """The state that all relayed requests of a worker share."""

    def __init__(self, peers: Peers, loop: asyncio.AbstractEventLoop, wait_s: float) -> None:
        self.peers: Final = peers
        self.loop: Final = loop
        self.wait_s: Final = wait_s
        """How long a request waits for a worker that is being restarted."""
        self.deadlines: Final = Deadlines(loop, wait_s)
        self.standbys: Peers | None = None
        """The standbys on this node that serve reads, by shard."""
        self.hand_over: Callable[[int, int, bytes], bool] | None = None
        """Passes a connection (a descriptor) with a request to a worker."""

    async def peer(self, worker: int, until_s: float | None = None) -> Peer:
        """The connection to a worker; waits until it is connected. Raises a refusal if that takes too long."""
        found = self.peers.get(worker)
        if found is not None:
            return found
        if until_s is None:
            until_s = self.loop.time() + self.wait_s
        connected: asyncio.Future[None] = self.loop.create_future()

        def then() -> None:
            if not connected.done():
                connected.set_result(None)

        self.peers.wait(worker, then)
        try:
            await asyncio.wait_for(connected, max(0.0, until_s - self.loop.time()))
        except TimeoutError:
            raise unavailable(worker, self.wait_s) from None
        finally:
            self.peers.leave(worker, then)
        return await self.peer(worker, until_s)

    async def ask(self, worker: int, question: str, arguments: object = None) -> Any:
        """Ask a worker (or this one), waiting if it is being restarted. Only for questions that may be repeated."""
        if worker == self.peers.worker:
            return await self.peers.ask(worker, question, arguments)
        until_s = self.loop.time() + self.wait_s
        for _ in range(1 + RETRIES):
            peer = await self.peer(worker, until_s)
            with suppress(PeerLostError):
                return await peer.ask(question, arguments)
        raise unavailable(worker, 0)

    def to(self, worker: int, begin: int = frames.BEGIN) -> Handler:
        """The handler of requests that another worker processes."""

        def handle(_context: Context, request: Request, _address: Address) -> RelayedAnswer:
            data = request_bytes(request)
            answer = RelayedAnswer(self, worker, data, request.method in _SAFE, begin)
            # Connections of live readers do not move, because every worker can serve them.
            answer.may_move = begin == frames.BEGIN and len(data) <= MOVED_MAX_BYTES and b"live=" not in request.target
            return answer

        return handle


class Exchange:
    """A request to another worker whose whole response is collected, even if no client waits for it."""

    __slots__ = ("_data", "_number", "_peer", "response")

    def __init__(self, peer: Peer, data: bytes, begin: int, origin: bytes = NO_ORIGIN) -> None:
        self.response: asyncio.Future[tuple[bytes, bool]] = asyncio.get_running_loop().create_future()
        """The response, and whether the client's connection must be closed. Fails with `PeerLostError`."""
        self._peer = peer
        self._data: list[bytes] = []
        self._number = begin_request(peer, self, begin, origin, data)

    def on_whole(self, data: bytes) -> None:
        self.on_data(data)
        self.on_end(close=False)

    def on_data(self, data: bytes) -> None:
        self._data.append(data)

    def on_end(self, *, close: bool) -> None:
        if not self.response.done():
            self.response.set_result((b"".join(self._data), close))

    def on_cut(self) -> None:
        self.on_peer_lost()

    def on_peer_lost(self) -> None:
        if not self.response.done():
            self.response.set_exception(PeerLostError(f"worker {self._peer.worker} ended"))

    def on_hold(self, *, is_held: bool) -> None:
        """Do nothing: the body was already sent."""


def begin_request(peer: Peer, client: TunnelClient, begin: int, origin: bytes, data: bytes) -> int:
    """Send the bytes of a request into a new tunnel; returns its number."""
    if len(data) <= frames.PAYLOAD_MAX_BYTES:
        return peer.begin(client, begin, origin, data)
    first, *others = frames.pieces(data)
    number = peer.begin(client, begin, origin, first)
    for piece in others:
        peer.send(frames.MORE, number, piece)
    return number


class RelayedAnswer:
    """One request that another worker processes."""

    __slots__ = ("_begin", "_channel", "_data", "_deadline", "_has_begun", "_is_safe", "_left_s", "_number", "_paused",
                 "_peer", "_relay", "_retries", "may_move", "worker")  # fmt: skip

    def __init__(self, relay: Relay, worker: int, data: bytes, is_safe: bool, begin: int) -> None:
        self._relay = relay
        self.worker = worker
        self._data = data
        self._is_safe = is_safe
        self._begin = begin
        self._channel: RelayingConnection | None = None
        self._peer: Peer | None = None
        self._number = 0
        self._has_begun = False
        self._paused = False
        self._deadline: Deadline | None = None
        self._left_s: float | None = None
        """How long it may still wait for the owner, once it has waited."""
        self._retries = 0
        self.may_move = False
        """Whether the connection may be handed over to the worker instead."""

    # -- as a live response ----------------------------------------------------------------------------------------

    def start(self, channel: Channel) -> None:
        assert isinstance(channel, RelayingConnection), "requests are relayed for clients of this worker"
        if self.may_move and not channel.should_stay(self.worker) and channel.can_move():
            hand_over = self._relay.hand_over
            if hand_over is not None and channel.move(partial(self._move, hand_over)):
                return
        self._channel = channel
        self._send()

    def _move(self, hand_over: Callable[[int, int, bytes], bool], descriptor: int) -> bool:
        return hand_over(self.worker, descriptor, self._data)

    def on_writable(self) -> None:
        if self._paused and self._peer is not None:
            self._paused = False
            self._peer.send(frames.RESUME, self._number)

    def on_drain(self) -> None:
        """Do nothing: the owner is stopping as well, and ends the response."""
        if self._peer is None:
            self._give_up()

    def on_disconnect(self) -> None:
        self._stop_waiting()
        self._channel = None
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.cancel_tunnel(self._number)

    # -- as the client of a tunnel ---------------------------------------------------------------------------------

    def on_whole(self, data: bytes) -> None:
        self._peer = None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.write_relayed(data)

    def on_data(self, data: bytes) -> None:
        channel = self._channel
        if channel is None:
            return
        self._has_begun = True
        channel.write_chunk(data)
        if not self._paused and not channel.writable and self._peer is not None:
            self._paused = True
            self._peer.send(frames.PAUSE, self._number)

    def on_end(self, *, close: bool) -> None:
        self._peer = None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.end_relayed(close=close)

    def on_cut(self) -> None:
        self._peer = None
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.abort()

    def on_peer_lost(self) -> None:
        self._peer = None
        if self._is_safe and not self._has_begun and self._channel is not None:
            self._paused = False
            self._retries += 1
            if self._retries <= RETRIES:
                self._send()
            else:
                channel, self._channel = self._channel, None
                channel.refuse(unavailable(self.worker, 0))
        else:
            self.on_cut()

    def on_hold(self, *, is_held: bool) -> None:
        """Do nothing: the body was already sent."""

    # -- implementation --------------------------------------------------------------------------------------------

    def _send(self) -> None:
        relay, channel = self._relay, self._channel
        assert channel is not None, "the client waits for the response"
        peer = relay.peers.get(self.worker)
        if peer is None:
            relay.peers.wait(self.worker, self._retry)
            if self._deadline is None:
                self._deadline = self._wait()
            return
        self._peer = peer
        self._number = begin_request(peer, self, self._begin, channel.origin or channel.find_origin(), self._data)

    def _wait(self) -> Deadline:
        relay = self._relay
        if self._left_s is None:
            return relay.deadlines.set(self._give_up)
        deadline = Deadline(relay.loop.time() + self._left_s, self._give_up)
        relay.loop.call_at(deadline.at_s, lambda: deadline.action is not None and deadline.action())
        return deadline

    def _retry(self) -> None:
        if self._deadline is not None:
            self._left_s = max(0.0, self._deadline.at_s - self._relay.loop.time())
        self._stop_waiting()
        if self._channel is not None:
            self._send()

    def _stop_waiting(self) -> None:
        self._relay.peers.leave(self.worker, self._retry)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._stop_waiting()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.refuse(unavailable(self.worker, self._relay.wait_s))


def unavailable(worker: int, wait_s: float) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"Worker {worker}, which owns this stream, "
        + (f"was not restarted within {wait_s:g} seconds. Try again." if wait_s else "is being restarted. Try again."),
        RETRY,
    )


def request_bytes(request: Request) -> bytes:
    """A request as bytes, including its body."""
    fields = b"".join([b"%b: %b\r\n" % field for field in request.headers.items() if field[0] not in _NOT_RELAYED])
    body = request.body
    if body or request.method in (b"POST", b"PUT"):
        fields += b"content-length: %d\r\n" % len(body)
    version = b"1.0" if request.http_1_0 else b"1.1"
    return b"%b %b HTTP/%b\r\n%b\r\n%b" % (request.method, request.target, version, fields, body)
