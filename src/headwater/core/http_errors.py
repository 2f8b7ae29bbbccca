"""Errors of the HTTP layer: refused connections, and requests that are refused before a route is found."""

from __future__ import annotations

from headwater.core.errors import Refusal


class RequestTimeout(Refusal):
    """The request did not arrive completely in time.

    Send it again; `server.read_timeout_secs` is the limit.
    """

    status = 408
    code = "request_timeout"


class UrlTooLong(Refusal):
    """The request target is longer than `http.max_url_bytes`.

    Shorten the name or the query.
    """

    status = 414
    code = "url_too_long"


class HeadersTooLarge(Refusal):
    """The headers are larger than `http.max_header_bytes`.

    Send fewer or shorter headers, often cookies.
    """

    status = 431
    code = "headers_too_large"


class Unauthorized(Refusal):
    """The server requires a token (`auth.token`), and the request has none or another one.

    Send `Authorization: Bearer TOKEN`.
    """

    status = 401
    code = "unauthorized"


class OriginNotAllowed(Refusal):
    """A web page of an origin that is not allowed tried to change something.

    Add the origin to `http.cors_origins`.
    """

    status = 403
    code = "origin_not_allowed"


class HostNotAllowed(Refusal):
    """The `Host` header does not name this server.

    Use a loopback name, or add the name to `server.allowed_hosts`.
    """

    status = 421
    code = "host_not_allowed"


class TooManyConnections(Refusal):
    """The server has reached `server.max_connections`.

    Retry after `Retry-After` seconds, close unused connections, or raise the limit.
    """

    status = 503
    code = "too_many_connections"


class Overloaded(Refusal):
    """The requests in memory have reached `limits.max_request_bodies_bytes`.

    Retry after `Retry-After` seconds.
    """

    status = 503
    code = "overloaded"


class UnsupportedHttpVersion(Refusal):
    """The request is neither HTTP/1.1 nor HTTP/1.0.

    Use HTTP/1.1, or a proxy that speaks HTTP/2 to the client.
    """

    status = 505
    code = "unsupported_http_version"


class UnsupportedTransferCoding(Refusal):
    """The request has a `Transfer-Encoding` other than `chunked`.

    Send the body with `Content-Length` or `chunked`.
    """

    status = 501
    code = "unsupported_transfer_coding"
