"""The application: what all connections share, and the router.

A request is routed once, by its canonical name. Everything after the router works with that name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

import httptools

from headwater.core.errors import BadRequest, MethodNotAllowed, NotFound, TooManyConnections
from headwater.core.names import canonical_name
from headwater.engine.engine import Engine
from headwater.engine.subscriptions import Census, Subscriptions
from headwater.engine.uploads import BlobUpload
from headwater.http import append, bucketed, control, create, delete, metadata, options, read, service, snapshots, ui
from headwater.http.connection import Connection
from headwater.http.deadlines import Deadlines
from headwater.http.heads import KnownHeads
from headwater.http.request import Request
from headwater.http.response import CommonHeaders

log = logging.getLogger("headwater.http")

STREAM_ROOT: Final = b"/v1/stream/"
ROUTE_CACHE_MAX: Final = 8192
"""Targets without a query whose route is remembered: writers use the same URL over and over."""


class Target(NamedTuple):
    """What a request is about: its handlers by method, and the canonical stream name (empty for service pages)."""

    handlers: Mapping[bytes, Handler]
    name: str
    query: Mapping[str, str]
    below: str = ""
    """For a subscription (then `name` is its id): the stream that the address names below it."""
    bucket: str = ""
    """The bucket that the address names, or that the stream is in."""
    snapshot: str = ""
    """The offset of the snapshot that the address names."""


Handler: TypeAlias = "Callable[[App, Connection, Request, Target], None]"

STREAM_HANDLERS: Final[Mapping[bytes, Handler]] = {
    b"POST": append.handle,
    b"GET": read.handle,
    b"HEAD": metadata.handle,
    b"PUT": create.handle,
    b"DELETE": delete.handle,
    b"OPTIONS": options.handle,
}
SERVICE_PAGES: Final[Mapping[bytes, Mapping[bytes, Handler]]] = {
    path: {b"GET": handler, b"HEAD": handler, b"OPTIONS": options.handle}
    for path, handler in (
        (b"/healthz", service.health),
        (b"/readyz", service.ready),
        (b"/metrics", service.metrics),
    )
}
UI_HANDLERS: Final[Mapping[bytes, Handler]] = {b"GET": ui.handle, b"HEAD": ui.handle, b"OPTIONS": options.handle}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes and times that the HTTP layer keeps; every one is a setting."""

    max_header_bytes: int
    max_url_bytes: int
    max_body_bytes: int
    max_chunk_bytes: int
    max_name_bytes: int
    max_connections: int
    read_timeout_s: float
    idle_timeout_s: float
    write_timeout_s: float
    long_poll_timeout_s: float
    sse_reconnect_s: float


