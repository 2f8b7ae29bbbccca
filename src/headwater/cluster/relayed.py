"""Process the requests that other workers relay: a connection whose transport is a tunnel.

Requests of a tunnel take the same path as those of a socket: parser, limits, routes, metrics. Only the transport
differs, and that the worker with the client's socket counts the connection. A tunnel has one request at a time; when
its response is complete, the tunnel is kept for another request of any worker, which has another number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Final, cast

from headwater.cluster import frames
from headwater.cluster.multi_worker_follow import MultiWorkerFollow
from headwater.cluster.peers import Peer, TunnelServer
from headwater.cluster.relay import Relay, RelayingConnection
from headwater.core.errors import Refusal
from headwater.http.context import Context
from headwater.http.head_cache import KnownHead
from headwater.http.headers import NO_CONTENT
from headwater.http.responses import Repeat, Response, problem
from headwater.http.routing import Router
from headwater.http.states import IDLE

log = logging.getLogger("headwater.cluster")

IDLE_TUNNELS_MAX: Final = 1024
"""Tunnels that are kept for further requests; creating one takes longer than a small request."""


class RelayedConnection(RelayingConnection):
    """The connection of one tunnel. It has one request at a time."""

    __slots__ = ("_tunnel",)

    _counts_namespace: ClassVar = False

    def __init__(self, context: Context, router: Router, relay: Relay, tunnel: Tunnel) -> None:
        super().__init__(context, router, relay)
        self._tunnel = tunnel
        # Not a subclass of asyncio's transports, which have slots and methods that a tunnel does not need.
        self._transport = cast("asyncio.Transport", tunnel)
        self._input.attach(self._transport)

    def begin(self, origin: bytes, data: bytes) -> None:
        """Process the request of this client."""
        self.origin = origin
        if self._context.draining:
            self._is_last = True
        if self._context.proxies:
            self._is_proxied = self._context.proxies.trusts(origin[1:].decode("latin-1").rpartition(":")[0])
        self.data_received(data)

    def reset(self) -> bool:
        """Forget the request that was answered; False if another one cannot begin."""
        self._request = None  # type: ignore[assignment]
        return self._writing is IDLE and self._input.is_empty and not self._input.reasons

    def _is_next(self) -> bool:
        return not self._tunnel.is_ahead and super()._is_next()

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

    connection_type: ClassVar[type[RelayedConnection]] = RelayedConnection

    __slots__ = ("_client", "_closing", "_connection", "_context", "_held", "_number", "_on_free", "_pauses",
                 "_peer", "is_ahead", "is_whole")  # fmt: skip

    def __init__(self, context: Context, router: Router, relay: Relay, on_free: Callable[[Tunnel, bool], None]) -> None:
        self._context = context
        self._on_free = on_free
        """Called at the end of each request, with whether the tunnel can have another one."""
        self._peer: Peer = None  # type: ignore[assignment]
        self._number = 0
        self._client = b""
        self._held: bytes | None = None
        self.is_whole = False
        """Whether the next write is a whole response, which is sent together with its end."""
        self.is_ahead = False
        """Whether earlier requests of the client's connection may have no response yet."""
        self._closing = False
        self._pauses = 0
        self._connection = self.connection_type(context, router, relay, self)

    def use(self, peer: Peer, number: int, *, is_ahead: bool = False) -> Tunnel:
        """Serve a new request from now on."""
        self._peer, self._number, self.is_ahead = peer, number, is_ahead
        return self

    # -- frames ----------------------------------------------------------------------------------------------------

    def begin(self, origin: bytes, data: bytes) -> None:
        self._client = origin[1:]
        if self._peer.is_congested:
            self.pause()
        self._connection.begin(origin, data)

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
            self._on_free(self, False)
            self._connection.connection_lost(None)

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
        if self._closing:
            return
        held, self._held, self.is_whole = self._held, None, False
        if held is not None:
            self._peer.send(frames.WHOLE, self._number, held)
        else:
            self._peer.send(frames.END, self._number)
        self._peer.forget_server(self._number)
        if self._pauses:
            self._pauses = 0
            self._connection.resume_writing()
        is_idle = self._connection.reset()
        self._on_free(self, is_idle)
        if not is_idle:
            self._closing = True
            self._context.loop.call_soon(self._connection.connection_lost, None)

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
        self._on_free(self, False)
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
        if name == "peername" and self._client:
            host, _, port = self._client.decode("latin-1").rpartition(":")
            return host, port
        return default


