"""Status lines and headers, encoded: security, CORS, caching and the headers of the protocol.

Everything that does not depend on the request is built once, at startup. A header block is bytes, each line ending with
CRLF, so that the hot path only joins encoded lines.
"""

from __future__ import annotations

from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Final

from headwater.core import native
from headwater.core.offsets import Offset, format_token
from headwater.http.origins import Origins

EXPOSED_HEADERS: Final = (
    "ETag",
    "Location",
    "Producer-Digest",
    "Producer-Epoch",
    "Producer-Expected-Seq",
    "Producer-Received-Seq",
    "Producer-Seq",
    "Stream-Closed",
    "Stream-Cursor",
    "Stream-Earliest-Offset",
    "Stream-Expires-At",
    "Stream-Extensions",
    "Stream-Frame-Times",
    "Stream-Last-Write-At",
    "Stream-Next-Offset",
    "Stream-Next-Position",
    "Stream-Retention-Age",
    "Stream-Retention-Bytes",
    "Stream-Retention-Drop",
    "Stream-SSE-Data-Encoding",
    "Stream-Since-Offset",
    "Stream-Snapshot-Offset",
    "Stream-TTL",
    "Stream-Up-To-Date",
    "Write-Fence",
    "Write-Fence-Sealed-Generation",
    "Write-Fence-Sealed-Offset",
    "X-Request-Id",
)
ALLOWED_REQUEST_HEADERS: Final = (
    "Authorization",
    "Content-Type",
    "If-None-Match",
    "Last-Event-ID",
    "Producer-Epoch",
    "Producer-Id",
    "Producer-Seq",
    "Stream-Closed",
    "Stream-Expires-At",
    "Stream-Fork-Offset",
    "Stream-Fork-Sub-Offset",
    "Stream-Forked-From",
    "Stream-Retention-Age",
    "Stream-Retention-Bytes",
    "Stream-Retention-Drop",
    "Stream-Seq",
    "Stream-TTL",
    "Write-Fence",
    "Write-Token",
)
ALLOWED_METHODS: Final = "GET, HEAD, POST, PUT, DELETE, OPTIONS"
PREFLIGHT_MAX_AGE_S: Final = 86_400

# Plain numbers: hashing an HTTPStatus runs Python code, three times per response.
OK: Final = 200
CREATED: Final = 201
NO_CONTENT: Final = 204
NOT_MODIFIED: Final = 304
TEMPORARY_REDIRECT: Final = 307
SERVICE_UNAVAILABLE: Final = 503

REASONS: Final[dict[int, str]] = {status.value: status.phrase for status in HTTPStatus} | {413: "Payload Too Large"}
"""Reason phrases. That of 413 is from the protocol (§5.2), because it differs between versions of Python."""
STATUS_LINES: Final[dict[int, bytes]] = {
    status: f"HTTP/1.1 {status} {reason}\r\n".encode() for status, reason in REASONS.items()
}
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_STORE: Final = b"Cache-Control: no-store\r\n"
NO_CACHE: Final = b"Cache-Control: no-cache\r\n"
STREAM_CLOSED: Final = b"Stream-Closed: true\r\n"
WRITE_FENCE: Final = b"Write-Fence: true\r\n"
UP_TO_DATE: Final = b"Stream-Up-To-Date: true\r\n"
NEXT_OFFSET: Final = b"Stream-Next-Offset: "
JSON_TYPE: Final = b"Content-Type: application/json\r\n"
_VARY_ORIGIN: Final = b"Vary: Origin\r\n"
"""Part of every response: the CORS headers depend on the origin, and caches must know that."""
VARY_ENCODING: Final = b"Vary: Origin, Accept-Encoding\r\n"
"""Replaces `_VARY_ORIGIN` in a response that could be compressed."""
_SECURITY: Final = b"X-Content-Type-Options: nosniff\r\nCross-Origin-Resource-Policy: cross-origin\r\n" + _VARY_ORIGIN

_SANDBOX: Final = b"Content-Security-Policy: sandbox; default-src 'none'\r\n"
_INERT: Final = frozenset(("application/json", "text/plain", "application/octet-stream"))
"""Types that browsers display but never execute."""


class CommonHeaders:
    """Security and CORS headers, which every response has, including errors."""

    def __init__(self, origins: Origins) -> None:
        self._origins = origins
        self._exposed = f"Access-Control-Expose-Headers: {', '.join(EXPOSED_HEADERS)}\r\n".encode()
        self.preflight = (
            f"Access-Control-Allow-Methods: {ALLOWED_METHODS}\r\n"
            f"Access-Control-Allow-Headers: {', '.join(ALLOWED_REQUEST_HEADERS)}\r\n"
            f"Access-Control-Max-Age: {PREFLIGHT_MAX_AGE_S}\r\n"
        ).encode()

        self.beginnings: dict[int, bytes] = {}
        """Status line and common headers for each status, for a request without an origin."""
        self.set_date(0.0)

    def set_date(self, now_s: float) -> None:
        """Update the date (RFC 9110 §6.6.1) of the common headers; called about twice a second."""
        common = f"Date: {formatdate(now_s, usegmt=True)}\r\n".encode() + _SECURITY
        self.beginnings = {status: line + common for status, line in STATUS_LINES.items()}

    def begin(self, status: int, origin: bytes | None) -> bytes:
        """Status line and common headers. Only browsers send an origin, and only they need the CORS headers."""
        beginning = self.beginnings[status]
        if origin is None or not self._origins.allows(origin):
            return beginning
        allowed = b"*" if self._origins.any else origin
        return b"%bAccess-Control-Allow-Origin: %b\r\n%b" % (beginning, allowed, self._exposed)


def without_vary(beginning: bytes) -> bytes:
    """The common headers of a response that has its own `Vary`."""
    return beginning.replace(_VARY_ORIGIN, b"")


def header(name: str, value: str) -> bytes:
    return f"{name}: {value}\r\n".encode("latin-1", "replace")


@lru_cache(maxsize=1024)
def content_type(value: str) -> bytes:
    """The Content-Type header of stored data, with a sandbox: a stored page must not run scripts in our origin."""
    line = header("Content-Type", value)
    return line if value.partition(";")[0].strip().lower() in _INERT else line + _SANDBOX


def offset_text(stream_id: int, offset: Offset) -> str:
    """The token of an offset. Every offset in a response is formatted here or in `next_offset`."""
    return format_token(offset.message_index, offset.byte_position, stream_id)


def next_offset(stream_id: int, message_index: int, byte_position: int) -> bytes:
    """The Stream-Next-Offset header: where to continue reading."""
    return b"%b%b\r\n" % (NEXT_OFFSET, native.offset_token(message_index, byte_position, stream_id))


def next_position(message_index: int) -> bytes:
    """The Stream-Next-Position header: the number of messages before the next offset (our extension)."""
    return b"Stream-Next-Position: %d\r\n" % message_index
