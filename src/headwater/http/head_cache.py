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

from headwater.http.request import Request
from headwater.http.responses import Repeat

HEAD_MAX_BYTES: Final = 1024
"""Size of a request head that is cached."""
KNOWN_MAX: Final = 4096
"""Request heads that are cached."""
_ONCE_ONLY: Final = (b"producer-seq", b"stream-seq", b"if-none-match", b"transfer-encoding", b"expect", b"upgrade")
"""Headers that change with each request, or that need the parser."""


class KnownHead:
    """A head that was parsed before, and what the first request with it has shown."""

    __slots__ = ("head", "operation", "owner", "repeat", "request", "size")

    def __init__(self, head: bytes, request: Request, body_bytes: int) -> None:
        self.head = head
        self.size = len(head) + body_bytes
        """The size of a request with this head; -1 when the head is no longer valid."""
        self.request: Final = request
        """The request without its body. It is shared, so nobody may change it."""
        self.operation = ""
        self.repeat: Repeat | None = None
        """How requests with this head are processed; set, like `operation`, by the first one."""
        self.owner = -1
        """The worker to which they are relayed; -1 if they are not."""

    def request_with(self, body: bytes) -> Request:
        request = self.request
        return Request(request.method, request.target, request.headers, body, False, True)


class HeadCache:
    def __init__(self) -> None:
        self._heads: dict[bytes, KnownHead] = {}

    def find(self, data: bytes) -> KnownHead | None:
        """The head of `data`, if that is exactly one request whose head is known."""
        known = self._heads.get(data[: data.find(b"\r\n\r\n") + 4])
        return known if known is not None and len(data) == known.size else None

    def clear(self) -> None:
        """Clear the cache, because the location of a stream has changed. Connections that keep a head notice it."""
        for known in self._heads.values():
            known.size = -1
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
            self.clear()
        head = data[:end]
        shared = Request(request.method, request.target, headers, b"", False, True)
        self._heads[head] = KnownHead(head, shared, len(request.body))
