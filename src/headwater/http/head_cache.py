"""A cache of parsed request heads.

A client that appends or polls sends the same head repeatedly, byte for byte. The result of parsing it is cached, so
that the next time the head is looked up instead of parsed: the same bytes at the start of a message always mean the
same request. This saves about 40 % of the time of a small append (see `docs/decisions.md`).

Only complete HTTP/1.1 keep-alive requests are cached, with a Content-Length or without a body; all others, and heads
that differ in any byte, are parsed. A handler may return how to process the same head with another body (`Repeat`),
which is then cached as well.

A client that appends to many streams sends the same headers after many request lines. So the headers of appends are
cached separately, and the name in the request line is only compared with the names of streams. The headers of a
producer differ in each request: they are cached without their values, which are read from each request.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from headwater.core.producers import ProducerHeaders
from headwater.http.bounded_cache import BoundedCache
from headwater.http.request import Request
from headwater.http.responses import Repeat, RepeatFor

HEAD_MAX_BYTES: Final = 1024
"""Size of a request head that is cached."""
KNOWN_MAX: Final = 4096
"""Request heads that are cached, and as many headers of appends and of appends by producers."""
_ONCE_ONLY: Final = (b"stream-seq", b"if-none-match", b"transfer-encoding", b"expect", b"upgrade")
"""Headers that change with each request, or that need the parser."""
_APPEND: Final = re.compile(rb"(POST) (/v1/stream/([\w.~!$&'()*+,;=:@-][\w.~!$&'()*+,;=:@/-]{0,199})) HTTP/1\.1\r\n")
"""The request line of an append to a stream whose name is in the path as it is. A path that begins with two slashes or
needs to be decoded, and a query, do not match."""
_PRODUCER_LINES: Final = (b"\r\nProducer-Id: ", b"\r\nproducer-id: ")
_PRODUCER: Final = re.compile(
    rb"\r\n[Pp]roducer-[Ii]d: ([!-~]{1,256})"
    rb"\r\n[Pp]roducer-[Ee]poch: ([0-9]{1,15})"
    rb"\r\n[Pp]roducer-[Ss]eq: ([0-9]{1,15})(?=\r\n[^ \t])"
)
"""The headers of a producer, one directly after the other. (A line that continues one begins with a space or tab.)"""
PRODUCER_HEADERS: Final = (b"producer-id", b"producer-epoch", b"producer-seq")
_END_OF_HEAD: Final = b"\r\n\r\n"


class HeadGeneration:
    """All heads that became known since the location of a stream changed."""

    __slots__ = ("is_current",)

    def __init__(self) -> None:
        self.is_current = True


class KnownHead(msgspec.Struct):
    """A head that was parsed before, and what the first request with it has shown."""

    head: bytes
    size: int
    """The size of a request with this head."""
    generation: HeadGeneration
    """It is no longer valid if this is not the current one."""
    request: Request
    """The request without its body. It is shared, so nobody may change it."""
    operation: str = ""
    repeat: Repeat | None = None
    """How requests with this head are processed; set, like `operation`, by the first one."""
    owner: int = -1
    """The worker to which they are relayed; -1 if they are not."""

    def request_with(self, body: bytes) -> Request:
        request = self.request
        return Request(request.method, request.target, request.headers, body, False, True)


class AppendHeaders(msgspec.Struct, frozen=True):
    """The headers of appends that differ only in the stream, the body, and the values of a producer."""

    headers: dict[bytes, bytes]
    body_bytes: int
    operation: str
    repeat_for: RepeatFor


class HeadCache:
    def __init__(self, is_local: Callable[[str], bool] | None = None) -> None:
        self.heads: BoundedCache[bytes, KnownHead] = BoundedCache(KNOWN_MAX)
        self._append_headers: BoundedCache[bytes, AppendHeaders] = BoundedCache(KNOWN_MAX)
        self._producer_headers: BoundedCache[bytes, AppendHeaders] = BoundedCache(KNOWN_MAX)
        """Without the lines of the producer."""
        self._is_local = is_local
        """Whether the stream with this name is in this process; None if all streams are."""
        self._generation = HeadGeneration()

    def find(self, data: bytes) -> KnownHead | None:
        """The head of `data`, if that is exactly one request whose head is known."""
        end = data.find(_END_OF_HEAD) + len(_END_OF_HEAD)
        head = data[:end]
        known = self.heads.get(head)
        if known is None:
            line = _APPEND.match(head)
            if line is not None:
                known = self._find_append(head, line)
        return known if known is not None and len(data) == known.size else None

    def _find_append(self, head: bytes, line: re.Match[bytes]) -> KnownHead | None:
        """The head of an append whose headers are known."""
        name = line[3].decode()
        if len(head) > HEAD_MAX_BYTES or (self._is_local is not None and not self._is_local(name)):
            return None
        block = head[line.end() - 2 :]
        lines = producer = None
        fields = self._append_headers.get(block)
        if fields is None:
            lines = _producer_lines(block)
            fields = self._producer_headers.get(_without(block, lines)) if lines is not None else None
            if lines is None or fields is None:
                return None
            producer = ProducerHeaders(lines[1].decode(), int(lines[2]), int(lines[3]))
        repeat = fields.repeat_for(name, producer)
        if repeat is None:
            return None
        headers = fields.headers
        if lines is not None:
            headers = {**headers, b"producer-id": lines[1], b"producer-epoch": lines[2], b"producer-seq": lines[3]}
        request = Request(line[1], line[2], headers, b"", False, True)
        size = len(head) + fields.body_bytes
        known = KnownHead(head, size, self._generation, request, fields.operation, repeat)
        if producer is None:
            self.heads.put(head, known)
        return known

    def clear(self) -> None:
        """Clear the cache, because the location of a stream has changed. Connections that keep a head notice it."""
        self._generation.is_current = False
        self._generation = HeadGeneration()
        self.heads.clear()
        self._append_headers.clear()
        self._producer_headers.clear()

    def remember(self, data: bytes, request: Request) -> KnownHead | None:
        """Cache the head of a request that was received as exactly `data`, if it may be sent again."""
        headers = request.headers
        if request.http_1_0 or not request.keep_alive or b"?" in request.target:
            return None
        end = data.find(_END_OF_HEAD) + len(_END_OF_HEAD)
        if end > HEAD_MAX_BYTES or len(data) - end != len(request.body):
            return None
        if request.body and int(headers.get(b"content-length", b"-1")) != len(request.body):
            return None
        if any(name in headers for name in _ONCE_ONLY):
            return None
        head = data[:end]
        shared = Request(request.method, request.target, headers, b"", False, True)
        known = KnownHead(head, len(data), self._generation, shared)
        if b"producer-seq" not in headers:
            self.heads.put(head, known)
        return known

    def remember_headers(self, known: KnownHead, repeat_for: RepeatFor) -> None:
        """Cache the headers of an append separately, because appends to other streams may have the same."""
        line = _APPEND.match(known.head)
        if line is None or known.generation is not self._generation:
            return
        headers = known.request.headers
        fields = AppendHeaders(headers, known.size - len(known.head), known.operation, repeat_for)
        block = known.head[line.end() - 2 :]
        if b"producer-seq" not in headers:
            self._append_headers.put(block, fields)
            return
        lines = _producer_lines(block)
        if lines is not None and lines.groups() == tuple(headers[name] for name in PRODUCER_HEADERS):
            self._producer_headers.put(_without(block, lines), fields)


def _producer_lines(block: bytes) -> re.Match[bytes] | None:
    """The lines with the headers of a producer, if they have the usual form."""
    at = block.find(_PRODUCER_LINES[0])
    if at < 0:
        at = block.find(_PRODUCER_LINES[1])
    return _PRODUCER.match(block, at) if at >= 0 else None


def _without(block: bytes, lines: re.Match[bytes]) -> bytes:
    return block[: lines.start()] + block[lines.end() :]
