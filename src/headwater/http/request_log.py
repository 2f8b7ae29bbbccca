"""The log of requests: their ids, the addresses of their clients, and a line and a span for each response."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final, Protocol

from headwater.http.forwarding import TrustedProxies
from headwater.http.request import Request

log = logging.getLogger("headwater.http")

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}", re.ASCII)


class RequestTracing(Protocol):
    """Records a span for each request (`headwater.otel`)."""

    def record(
        self,
        headers: Mapping[bytes, bytes],
        method: bytes,
        target: bytes,
        operation: str,
        status: int,
        began_s: float,
        client: str,
    ) -> None: ...


class RequestLog:
    """Logs requests at the level `debug`, and traces them if tracing is on."""

    def __init__(self, proxies: TrustedProxies, new_id: Callable[[], str], tracing: RequestTracing | None) -> None:
        self._proxies = proxies
        self._new_id = new_id
        self._tracing = tracing
        self.update_level()

    def update_level(self) -> None:
        """Check once whether requests are logged or traced, not for every request."""
        self.is_debug = log.isEnabledFor(logging.DEBUG)
        """Whether requests are logged. Each has an id then, which its client gets as well."""
        self.is_on = self.is_debug or self._tracing is not None
        """Whether requests are logged or traced."""

    def id_of(self, request: Request) -> str:
        """The id of a request from the client or a proxy, or a new one."""
        given = request.header(b"x-request-id")
        return given if given is not None and _REQUEST_ID.fullmatch(given) else self._new_id()

    def record(
        self,
        request: Request,
        request_id: str,
        operation: str,
        status: int,
        began_s: float,
        peer: tuple[str, int] | None,
    ) -> None:
        """Log and trace a request whose response has begun."""
        client = self._client_of(request, peer)
        if self._tracing is not None:
            self._tracing.record(request.headers, request.method, request.target, operation, status, began_s, client)
        if self.is_debug:
            extra = {
                "request_id": request_id,
                "method": request.method.decode("latin-1"),
                "path": request.target.decode("latin-1"),
                "status": status,
                "duration_ms": round((perf_counter() - began_s) * 1000, 3),
                "client": client,
            }
            log.debug("answered", extra=extra)

    def _client_of(self, request: Request, peer: tuple[str, int] | None) -> str:
        """The address of the client: of the connection, or as reported by a trusted proxy."""
        forwarded = self._proxies.hop(request.headers).client if request.is_proxied else ""
        return forwarded or (f"{peer[0]}:{peer[1]}" if peer else "")
