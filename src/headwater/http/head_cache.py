"""A cache of parsed request heads.

A client that appends or polls sends the same head repeatedly, byte for byte. The result of parsing it is cached, so
that the next time the head is looked up instead of parsed: the same bytes at the start of a message always mean the
same request. This saves about 40 % of the time of a small append (see `docs/decisions.md`).

Only complete HTTP/1.1 keep-alive requests are cached, with a Content-Length or without a body; all others, and heads
that differ in any byte, are parsed. A handler may return how to process the same head with another body (`Repeat`),
which is then cached as well.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headwater.http.request import Request
from headwater.http.responses import Repeat

HEAD_MAX_BYTES: Final = 1024
KNOWN_MAX: Final = 4096
_ONCE_ONLY: Final = (b"producer-seq", b"stream-seq", b"if-none-match", b"transfer-encoding", b"expect", b"upgrade")
"""Headers that change with each request, or that need the parser."""


class KnownHead(msgspec.Struct):
    head: bytes
    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body_bytes: int
    operation: str = ""
    repeat: Repeat | None = None
    """How requests with this head are processed; set, like `operation`, by the first one."""
    owner: int = -1
    """The worker to which they are relayed; -1 if they are not."""


class HeadCache:
    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def find(self, data: bytes) -> tuple[KnownHead, Request] | None:
        """The request and its head, if `data` is exactly one request whose head is known."""
        end = data.find(b"\r\n\r\n") + 4
        known = self._heads.get(data[:end])
        if known is None or len(data) - end != known.body_bytes:
            return None
        return known, Request(known.method, known.target, known.headers, data[end:], False, True)

    def clear(self) -> None:
        """Clear the cache, because the location of a stream has changed."""
        self._heads.clear()

    def remember(self, data: bytes, request: Request) -> None:
        """Cache the head of a request that was received as exactly `data`."""
        headers = request.headers
        if request.http_1_0 or not request.keep_alive or b"?" in request.target:
            return
        end = data.find(b"\r\n\r\n") + 4
        if end > HEAD_MAX_BYTES or len(data) - end != len(request.body):
            return
        if request.body and int(headers.get(b"content-length", b"-1")) != len(request.body):
            return
        if any(name in headers for name in _ONCE_ONLY):
            return
        if len(self._heads) >= KNOWN_MAX:
            self._heads.clear()
        self._heads[data[:end]] = KnownHead(data[:end], request.method, request.target, headers, len(request.body))