class App:
    def __init__(
        self,
        engine: Engine,
        limits: HttpLimits,
        loop: asyncio.AbstractEventLoop,
        *,
        origins: tuple[str, ...],
        cache_control: str,
        cursor_interval_secs: int,
        scheme: str,
        request_id: Callable[[], str],
        subscriptions: Subscriptions | None = None,
        public_url: str = "",
    ) -> None:
        self.engine = engine
        self.limits = limits
        self.metrics = engine.metrics
        self.common_headers = CommonHeaders(origins)
        self.cache_control = cache_control
        self.cursor_interval_secs = cursor_interval_secs
        self.scheme = scheme
        self.public_url = public_url
        self._subscriptions = subscriptions
        self.request_id = request_id
        self.draining = False
        self.connections: set[Connection] = set()
        self.loop_time = loop.time
        self.long_poll_deadlines = Deadlines(loop, limits.long_poll_timeout_s)
        self.sse_deadlines = Deadlines(loop, limits.sse_reconnect_s) if limits.sse_reconnect_s else None
        self.max_header_bytes = limits.max_header_bytes
        self.max_url_bytes = limits.max_url_bytes
        self.max_body_bytes = limits.max_body_bytes
        self.read_timeout_s = limits.read_timeout_s
        self.idle_timeout_s = limits.idle_timeout_s
        self.write_timeout_s = limits.write_timeout_s
        self.known_heads = KnownHeads()
        self._routes: dict[bytes, Target] = {}
        self.requests = engine.metrics.requests
        self.debug = log.isEnabledFor(logging.DEBUG)
        self.common_headers.set_date(time.time())
        self.now_s = loop.time()
        """The loop's time to about a second: enough for time-outs, and free to read."""

    def route(self, connection: Connection, request: Request) -> None:
        """Hand a request to the handler of its operation."""
        target = self._routes.get(request.target)
        if target is None:
            target = self._resolve(request)
        if not request.http_1_0 and b"host" not in request.headers:
            raise BadRequest("The Host header is missing.")
        handler = target.handlers.get(request.method)
        if handler is None:
            allowed = ", ".join(sorted(method.decode() for method in target.handlers))
            raise MethodNotAllowed(f"This address takes {allowed}.", (("Allow", allowed),))
        handler(self, connection, request, target)

    def begin_upload(self, request: Request, *, is_next: bool) -> BlobUpload | None:
        """Where the body of a request goes while it arrives, for the addresses that take such bodies."""
        target = self._routes.get(request.target) or self._resolve(request)
        if target.handlers is not bucketed.SNAPSHOT_HANDLERS or request.method != b"PUT":
            return None
        return snapshots.begin_upload(self, request, target, is_next=is_next)

    @property
    def subscription_api(self) -> Subscriptions:
        if self._subscriptions is None:
            raise NotFound("This server has no subscriptions.")
        return self._subscriptions

    def census(self) -> Census:
        """How its subscriptions stand."""
        return Census() if self._subscriptions is None else self._subscriptions.census()

    def name_of_path(self, path: bytes) -> str:
        """The canonical name of a stream that a header names by its path."""
        if path.startswith(bucketed.ROOT):
            return bucketed.name_of(path)
        if not path.startswith(STREAM_ROOT):
            raise BadRequest(f"A stream is named by its path, which begins with {STREAM_ROOT.decode()} or /ds/.")
        return canonical_name(path[len(STREAM_ROOT) :], self.limits.max_name_bytes)

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)
        if self.draining:
            connection.close()
        elif len(self.connections) > self.limits.max_connections:
            connection.turn_away(
                TooManyConnections(f"The server holds {self.limits.max_connections} connections and takes no more.")
            )

    def lost(self, connection: Connection) -> None:
        self.connections.discard(connection)

    def sweep(self) -> None:
        """About twice a second: set the date, and let every connection see whether it waited too long."""
        self.now_s = self.loop_time()
        self.common_headers.set_date(time.time())
        for connection in tuple(self.connections):
            connection.check_time(self.now_s)

    def _resolve(self, request: Request) -> Target:
        if request.target == b"*" and request.method == b"OPTIONS":
            return Target({b"OPTIONS": options.handle}, "", {})
        try:
            url = httptools.parse_url(request.target)
        except httptools.HttpParserInvalidURLError:
            raise BadRequest("The request target is not a valid URL.") from None
        path = url.path or b"/"
        query = _parse_query(url.query)
        if path.startswith(STREAM_ROOT) and control.is_control(path[len(STREAM_ROOT) :]):
            handlers, id_, below = control.resolve(path[len(STREAM_ROOT) :])
            target = Target(handlers, id_, query, below)
        elif path.startswith(STREAM_ROOT):
            name = canonical_name(path[len(STREAM_ROOT) :], self.limits.max_name_bytes)
            target = Target(STREAM_HANDLERS, name, query)
        elif path.startswith(bucketed.ROOT):
            address = bucketed.resolve(path)
            target = Target(address.handlers, address.name, query, bucket=address.bucket, snapshot=address.snapshot)
        elif path == bucketed.INDEX:
            target = Target(bucketed.INDEX_HANDLERS, "", query)
        elif path in SERVICE_PAGES:
            target = Target(SERVICE_PAGES[path], "", query)
        elif ui.belongs(path):
            target = Target(UI_HANDLERS, path.decode("latin-1"), query)
        else:
            raise NotFound("There is nothing at this address. Streams live below /v1/stream/ and /ds/.")
        if not query:
            if len(self._routes) >= ROUTE_CACHE_MAX:
                self._routes.clear()
            self._routes[request.target] = target
        return target


def _parse_query(raw: bytes | None) -> dict[str, str]:
    if not raw:
        return {}
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=32)
    except (ValueError, UnicodeDecodeError):
        raise BadRequest("The query is not valid.") from None
    query = dict(pairs)
    if len(query) != len(pairs):
        raise BadRequest("A query parameter is given more than once.")
    return query
