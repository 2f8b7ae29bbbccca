"""The connections of a worker to the others, and the frames on them.

One connection carries everything between two workers: relayed requests, each in a tunnel, and questions with their
answers. Workers are connected by anonymous socket pairs that the supervisor creates, so no other process can send
anything on them. A worker that died is reconnected when it has been restarted; until then, requests for it wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from headwater.cluster import frames
from headwater.cluster.frames import HEADER
from headwater.core.errors import Refusal, WorkerUnavailable

log = logging.getLogger("headwater.cluster")

WRITE_BUFFER_BYTES: Final = 1024 * 1024
"""Unsent frames beyond which the responses that a worker relays are paused."""

RETRY: Final = (("Retry-After", "1"),)
"""Header of the responses to requests that failed because of another worker."""

NO_ORIGIN: Final = b"\0"
"""The origin of a request without a client, or whose client is not relevant."""

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder().decode
_pack: Final = HEADER.pack
_unpack: Final = HEADER.unpack_from
_HEADER_BYTES: Final = HEADER.size

Answerer: TypeAlias = Callable[[int, Any], Awaitable[Any]]
"""Takes the worker that asks and the arguments; returns the answer as plain values."""


class PeerLostError(Exception):
    """The other worker ended before it answered."""


class TunnelClient(Protocol):
    """Receives the response to a relayed request."""

    def on_whole(self, data: bytes) -> None:
        """The whole response; there is no `on_end` after it."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self, *, close: bool) -> None: ...

    def on_cut(self) -> None:
        """The response cannot be completed."""

    def on_peer_lost(self) -> None:
        """The owner died. Whether it processed the request is unknown."""

    def on_hold(self, *, is_held: bool) -> None:
        """The owner pauses or resumes the request body."""


class TunnelServer(Protocol):
    """Processes one relayed request."""

    def begin(self, origin: bytes, data: bytes) -> None:
        """The request, or its first bytes. `origin` is the client's address, after a byte with its length."""

    def feed(self, data: bytes) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def cancel(self) -> None: ...


OpenTunnel: TypeAlias = Callable[["Peer", int, int, bytes], TunnelServer | None]
"""Takes the number, the kind and the bytes of the frame that begins a request; returns the server for it, or None if no
further frame of the request is needed."""


