"""Process the requests that other workers relay: a connection whose transport is a tunnel.

Requests of a tunnel take the same path as those of a socket: parser, limits, routes, metrics. Only the transport
differs, and that the worker with the client's socket counts the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from headwater.cluster import frames
from headwater.cluster.following import Following
from headwater.cluster.peers import Peer, TunnelServer
from headwater.cluster.relay import Relay, RelayingConnection
from headwater.http.context import Context
from headwater.http.responses import Response
from headwater.http.routing import Router
from headwater.http.states import IDLE


class RelayedConnection(RelayingConnection):
    """The connection of one tunnel. It has one request at a time."""

    __slots__ = ("_tunnel",)

    def __init__(self, context: Context, router: Router, relay: Relay, tunnel: Tunnel) -> None:
        super().__init__(context, router, relay)
        self._tunnel = tunnel
        # Not a subclass of asyncio's transports, which have slots and methods that a tunnel does not need.
        self._transport = cast("asyncio.Transport", tunnel)
        self._flow.attach(self._transport)

    @property
    def is_busy(self) -> bool:
        """Whether a request is being read or processed."""
        return self._writing is not IDLE or self._parser.state is not IDLE

    def _write_whole(self, response: Response) -> None:
        self._tunnel.is_whole = True
        super()._write_whole(response)

    def _finish(self) -> None:
        super()._finish()
        self._tunnel.finish()

    def _linger(self) -> None:
        self.close()


class Tunnel:
    """The transport of a relayed connection, and the receiver of its frames."""

    __slots__ = ("_closing", "_connection", "_context", "_held", "_number", "_on_closed", "_pauses", "_peer",
                 "_peer_name", "is_whole")  # fmt: skip

    def __init__(
        self,
        context: Context,
        router: Router,
        relay: Relay,
        peer: Peer,
        number: int,
        on_closed: Callable[[Tunnel], None],
    ) -> None:
        self._context = context
        self._on_closed = on_closed
        self._peer = peer
        self._number = number
        self._peer_name = b""
        self._held: bytes | None = None
        self.is_whole = False
        """Whether the next write is a whole response, which is sent together with its end."""
        self._closing = False
        self._pauses = 0
        self._connection = RelayedConnection(context, router, relay, self)

    # -- frames ----------------------------------------------------------------------------------------------------

    def begin(self, peer_name: bytes, data: bytes) -> None:
        self._peer_name = peer_name
        if self._peer.is_congested and not self._pauses:
            self.pause()
        self._connection.data_received(data)

    def feed(self, data: bytes) -> None:
        if not self._closing:
            self._connection.data_received(data)

    def pause(self) -> None:
        """Pause writing: the client does not read, or too many frames wait for its worker."""
        self._pauses += 1
        if self._pauses == 1:
            self._connection.pause_writing()

    def resume(self) -> None:
        if self._pauses:
            self._pauses -= 1
            if not self._pauses and not self._closing:
                self._connection.resume_writing()

    def cancel(self) -> None:
        if not self._closing:
            self._closing = True
            self._on_closed(self)
            self._connection.connection_lost(None)

    @property
    def is_busy(self) -> bool:
        return self._connection.is_busy

    def drain(self) -> None:
        self._connection.drain()

    # -- the transport ---------------------------------------------------------------------------------------------

    def write(self, data: bytes | memoryview) -> None:
        if self._closing:
            return
        if self.is_whole and len(data) <= frames.PAYLOAD_MAX_BYTES:
            self._held = bytes(data)
            return
        self.is_whole = False
        for piece in frames.pieces(bytes(data)):
            self._peer.send(frames.DATA, self._number, piece)

    def finish(self) -> None:
        """The response is complete."""
        if not self._closing:
            held, self._held, self.is_whole = self._held, None, False
            if held is not None:
                self._peer.send(frames.WHOLE, self._number, held)
            else:
                self._peer.send(frames.END, self._number)

    def close(self) -> None:
        self._end(frames.LAST)

    def abort(self) -> None:
        self._end(frames.CUT)

    def _end(self, kind: int) -> None:
        if self._closing:
            return
        if self._held is not None:
            self._peer.send(frames.DATA, self._number, self._held)
            self._held = None
        self._closing = True
        self._peer.send(kind, self._number)
        self._peer.forget_server(self._number)
        self._on_closed(self)
        self._context.loop.call_soon(self._connection.connection_lost, None)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._peer.send(frames.HOLD, self._number)

    def resume_reading(self) -> None:
        self._peer.send(frames.TAKE, self._number)

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "peername" and self._peer_name:
            host, _, port = self._peer_name.decode("latin-1").rpartition(":")
            return host, port
        return default


class RelayServer:
    """Opens the tunnels that other workers ask for."""

    def __init__(
        self, context: Context, router: Router, placed_router: Router, relay: Relay, following: Following
    ) -> None:
        self._context = context
        self._relay = relay
        self._following = following
        self._router = router
        self._placed_router = placed_router
        self._tunnels: set[Tunnel] = set()

    def open(self, peer: Peer, number: int, begin: int) -> TunnelServer:
        if begin == frames.BEGIN_FOLLOW:
            return self._following.serve(peer, number)
        router = self._placed_router if begin == frames.BEGIN_PLACED else self._router
        tunnel = Tunnel(self._context, router, self._relay, peer, number, self._tunnels.discard)
        self._tunnels.add(tunnel)
        return tunnel

    @property
    def is_busy(self) -> bool:
        return any(tunnel.is_busy for tunnel in self._tunnels)

    def drain(self) -> None:
        """End live responses; other requests in progress are completed.

        Idle tunnels stay open, because the next request may already be on its way: closed now, that request would get
        the end of the tunnel as its response, although it is processed.
        """
        for tunnel in tuple(self._tunnels):
            if tunnel.is_busy:
                tunnel.drain()
