"""Routing: find the route of a request, and the address in its path.

The table itself is in `routes`; this module only needs its type, so that connections do not import every handler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import unquote_to_bytes

import httptools

from headwater.core.errors import BadRequest, MethodNotAllowed
from headwater.engine.uploads import BlobUpload
from headwater.http.bounded_cache import BoundedCache
from headwater.http.context import Context
from headwater.http.head_cache import HeadCache
from headwater.http.paths import SERVER, Address, resolve_path
from headwater.http.request import Request
from headwater.http.responses import AnyResponse

ADDRESS_CACHE_MAX: Final = 8192
"""Paths whose address is cached: clients use the same ones repeatedly."""
LIVE: Final = "live"
LEASE: Final = "lease"
PARAMETERS: Final = frozenset(
    ("offset", LIVE, "cursor", "until", "splits", "frames", "since", "times", "find", "limit", "after", "prefix", LEASE)
)
"""The query parameters of all routes; others are ignored."""
_ENCODED: Final = {name.encode(): name for name in PARAMETERS}
"""Their usual spelling; a client may also percent-encode them."""

Handler: TypeAlias = Callable[[Context, Request, Address], AnyResponse]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """The handler of one method at one path pattern. Routes are compared by identity, so that one can be a key."""

    method: str
    pattern: str
    handler: Handler
    operation: str
    """The name of the operation in metrics."""
    live: str = ""
    """If set, the route is for requests whose `live` parameter has this value, or that have this parameter."""
    begin_upload: Callable[[Context, Request, Address, bool], BlobUpload | None] | None = None
    """If set, the body is streamed to this upload."""
    standby_may_answer: bool = False
    """Whether the standby of a shard can process the request, in a cluster."""


class Router:
    def __init__(self, routes: tuple[Route, ...], is_local: Callable[[str], bool] | None = None) -> None:
        self._methods: dict[str, dict[bytes, Route]] = {}
        """Routes by pattern and method; a live route has its mode after the method."""
        for route in routes:
            key = f"{route.method} {route.live}".strip().encode()
            self._methods.setdefault(route.pattern, {})[key] = route
        self._addresses: BoundedCache[bytes, Address] = BoundedCache(ADDRESS_CACHE_MAX)
        self.head_cache: Final = HeadCache(is_local)
        """Part of the router, because another router processes the same head differently."""

    def resolve(self, context: Context, request: Request) -> tuple[Route, Address]:
        """The route of a request. Raises the refusal if there is none."""
        address = self._addresses.get(request.target)
        if address is None:
            address = self._address(context, request)
        if not request.http_1_0 and b"host" not in request.headers:
            raise BadRequest("The Host header is missing; HTTP/1.1 requires it.")
        methods = self._methods[address.pattern]
        if address.query:
            variant = LEASE if LEASE in address.query else address.query.get(LIVE)
            if variant is not None:
                route = methods.get(b"%b %b" % (request.method, variant.encode()))
                if route is not None:
                    return route, address
        route = methods.get(request.method)
        if route is None:
            allowed = ", ".join(sorted(method.decode() for method in methods if b" " not in method))
            detail = f"{request.method.decode('latin-1')} is not supported here. Allowed methods: {allowed}."
            raise MethodNotAllowed(detail, (("Allow", allowed),))
        return route, address

    def begin_upload(self, context: Context, request: Request, *, is_next: bool) -> BlobUpload | None:
        """Return the upload for the body of a request, for routes with large bodies."""
        address = self._address(context, request)
        route = self._methods[address.pattern].get(request.method)
        if route is None or route.begin_upload is None:
            return None
        return route.begin_upload(context, request, address, is_next)

    def _address(self, context: Context, request: Request) -> Address:
        path, _, query = request.target.partition(b"?")
        address = self._addresses.get(path)
        if address is None or b"#" in query:
            address, query = self._parse(context, request)
        return address.with_query(parse_query(query)) if query else address

    def _parse(self, context: Context, request: Request) -> tuple[Address, bytes]:
        """The address of a target whose path is not cached, and its query."""
        if request.target == b"*" and request.method == b"OPTIONS":
            return Address(SERVER), b""
        try:
            url = httptools.parse_url(request.target)
        except httptools.HttpParserInvalidURLError:
            raise BadRequest("The request target is not a valid URL; percent-encode its special characters.") from None
        path = url.path or b"/"
        address = resolve_path(path, context.limits.max_name_bytes, context.root_aliases)
        self._addresses.put(path, address)
        return address, url.query or b""


def parse_query(raw: bytes) -> dict[str, str]:
    """The known parameters of a query. A known one that is repeated or not UTF-8 is refused."""
    query: dict[str, str] = {}
    for field in raw.split(b"&"):
        encoded_name, _, encoded_value = field.partition(b"=")
        name = _ENCODED.get(encoded_name) or _decoded(encoded_name)
        if name not in PARAMETERS:
            continue
        value = _decoded(encoded_value)
        if value is None:
            raise BadRequest(f"The query parameter {name} is not valid UTF-8; percent-encode its bytes in UTF-8.")
        if name in query:
            raise BadRequest(f"The query parameter {name} is given more than once; send it once.")
        query[name] = value
    return query


def _decoded(raw: bytes) -> str | None:
    raw = raw.replace(b"+", b" ")
    try:
        return (unquote_to_bytes(raw) if b"%" in raw else raw).decode("utf-8")
    except UnicodeDecodeError:
        return None
