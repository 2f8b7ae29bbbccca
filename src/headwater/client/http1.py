"""HTTP/1.1 without I/O: encode requests, and parse responses. Both transports use it.

Invariant: no part of a request can break its head (none has CR, LF or NUL), and a response is `complete` only when its
whole body has arrived.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

import httptools

from headwater.client.errors import InvalidRequestError, MalformedResponseError

HEAD_MAX_BYTES: Final = 64 * 1024
_FORBIDDEN: Final = re.compile(r"[\r\n\0]")
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_PATH_SAFE: Final = "/-._~!$&'()*+,;=:@%"
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """The target of a connection: requests to one origin share connections."""

    scheme: str
    host: str
    port: int
    authority: str
    """For the `Host` header."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


@functools.lru_cache(maxsize=1024)
def split_url(url: str) -> tuple[Origin, str]:
    """Split a URL into its origin, and the path and query that are sent."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidRequestError(f"{url!r} is not a valid URL: {error}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidRequestError(f"{url!r} is not a valid URL: it must begin with http:// or https:// and name a host")
    if parts.username is not None or _FORBIDDEN.search(url):
        raise InvalidRequestError(f"{url!r} is not a valid URL: it has a user name or control characters")
    host = parts.hostname
    authority = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode("ascii")
    target = quote(parts.path or "/", safe=_PATH_SAFE)
    if parts.query:
        target += "?" + quote(parts.query, safe=_PATH_SAFE + "?[]")
    return Origin(parts.scheme, host, port or _PORTS[parts.scheme], authority), target


Body = bytes | Iterable[bytes]


def encode_head(
    method: str, origin: Origin, target: str, headers: Mapping[str, str], content_length: int | None
) -> bytes:
    """The head of a request. `content_length` of None announces a chunked body."""
    lines = [f"{method} {target} HTTP/1.1\r\nHost: {origin.authority}\r\n"]
    for name, value in headers.items():
        if _FORBIDDEN.search(value) or not _TOKEN.fullmatch(name):
            raise InvalidRequestError(f"header {name!r} cannot be sent: its name or value has forbidden characters")
        lines.append(f"{name}: {value}\r\n")
    if content_length is None:
        lines.append("Transfer-Encoding: chunked\r\n\r\n")
    elif content_length or method in {"POST", "PUT", "PATCH"}:
        lines.append(f"Content-Length: {content_length}\r\n\r\n")
    else:
        lines.append("\r\n")
    try:
        return "".join(lines).encode("latin-1")
    except UnicodeEncodeError:
        raise InvalidRequestError("a header value has characters that HTTP headers cannot carry") from None


def encode_chunks(body: Iterable[bytes]) -> Iterable[bytes]:
    """Encode a body of unknown length in the chunked coding."""
    for piece in body:
        if piece:
            yield b"%x\r\n%b\r\n" % (len(piece), piece)
    yield b"0\r\n\r\n"


class HttpResponse:
    """A response as it arrives. Header names are in lower case."""

    __slots__ = ("chunks", "complete", "headers", "keep_alive", "status")

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers
        self.chunks: list[bytes] = []
        self.complete = False
        self.keep_alive = True

    @property
    def body(self) -> bytes:
        """The whole body, of a complete response."""
        chunks = self.chunks
        if len(chunks) > 1:
            self.chunks = chunks = [b"".join(chunks)]
        return chunks[0] if chunks else b""

    def take(self) -> bytes:
        """The part of the body that has arrived since the last call."""
        taken = self.body
        self.chunks = []
        return taken


class ResponseParser:
    """Parses the bytes of one connection to responses, in the order of the requests.

    `responses` holds each response from the moment its head is complete until it is taken; the last one may still be
    incomplete, and grows as more bytes are fed.
    """

    __slots__ = ("_current", "_head_bytes", "_headers", "_is_head", "_parser", "responses")

    def __init__(self) -> None:
        self.responses: deque[HttpResponse] = deque()
        self._current: HttpResponse | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._is_head = False
        self._parser = httptools.HttpResponseParser(self)

    def expect_head(self) -> None:
        """Note that the next response is to a HEAD request: it has no body, even if its headers declare one."""
        self._is_head = True

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise MalformedResponseError(f"the server does not speak HTTP/1.1: {error}") from None

    def feed_end(self) -> bool:
        """Note that the connection ended; return whether that completed a response without a length."""
        last = self._current
        if last is None or last.complete or "content-length" in last.headers or "transfer-encoding" in last.headers:
            return False
        last.complete, last.keep_alive = True, False
        return True

    # -- called by the parser --------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_MAX_BYTES:
            raise MalformedResponseError("the headers of the response are too long")
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        known = self._headers.get(key)
        self._headers[key] = text if known is None else f"{known}, {text}"

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers, self._head_bytes = self._headers, {}, 0
        if status < 200:
            return
        response = HttpResponse(status, headers)
        response.keep_alive = self._parser.should_keep_alive()
        self._current = response
        self.responses.append(response)
        if self._is_head:
            # The parser would wait for a body. No bytes follow, because requests after HEAD wait for its response.
            response.complete, self._is_head = True, False
            response.keep_alive = headers.get("connection", "").lower() != "close"
            self._parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        if self._current is not None:
            self._current.chunks.append(data)

    def on_message_complete(self) -> None:
        if self._current is not None:
            self._current.complete = True