class Peer(asyncio.Protocol):
    """The connection to one other worker."""

    def __init__(self, worker: int, peers: Peers) -> None:
        self.worker: Final = worker
        self._peers = peers
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._flushes_at_end = False
        """Frames are being received, and the responses to them are sent after the last one."""
        self._rest = b""
        self._last_number = 0
        self._clients: dict[int, TunnelClient] = {}
        self._servers: dict[int, TunnelServer] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self.is_congested = False
        self.is_lost = False

    # -- asyncio ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._peers.on_lost(self)
        for server in tuple(self._servers.values()):
            server.cancel()
        self._servers.clear()
        clients, self._clients = self._clients, {}
        for client in clients.values():
            client.on_peer_lost()
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(PeerLostError(f"worker {self.worker} ended"))
        for task in self._answering:
            task.cancel()

    def pause_writing(self) -> None:
        self.is_congested = True
        for server in tuple(self._servers.values()):
            server.pause()

    def resume_writing(self) -> None:
        self.is_congested = False
        for server in tuple(self._servers.values()):
            server.resume()

    def data_received(self, data: bytes) -> None:
        if self.is_lost:
            return
        if self._peers.check is not None:
            self._peers.check()
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        self._flushes_at_end = not self._unsent
        while size - at >= _HEADER_BYTES and not self.is_lost:
            length, kind, number = _unpack(data, at)
            begin = at + _HEADER_BYTES
            at = begin + length
            if at > size:
                at = begin - _HEADER_BYTES
                break
            try:
                if kind == frames.WHOLE:
                    client = self._clients.pop(number, None)
                    if client is not None:
                        client.on_whole(data[begin:at])
                elif kind in frames.BEGINS:
                    origin = begin + 1 + data[begin]
                    request = data[origin:at]
                    server = self._peers.open_server(self, number, kind, request)
                    if server is not None:
                        self._servers[number] = server
                        server.begin(data[begin:origin], request)
                else:
                    self._on_frame(kind, number, data[begin:at])
            except Exception:
                log.exception("a frame of kind %d from worker %d failed unexpectedly", kind, self.worker)
        self._rest = data[at:]
        if self._flushes_at_end:
            self._flushes_at_end = False
            self._flush()

    # -- tunnels of this side --------------------------------------------------------------------------------------

    def begin(self, client: TunnelClient, kind: int, origin: bytes, data: bytes) -> int:
        """Send a request, or its first bytes, whose response `client` receives; returns its number. `origin` is the
        client's address, after a byte with its length."""
        self._last_number = number = self._last_number + 1
        self._clients[number] = client
        # `send` inlined: every relayed request passes here.
        if not self.is_lost:
            if not self._unsent and not self._flushes_at_end:
                self._loop.call_soon(self._flush)
            self._unsent += (_pack(len(origin) + len(data), kind, number), origin, data)
        return number

    def cancel_tunnel(self, number: int) -> None:
        """Cancel the request of a client that disconnected."""
        if self._clients.pop(number, None) is not None:
            self.send(frames.CANCEL, number)

    # -- frames ----------------------------------------------------------------------------------------------------

    def send(self, kind: int, number: int, payload: bytes = b"") -> None:
        """Send a frame together with all others of this event loop iteration: each write wakes the other worker."""
        if self.is_lost:
            return
        if not self._unsent and not self._flushes_at_end:
            self._loop.call_soon(self._flush)
        self._unsent += (_pack(len(payload), kind, number), payload)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and not self.is_lost:
            self._transport.write(b"".join(unsent))

    def forget_server(self, number: int) -> None:
        self._servers.pop(number, None)

    def close(self) -> None:
        """Process and send nothing more. `connection_lost` reports the end of what was in progress."""
        self.is_lost = True
        self._transport.abort()

    async def ask(self, question: str, arguments: object = None) -> Any:
        """The other worker's answer. Raises `PeerLostError` if it ends before, and a refusal if it has no answer."""
        if self.is_lost:
            raise PeerLostError(f"worker {self.worker} ended")
        self._last_number += 1
        number = self._last_number
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self.send(frames.ASK, number, _encode((question, arguments)))
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def feed(self, events: object) -> None:
        """Send events that need no answer."""
        self.send(frames.FEED, 0, _encode(events))

    def report(self, usage: object) -> None:
        """Send the usage of this worker, immediately: before the response to the request that changed it."""
        self.send(frames.USAGE, 0, _encode(usage))
        self._flush()

    def leave_tail(self, stream_id: int) -> None:
        """Stop following a stream of the other worker."""
        self.send(frames.LEAVE, 0, stream_id.to_bytes(8, "big"))

    def _on_frame(self, kind: int, number: int, payload: bytes) -> None:
        if kind == frames.DATA:
            client = self._clients.get(number)
            if client is not None:
                client.on_data(payload)
        elif kind in (frames.END, frames.LAST):
            client = self._clients.pop(number, None)
            if client is not None:
                client.on_end(close=kind == frames.LAST)
        elif kind == frames.TAIL:
            self._peers.on_tail(self.worker, payload)
        elif kind == frames.FEED:
            self._peers.on_feed(self.worker, _decode(payload))
        elif kind == frames.ASK:
            task = asyncio.get_running_loop().create_task(self._answer(number, payload))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif kind == frames.ANSWER:
            future = self._asked.get(number)
            if future is not None and not future.done():
                problem, answer = _decode(payload)
                if problem:
                    detail = f"Worker {self.worker} could not answer ({problem}). Try again."
                    future.set_exception(WorkerUnavailable(detail, RETRY))
                else:
                    future.set_result(answer)
        else:
            self._on_rare_frame(kind, number, payload)

    def _on_rare_frame(self, kind: int, number: int, payload: bytes) -> None:
        if kind == frames.LEAVE:
            self._peers.on_leave(self.worker, int.from_bytes(payload, "big"))
            return
        if kind == frames.USAGE:
            self._peers.on_usage(self.worker, _decode(payload))
            return
        if kind in (frames.CUT, frames.HOLD, frames.TAKE):
            client = self._clients.get(number)
            if client is None:
                return
            if kind == frames.CUT:
                del self._clients[number]
                client.on_cut()
            else:
                client.on_hold(is_held=kind == frames.HOLD)
            return
        server = self._servers.get(number)
        if server is None:
            return  # The response was already complete when the frame was sent.
        if kind == frames.MORE:
            server.feed(payload)
        elif kind == frames.PAUSE:
            server.pause()
        elif kind == frames.RESUME:
            server.resume()
        elif kind == frames.CANCEL:
            del self._servers[number]
            server.cancel()
        else:
            raise AssertionError(f"unknown frame kind {kind}")

    async def _answer(self, number: int, payload: bytes) -> None:
        question, arguments = _decode(payload)
        problem, answer = "", None
        try:
            answer = await self._peers.answer(self.worker, question, arguments)
        except Refusal as refusal:
            problem = refusal.detail
        except Exception:
            log.exception("the question %r of worker %d failed unexpectedly", question, self.worker)
            problem = "An unexpected error occurred; its log has the details."
        self.send(frames.ANSWER, number, _encode((problem, answer)))


