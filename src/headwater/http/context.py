"""State that handlers and connections share: the engine, the limits, and the settings for responses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from headwater.core.cursors import next_cursor
from headwater.core.errors import NotFound, Refusal
from headwater.core.http_errors import TooManyConnections
from headwater.engine.committer import guarded
from headwater.engine.engine import Engine
from headwater.engine.subscriptions import Census, Subscriptions
from headwater.http.access import AccessControl
from headwater.http.compression import CompressedChunks
from headwater.http.deadlines import Deadlines
from headwater.http.flow import TURNS_S, ByteBudget, Turns
from headwater.http.follow_sessions import FollowSessions
from headwater.http.followed_events import LocalEvents, OpenEvents
from headwater.http.forwarding import TrustedProxies
from headwater.http.headers import CommonHeaders
from headwater.http.parser import HeadCheck, ParserLimits
from headwater.http.request import Request
from headwater.http.request_log import RequestLog, RequestTracing

SHRINK_MIN: Final = 1_000
"""The set of connections is made again if it had more than this many and most have ended."""
REFUSED_MAX: Final = 16
"""Connections beyond the limit, TLS handshakes among them, that stay open until their clients have read the refusal.
There are descriptors for as many and some more (see `descriptors`); without one, a client gets no response at all."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits and timeouts of the HTTP layer; each is a setting."""

    max_header_bytes: int
    max_url_bytes: int
    max_body_bytes: int
    max_bodies_bytes: int
    max_unread_bytes: int
    max_append_messages: int
    max_json_message_bytes: int
    max_chunk_bytes: int
    max_name_bytes: int
    max_connections: int
    read_timeout_s: float
    idle_timeout_s: float
    write_timeout_s: float
    long_poll_timeout_s: float
    sse_reconnect_s: float
    max_follows: int


class OpenConnection(Protocol):
    """The part of a connection that the server's timers and its shutdown use."""

    @property
    def is_slow_reader(self) -> bool: ...

    @property
    def unread_bytes(self) -> int: ...

    @property
    def waits_since_s(self) -> float: ...

    def check_time(self, now_s: float) -> None: ...

    def drain(self) -> None: ...

    def abort(self) -> None: ...


class OpenConnections:
    """All open connections, within the limit."""

    def __init__(self, limit: int) -> None:
        self.limit: Final = limit
        self._open: set[OpenConnection] = set()
        self._most = 0
        """The highest number of them since the set was made: a set does not shrink."""
        self.elsewhere = 0
        """The number of connections of other workers of the server."""
        self.on_change: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> tuple[OpenConnection, ...]:
        return tuple(self._open)

    def slow_readers(self) -> list[OpenConnection]:
        """The connections whose clients do not read their responses at the moment."""
        return [connection for connection in self._open if connection.is_slow_reader]

    def add(self, connection: OpenConnection) -> Refusal | None:
        """Add a new connection; returns the refusal if the limit is reached."""
        self._open.add(connection)
        if self.on_change is not None:
            self.on_change()
        if len(self._open) + self.elsewhere > self.limit:
            return TooManyConnections(
                f"Connection limit ({self.limit}, server.max_connections) reached; retry later.",
                (("Retry-After", "1"),),
            )
        return None

    @property
    def has_many_refused(self) -> bool:
        """Whether so many connections beyond the limit are open that descriptors for further ones may be missing."""
        return len(self._open) + self.elsewhere > self.limit + REFUSED_MAX

    def has_space(self, beginning: int) -> bool:
        """Whether one more connection is accepted beside those open and `beginning`, if only for its refusal."""
        return len(self._open) + self.elsewhere + beginning < self.limit + REFUSED_MAX

    def discard(self, connection: OpenConnection) -> None:
        self._most = max(self._most, len(self._open))
        self._open.discard(connection)
        if self._most > SHRINK_MIN and len(self._open) * 8 < self._most:
            self._open = set(self._open)
            self._most = len(self._open)
        if self.on_change is not None:
            self.on_change()


