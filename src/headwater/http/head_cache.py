"""A cache of parsed request heads.

A client that appends or polls sends the same head repeatedly, byte for byte. What httptools parsed from it the first
time is remembered, so that the next time the head is looked up instead of parsed: the same bytes at the start of a
message can only mean the same request. This takes about 40 % off a small append (see `docs/decisions.md`).

Only complete HTTP/1.1 keep-alive requests are remembered, with a Content-Length or without a body; anything else, and
any head that is not known to the last byte, goes through the parser. A handler may say how to answer the same head with
another body (`Repeat`): what it made of the head is then remembered as well.
"""

from __future__ import annotations

from typing import Final

import msgspec

from headwater.http.request import Request
from headwater.http.responses import Repeat

HEAD_MAX_BYTES: Final = 1024
KNOWN_MAX: Final = 4096
_ONCE_ONLY: Final = (b"producer-seq", b"stream-seq", b"if-none-match", b"transfer-encoding", b"expect", b"upgrade")
"""Headers that make a head unlike the next one, or that need the parser."""


class KnownHead(msgspec.Struct):
    head: bytes
    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body_bytes: int
    operation: str = ""
    repeat: Repeat | None = None
    """How requests with this head are answered, and counted as which operation, once the first one was."""
    owner: int = -1
    """Set: they are relayed to this worker."""


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
        """Forget how requests are answered: where a stream is has changed."""
        self._heads.clear()

    def remember(self, data: bytes, request: Request) -> None:
        """Keep the head of a request that arrived as exactly `data`."""
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