class Peers:
    """All other workers: the connected ones, and callbacks that wait for the others to connect."""

    def __init__(self, worker: int, workers: int) -> None:
        self.worker: Final = worker
        self.workers: Final = workers
        self._connected: dict[int, Peer] = {}
        self._waiting: dict[int, dict[Callable[[], None], None]] = {number: {} for number in range(workers)}
        self._answerers: dict[str, Answerer] = {}
        self.check: Callable[[], None] | None = None
        """Called before a request, or anything of another worker, is processed. Ends the process if it may not be."""
        self.open_server: OpenTunnel = _no_server
        self.on_feed: Callable[[int, Any], None] = _no_feed
        self.on_tail: Callable[[int, bytes], None] = _no_feed
        self.on_leave: Callable[[int, int], None] = _no_feed
        self.on_usage: Callable[[int, Any], None] = _no_feed
        self.on_connected: list[Callable[[Peer], None]] = []
        self.on_disconnected: list[Callable[[int], None]] = []

    def get(self, worker: int) -> Peer | None:
        return self._connected.get(worker)

    def all(self) -> tuple[Peer, ...]:
        return tuple(self._connected.values())

    @property
    def is_complete(self) -> bool:
        """Whether every other worker is connected."""
        return len(self._connected) == self.workers - 1

    def answers(self, question: str, answerer: Answerer) -> None:
        """Answer this question of other workers from now on."""
        self._answerers[question] = answerer

    async def answer(self, worker: int, question: str, arguments: Any) -> Any:
        return await self._answerers[question](worker, arguments)

    async def ask(self, worker: int, question: str, arguments: object = None) -> Any:
        """Ask a worker, or this one itself. Raises `PeerLostError` if it is not connected."""
        if worker == self.worker:
            return await self._answerers[question](worker, arguments)
        peer = self._connected.get(worker)
        if peer is None:
            raise PeerLostError(f"worker {worker} is not connected")
        return await peer.ask(question, arguments)

    def wait(self, worker: int, then: Callable[[], None]) -> None:
        """Call `then` once the worker is connected."""
        self._waiting[worker][then] = None

    def leave(self, worker: int, then: Callable[[], None]) -> None:
        self._waiting[worker].pop(then, None)

    def connect(self, worker: int) -> Peer:
        """The protocol of a new connection to a worker. The rest of an earlier connection is dropped first: frames from
        before the worker died must not be processed after new ones."""
        self._drop(worker)
        return Peer(worker, self)

    def connected(self, peer: Peer) -> None:
        if peer.is_lost:
            return  # The other side ended meanwhile; requests wait for the next connection.
        self._drop(peer.worker)
        self._connected[peer.worker] = peer
        for on_connected in self.on_connected:
            on_connected(peer)
        waiting, self._waiting[peer.worker] = self._waiting[peer.worker], {}
        for then in waiting:
            then()

    def _drop(self, worker: int) -> None:
        """Drop a connection that is being replaced. Its end is reported now: the other side may be another process."""
        old = self._connected.pop(worker, None)
        if old is not None:
            old.close()
            for on_disconnected in self.on_disconnected:
                on_disconnected(worker)

    def on_lost(self, peer: Peer) -> None:
        if self._connected.get(peer.worker) is peer:
            del self._connected[peer.worker]
            for on_disconnected in self.on_disconnected:
                on_disconnected(peer.worker)


def _no_server(_peer: Peer, _number: int, _begin: int, _data: bytes) -> TunnelServer | None:
    raise AssertionError("this worker does not serve yet")


def _no_feed(_worker: int, _events: Any) -> None:
    """Ignore the reports of other workers."""