class RelayServer:
    """Opens a tunnel for each request that another worker relays."""

    def __init__(
        self, context: Context, router: Router, placed_router: Router, relay: Relay, following: MultiWorkerFollow
    ) -> None:
        self._context = context
        self._relay = relay
        self._following = following
        self._has_proxies = bool(context.proxies)
        self._repeated = 0
        """Appends in progress that have no tunnel."""
        self._pools: Final = {
            frames.BEGIN: TunnelPool(router),
            frames.BEGIN_PLACED: TunnelPool(placed_router),
        }

    def open(self, peer: Peer, number: int, begin: int, data: bytes) -> TunnelServer | None:
        if begin == frames.BEGIN_FOLLOW:
            return self._following.serve(peer, number)
        pool, context = self._pools[begin & ~frames.AHEAD], self._context
        if not context.request_log.is_on and not self._has_proxies and not context.draining:
            known = pool.router.head_cache.find(data)
            if known is not None and known.repeat is not None:
                now_s, turns = perf_counter(), context.turns
                # Without time left in this iteration of the event loop, it waits in a tunnel for its turn.
                if now_s < turns.ends_at_s or turns.begin(now_s):
                    if context.response_to_known is not None:
                        response = context.response_to_known(known, data, now_s)
                        if response is not None:
                            peer.send(frames.WHOLE, number, response)
                            return None
                    self._repeat(known, known.repeat, peer, number, data, now_s)
                    return None
        tunnel = pool.idle.pop() if pool.idle else Tunnel(context, pool.router, self._relay, pool.free)
        pool.busy.add(tunnel)
        return tunnel.use(peer, number, is_ahead=begin & frames.AHEAD != 0)

    def _repeat(self, known: KnownHead, repeat: Repeat, peer: Peer, number: int, data: bytes, began_s: float) -> None:
        """Process an append whose head is known, without a tunnel: most of what is relayed are such appends."""
        check = self._relay.peers.check
        if check is not None:
            check()
        self._repeated += 1
        done = partial(self._complete, peer, number, known.operation, repeat.render, began_s)
        try:
            rest = repeat.begin(data[len(known.head) :], done)
            if rest is not None:
                done(b"%b%b\r\n" % (repeat.beginning, rest))
        except Refusal as refusal:
            done(refusal)
        except Exception:
            log.exception("%s %r failed unexpectedly", known.request.method, known.request.target)
            self._repeated -= 1
            peer.send(frames.CUT, number)

    def _complete(
        self,
        peer: Peer,
        number: int,
        operation: str,
        render: Callable[[Any], bytes | Response],
        began_s: float,
        result: Any,
    ) -> None:
        """Send the response to an append without a tunnel."""
        self._repeated -= 1
        context = self._context
        beginnings = context.common_headers.beginnings
        response = result
        if isinstance(result, Refusal):
            response = problem(result)
        elif type(result) is not bytes:
            response = render(result)
        if type(response) is bytes:
            status = NO_CONTENT
            peer.send(frames.WHOLE, number, b"%b%b\r\n" % (beginnings[NO_CONTENT], response))
        else:
            status, headers, body = response.status, response.headers, response.body
            if status != NO_CONTENT:
                headers += b"Content-Length: %d\r\n" % len(body)
            peer.send(frames.WHOLE, number, b"%b%b\r\n%b" % (beginnings[status], headers, body))
        context.metrics.count_request(operation, status, perf_counter() - began_s)

    @property
    def is_busy(self) -> bool:
        return self._repeated > 0 or any(pool.busy for pool in self._pools.values())

    def drain(self) -> None:
        """End live responses; other requests in progress are completed."""
        for pool in self._pools.values():
            for tunnel in tuple(pool.busy):
                tunnel.drain()


class TunnelPool:
    """The tunnels of one router."""

    def __init__(self, router: Router) -> None:
        self.router: Final = router
        self.busy: Final[set[Tunnel]] = set()
        self.idle: Final[list[Tunnel]] = []

    def free(self, tunnel: Tunnel, is_idle: bool) -> None:
        self.busy.discard(tunnel)
        if is_idle and len(self.idle) < IDLE_TUNNELS_MAX:
            self.idle.append(tunnel)