class Context:
    def __init__(
        self,
        engine: Engine,
        limits: HttpLimits,
        loop: asyncio.AbstractEventLoop,
        *,
        access: AccessControl,
        cache_control: str,
        cursor_interval_secs: int,
        scheme: str,
        request_id: Callable[[], str],
        subscriptions: Subscriptions | None = None,
        public_url: str = "",
        compression: CompressedChunks | None = None,
        compresses_events: bool = False,
        proxies: TrustedProxies | None = None,
        root_aliases: tuple[str, ...] = (),
        tracing: RequestTracing | None = None,
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.loop = loop
        self.metrics = engine.metrics
        self.common_headers = CommonHeaders(access.origins)
        self.cache_control = cache_control
        self.access = access
        self.check_head: HeadCheck = access.refusal
        """Kept, because each access to a method creates an object."""
        self.scheme = scheme
        self.public_url = public_url
        self.compression = compression
        self.compresses_events = compresses_events
        self.proxies = proxies if proxies is not None else TrustedProxies(())
        self.request_log = RequestLog(self.proxies, request_id, tracing)
        self.root_aliases = tuple(alias.encode() for alias in root_aliases)
        self.draining = False
        self.connections = OpenConnections(limits.max_connections)
        namespaces = engine.quota.namespaces
        self.limited_namespaces = namespaces if namespaces is not None and namespaces.counts_connections else None
        """The quotas of namespaces, if they limit connections."""
        self.budget = ByteBudget(limits.max_bodies_bytes)
        self.turns = Turns(loop)
        self.parser_limits = ParserLimits(
            limits.max_header_bytes, limits.max_url_bytes, limits.max_body_bytes, limits.read_timeout_s
        )
        self.long_poll_deadlines = Deadlines(loop, limits.long_poll_timeout_s)
        self.sse_deadlines = Deadlines(loop, limits.sse_reconnect_s) if limits.sse_reconnect_s else None
        self.follow_sessions = FollowSessions(limits.max_follows, engine.follows.max_streams)
        self.open_events: OpenEvents = partial(LocalEvents, engine)
        """Opens the events of a follower of many streams."""
        self.append_known: Callable[[Any, bytes], bool] | None = None
        """Processes data that a connection received, if it is a plain append with a cached head; otherwise it returns
        False and has changed nothing. None without a compiled path (see `compiled_appends`)."""
        self.response_to_known: Callable[[Any, bytes, float], bytes | None] | None = None
        """Processes a relayed request with a cached head, and returns the response, or None and has changed nothing."""
        self._checks: Iterator[None] | None = None
        """The rest of the connections whose timeouts are being checked."""
        self._cursor_interval_secs = cursor_interval_secs
        self.current_cursor = self.cursor(None)
        """The current cursor, updated about twice a second."""
        self._subscriptions = subscriptions
        self.common_headers.set_date(time.time())
        self.now_s = loop.time()
        """The loop's time, updated about twice a second: precise enough for timeouts, and cheap to read."""

    @property
    def subscriptions(self) -> Subscriptions:
        if self._subscriptions is None:
            raise NotFound("Subscriptions are disabled on this server; set subscriptions.enabled to use them.")
        return self._subscriptions

    def census(self) -> Census:
        """The state of all subscriptions, for metrics."""
        return Census() if self._subscriptions is None else self._subscriptions.census()

    def cursor(self, echoed: str | None) -> str:
        """The cursor of a live response to a client that sent `echoed`."""
        return next_cursor(self.engine.now_ms(), self._cursor_interval_secs, echoed, random.random())

    def origin_of(self, request: Request) -> str:
        """Scheme and host that the client used to reach the server or a trusted proxy; empty if unknown."""
        host = request.header(b"host")
        scheme = self.scheme
        if request.is_proxied:
            hop = self.proxies.hop(request.headers)
            scheme, host = hop.scheme or scheme, hop.host or host
        return f"{scheme}://{host}" if host else ""

    def location(self, request: Request) -> bytes:
        """The URL of the request itself, with the configured base URL or the one that the client used."""
        return self.base_url(request).encode("latin-1") + request.target.partition(b"?")[0]

    def base_url(self, request: Request) -> str:
        """The base URL of this server: the configured one, or the one that this client used."""
        return self.public_url or self.origin_of(request)

    def sweep(self) -> None:
        """Update the date, and check the timeouts of every connection. Called about twice a second."""
        self.now_s = self.loop.time()
        self.current_cursor = self.cursor(None)
        self.common_headers.set_date(time.time())
        if self._checks is None:
            self._checks = self._check_connections()
            self._continue_checks()

    def _continue_checks(self) -> None:
        """Check connections for a few milliseconds: thousands of them may have to be closed together."""
        checks, self._checks = self._checks, None
        assert checks is not None
        until_s = time.perf_counter() + TURNS_S
        for _ in checks:
            if time.perf_counter() >= until_s:
                self._checks = checks
                self.turns.schedule(self._continue_checks)
                return

    def _check_connections(self) -> Iterator[None]:
        """Apply the timeouts of every connection. If all clients together have not read too much, disconnect those that
        have not read for longest."""
        for connection in self.connections.all():
            guarded(connection.check_time, self.now_s)
            yield
        slow = self.connections.slow_readers()
        excess = sum(connection.unread_bytes for connection in slow) - self.limits.max_unread_bytes
        if excess <= 0:
            return
        for connection in sorted(slow, key=lambda connection: connection.waits_since_s):
            if connection.is_slow_reader:
                excess -= connection.unread_bytes
                self.metrics.slow_followers += 1
                connection.abort()
                if excess <= 0:
                    return
            yield
