"""Parse received bytes into requests, within the limits.

httptools parses; this class counts what it does not report (a header or trailer line that never ends), reserves memory
for bodies, and forwards the body of an upload while it arrives. It never calls a handler: complete requests go to the
connection's queue. The first violation sets `refusal`, and everything after it is discarded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Final, Protocol, TypeAlias

import httptools
import msgspec

from headwater.core.errors import BadRequest, InternalError, MethodNotAllowed, PayloadTooLarge, Refusal
from headwater.core.http_errors import (
    HeadersTooLarge,
    Overloaded,
    RequestTimeout,
    UnsupportedHttpVersion,
    UnsupportedTransferCoding,
    UrlTooLong,
)
from headwater.engine.uploads import FULL_BYTES, BlobUpload
from headwater.http.flow import ByteBudget
from headwater.http.headers import ALLOWED_METHODS
from headwater.http.request import Request, UploadRequest
from headwater.http.states import (
    BEGIN,
    BODY,
    CLOSE,
    HEAD,
    HEAD_COMPLETE,
    IDLE,
    READING,
    REFUSE,
    REFUSED,
    REQUEST_COMPLETE,
)

_NO_HEADERS: Final[dict[bytes, bytes]] = {}
_VERSIONS: Final = frozenset(("1.1", "1.0"))
_ABSOLUTE: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]+)(.*)", re.DOTALL)
UNCOUNTED_BODY_BYTES: Final = 16 * 1024
"""A body up to this size is not counted in the budget, unless its request waits for others of its connection."""
BODY_PROGRESS_BYTES: Final = 16
"""The read timeout restarts each time that this much of a body was received."""
UPLOAD_PROGRESS_BYTES: Final = 64 * 1024
"""The same for an upload, which is a file and not a stream of events."""
BULK_MIN_BYTES: Final = 64 * 1024
"""A body bypasses the parser if at least this much of it is still missing."""
BULK_AHEAD: Final = 16
"""Memory is allocated for at most this multiple of what was received: a Content-Length alone does not allocate it."""
BULK_STEP_BYTES: Final = 4 * 1024 * 1024
"""Memory that is allocated at a time: clearing it takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class ParserLimits:
    max_header_bytes: int
    max_url_bytes: int
    max_body_bytes: int
    read_timeout_s: float


HeadCheck: TypeAlias = Callable[[bytes, bytes, Mapping[bytes, bytes]], Refusal | None]
"""Given method, target and headers: why a request is refused, or None."""


class RequestSink(Protocol):
    """The part of the connection that the parser uses."""

    def on_request(self, request: Request) -> None: ...

    def on_expect_continue(self) -> None:
        """Send `100 Continue`: the client waits for it before it sends the body."""

    def begin_upload(self, head: Request) -> BlobUpload | None:
        """The upload for the body of a request, or None if it is kept in memory. Raises a refusal."""

    def on_upload_ahead(self) -> None:
        """Stop reading: the upload is ahead of the disk."""


class RequestParser:
    """Parses the requests of one connection."""

    __slots__ = (
        "_body",
        "_body_buffer",
        "_body_bytes",
        "_bulk",
        "_check_head",
        "_chunked_quiet_bytes",
        "_head_raw_bytes",
        "_headers",
        "_limits",
        "_message",
        "_method",
        "_parser",
        "_progress_bytes",
        "_reserved",
        "_sink",
        "_target",
        "_upgrading",
        "budget",
        "head_bytes",
        "now_s",
        "refusal",
        "since_s",
        "state",
        "upload",
    )

    def __init__(self, limits: ParserLimits, budget: ByteBudget, check_head: HeadCheck, sink: RequestSink) -> None:
        self._limits = limits
        self.budget = budget
        self._check_head = check_head
        self._sink = sink
        self._parser: httptools.HttpRequestParser = None  # type: ignore[assignment]
        """Created for the first input: a connection whose requests are all in the head cache needs none."""
        self.state = IDLE
        self.refusal: Refusal | None = None
        self.now_s = 0.0
        self.since_s = 0.0
        """When the request that is being read began or last made progress."""
        # Per request being read.
        self._message = 0
        """Counts requests, to detect whether one piece of input belongs to a single request."""
        self._upgrading = False
        self._method = b""
        """Set when the head is complete."""
        self._target = b""
        self._headers = _NO_HEADERS
        self.head_bytes = 0
        """Bytes of the head that the parser has reported: the target and complete header lines."""
        self._head_raw_bytes = 0
        """Bytes of input that belong to this head, reported or not."""
        self._chunked_quiet_bytes = 0
        """Bytes received within the body since its last data: chunk extensions and trailers."""
        self._body = b""
        """The body while it is in one piece."""
        self._body_buffer: BytesIO | None = None
        """The body if it has several pieces: it grows as they arrive, and its value is taken without a copy."""
        self._bulk: memoryview | None = None
        """The memory of that buffer, while it is filled from the socket."""
        self._body_bytes = 0
        self._progress_bytes = 0
        self._reserved = 0
        self.upload: BlobUpload | None = None
        """The upload that receives the body, if it is not kept in memory."""

    # -- for the connection ----------------------------------------------------------------------------------------

    def feed(self, data: bytes, now_s: float) -> None:
        """Parse received data. Complete requests are passed to the sink."""
        if self.state is REFUSED:
            return  # Discarded until the client has read the response.
        self.now_s = now_s
        began_in, message = self.state, self._message
        rest: bytes | memoryview = data
        while len(rest):
            if not self._parser:  # type: ignore[truthy-bool]
                self._parser = httptools.HttpRequestParser(self)
            try:
                self._parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as offer:
                rest = memoryview(rest)[offer.args[0] :]
                self._read_without_upgrade()
            except httptools.HttpParserError as error:
                self._refuse_invalid(error)
                break
            if self.refusal is not None:
                break
        if self.state is began_in and message == self._message and self.refusal is None:
            self._count_unreported(len(data))

    def takes_bulk(self) -> bool:
        """Whether a body of known length follows, which is cheap to parse at any size."""
        return self.state is BODY and b"transfer-encoding" not in self._headers

    def missing_bytes(self) -> int:
        """The rest of a body of known length."""
        return self._body_length() - self._body_bytes

    def refuse(self, refusal: Refusal) -> None:
        """Read no more requests; only the first refusal is kept."""
        if self.refusal is None:
            self.refusal = refusal
            self.state = READING[self.state][REFUSE]
            self._discard()

    def rest(self) -> None:
        """Free the memory that is only needed for the next request, if none is being read."""
        if self.state is IDLE:
            self._parser = None  # type: ignore[assignment]
            self._headers = _NO_HEADERS

    def close(self) -> None:
        """End with the connection: drop the reference cycles, so that no garbage collection is needed."""
        self.state = READING[self.state][CLOSE]
        self._discard()
        self._parser = self._sink = None  # type: ignore[assignment]

    def check_time(self, now_s: float) -> None:
        """Refuse a request that arrives too slowly."""
        if self.upload is not None and self.upload.is_full:
            self.since_s = now_s  # The disk is slow, not the client.
        elif now_s - self.since_s > self._limits.read_timeout_s:
            limit = self._limits.read_timeout_s
            self.refuse(
                RequestTimeout(
                    f"The request did not arrive within {limit:g} s (server.read_timeout_secs); send it again."
                )
            )

    def refused_request(self) -> Request:
        """The known part of a request that was refused while it was being read."""
        return Request(self._method, self._target, self._headers, b"", http_1_0=False, keep_alive=False)

    # -- large bodies, bypassing httptools -------------------------------------------------------------------------

    def begin_bulk(self) -> bool:
        """Prepare to receive the rest of the body that is being read, if it is large and of known length."""
        return (
            self.state is BODY
            and self.upload is None
            and not self._upgrading
            and b"transfer-encoding" not in self._headers
            and self.missing_bytes() >= BULK_MIN_BYTES
            and self._body_bytes * (BULK_AHEAD - 1) >= BULK_MIN_BYTES
            and self._prepare_bulk()
        )

    def bulk_buffer(self) -> memoryview | None:
        """The buffer for more of the body: empty if `continue_bulk` must be called, None if the body is discarded."""
        return self._bulk[self._body_bytes :] if self._bulk is not None else None

    def receive_bulk(self, size: int, now_s: float) -> None:
        """Count bytes that were received into the buffer."""
        if self._bulk is not None:
            self.now_s = now_s
            self._body_bytes += size
            self._note_progress(size, BODY_PROGRESS_BYTES)

    def continue_bulk(self) -> bool:
        """Continue after the buffer is full. True if there is more space, False if the request is complete or
        refused."""
        self._bulk = None
        if self._body_bytes == self._body_length():
            self.on_message_complete()
            # It still waits for this body.
            self._parser = None  # type: ignore[assignment]
            return False
        if self._prepare_bulk():
            return True
        self.refuse(overloaded())
        return False

    def _prepare_bulk(self) -> bool:
        size = min(self._body_length(), self._body_bytes * BULK_AHEAD, self._body_bytes + BULK_STEP_BYTES)
        if not self._reserve(size):
            return False
        buffer = self._body_buffer
        if buffer is None:
            buffer = self._body_buffer = BytesIO()
            buffer.write(self._body)
            self._body = b""
        buffer.seek(size - 1)
        buffer.write(b"\0")
        self._bulk = buffer.getbuffer()
        return True

    def _body_length(self) -> int:
        return int(self._headers.get(b"content-length", b"0"))

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.state = READING[self.state][BEGIN]
        self._message += 1
        self._method = self._target = b""
        self._headers = {}
        self.head_bytes = self._head_raw_bytes = self._chunked_quiet_bytes = 0
        self._body = b""
        self._body_buffer = None
        self._body_bytes = self._progress_bytes = 0
        self.since_s = self.now_s

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self._limits.max_url_bytes:
            self.refuse(self._url_too_long())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head_bytes += len(name) + len(value)
        if self.head_bytes > self._limits.max_header_bytes:
            self.refuse(self._headers_too_large())
            return
        if self.state is not HEAD:
            return  # A trailer must not change what was checked in the head (RFC 9110 §6.5.1).
        key = name.lower()
        value = value.strip(b" \t")
        if key in self._headers:
            if key == b"host":
                self.refuse(BadRequest("The request has more than one Host header; send one."))
                return
            value = self._headers[key] + b", " + value
        self._headers[key] = value

    def on_headers_complete(self) -> None:
        if self.refusal is not None:
            return
        self.state = READING[self.state][HEAD_COMPLETE]
        headers = self._headers
        self._method = self._parser.get_method()
        version = self._parser.get_http_version()
        if version not in _VERSIONS:
            self.refuse(UnsupportedHttpVersion(f"HTTP/{version} is not supported; use HTTP/1.1."))
            return
        if self._target[:1] != b"/":
            self._take_absolute_target()
        refusal = self._check_head(self._method, self._target, headers)
        if refusal is not None:
            self.refuse(refusal)
            return
        if b"transfer-encoding" in headers and not self._check_transfer_coding(headers[b"transfer-encoding"]):
            return
        # Compare the prefix first, which takes a fifth of the time of the search.
        if self._target[:4] == b"/ds/" and b"/snapshot/" in self._target and not self._begin_upload():
            return
        length = headers.get(b"content-length")
        if length is not None and self.upload is None and int(length) > self._limits.max_body_bytes:
            self.refuse(self._body_too_large())
            return
        if self._parser.should_upgrade():
            self._upgrading = True
            return
        expect = headers.get(b"expect")
        if expect is not None and expect.lower() == b"100-continue" and self._parser.get_http_version() != "1.0":
            self._sink.on_expect_continue()

    def on_body(self, body: bytes) -> None:
        if self.refusal is not None:
            return
        size = len(body)
        self._chunked_quiet_bytes = -1
        self._body_bytes += size
        upload = self.upload
        self._note_progress(size, BODY_PROGRESS_BYTES if upload is None else UPLOAD_PROGRESS_BYTES)
        if upload is not None:
            self._write_upload(upload, body)
        elif self._body_bytes > self._limits.max_body_bytes:
            self.refuse(self._body_too_large())
        elif self._body_bytes > UNCOUNTED_BODY_BYTES and not self._reserve(self._body_bytes):
            self.refuse(overloaded())
        else:
            self._add_to_body(body)

    def on_message_complete(self) -> None:
        if self.refusal is not None or self._upgrading:
            return
        self.state = READING[self.state][REQUEST_COMPLETE]
        body = self._body if self._body_buffer is None else self._body_buffer.getvalue()
        parser = self._parser
        request = Request(
            self._method,
            self._target,
            self._headers,
            body,
            parser.get_http_version() == "1.0",
            parser.should_keep_alive(),
            self._reserved,
        )
        self._reserved = 0
        self._body = b""
        self._body_buffer = None
        if self.upload is not None:
            request = UploadRequest(**msgspec.structs.asdict(request), upload=self.upload)
            self.upload = None
        self._sink.on_request(request)

    # -- implementation --------------------------------------------------------------------------------------------

    def _count_unreported(self, size: int) -> None:
        """Count input within one head or body that the parser has not reported, such as a line that never ends."""
        if self.state is HEAD:
            self._head_raw_bytes += size
            if not self._target and self._head_raw_bytes > self._limits.max_url_bytes:
                self.refuse(self._url_too_long())
            elif self._head_raw_bytes > self._limits.max_header_bytes + self._limits.max_url_bytes:
                self.refuse(self._headers_too_large())
        elif self.state is BODY:
            if self._chunked_quiet_bytes < 0:
                self._chunked_quiet_bytes = 0  # It contained data.
                return
            self._chunked_quiet_bytes += size
            if self._chunked_quiet_bytes > self._limits.max_header_bytes:
                self.refuse(self._headers_too_large())

    def _take_absolute_target(self) -> None:
        """Treat a target that is a complete URL as its path, and its host as the Host header (RFC 9112 §3.2.2): what is
        checked and what is used later must be the same host."""
        found = _ABSOLUTE.fullmatch(self._target)
        if found is not None and b"host" in self._headers:
            host, path = found.groups()
            self._headers[b"host"] = host
            self._target = path if path.startswith(b"/") else b"/" + path

    def _check_transfer_coding(self, value: bytes) -> bool:
        """Refuse codings other than `chunked`, and any in HTTP/1.0, which has none (RFC 9112 §6.1)."""
        if self._parser.get_http_version() == "1.0":
            self.refuse(
                BadRequest("An HTTP/1.0 request cannot have a Transfer-Encoding; use HTTP/1.1, or Content-Length.")
            )
        elif value.strip().lower() != b"chunked":
            self.refuse(
                UnsupportedTransferCoding(
                    f"Transfer-Encoding {value.decode('latin-1')!r} is not supported; use chunked."
                )
            )
        return self.refusal is None

    def _read_without_upgrade(self) -> None:
        """Ignore an upgrade offer: parse the request again without it.

        The parser stops at an offer and does not parse the body, so a new parser gets the head without the offer. The
        version and the rest of `Connection` stay: they decide how the response is framed and when the connection ends.
        """
        self._upgrading = False
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.refuse(
                MethodNotAllowed(
                    "This server is not a proxy; remove it from the proxy settings of the client.",
                    (("Allow", ALLOWED_METHODS),),
                )
            )
            return
        kept = {name: value for name, value in self._headers.items() if name != b"upgrade"}
        options = kept.pop(b"connection", b"").split(b",")
        kept[b"connection"] = b",".join(option for option in options if option.strip().lower() != b"upgrade")
        version = self._parser.get_http_version().encode()
        head = b"%b %b HTTP/%b\r\n" % (method, self._target, version)
        fields = b"".join(b"%b: %b\r\n" % field for field in kept.items())
        if self.upload is not None:
            self.upload.abandon()
            self.upload = None
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(head + fields + b"\r\n")
        except httptools.HttpParserError as error:
            self._refuse_invalid(error)

    def _refuse_invalid(self, error: httptools.HttpParserError) -> None:
        """Refuse what httptools cannot parse. An error in a callback is a defect of the server, not of the request."""
        if isinstance(error, httptools.HttpParserCallbackError):
            refusal: Refusal = InternalError("An unexpected error occurred in the server; its log has the details.")
            refusal.__cause__ = error.__context__
        else:
            refusal = BadRequest(f"The request is not valid HTTP; correct the client: {error}.")
        self.refuse(refusal)

    def _begin_upload(self) -> bool:
        """Decide where the body is stored; False if it is refused."""
        head = Request(self._method, self._target, self._headers, b"", False, True)
        try:
            self.upload = self._sink.begin_upload(head)
        except Refusal as refusal:
            self.refuse(refusal)
            return False
        if self.upload is not None:
            # It waits in memory while the disk is slow.
            length = self._body_length() if b"content-length" in self._headers else FULL_BYTES
            if length > UNCOUNTED_BODY_BYTES and not self._reserve(min(length, FULL_BYTES)):
                self.refuse(overloaded())
                return False
        return True

    def _write_upload(self, upload: BlobUpload, body: bytes) -> None:
        try:
            upload.write(body)
        except Refusal as refusal:
            self.refuse(refusal)
            return
        if upload.is_full:
            self._sink.on_upload_ahead()

    def _add_to_body(self, body: bytes) -> None:
        if self._body_buffer is not None:
            self._body_buffer.write(body)
        elif self._body:
            self._body_buffer = BytesIO()
            self._body_buffer.write(self._body)
            self._body_buffer.write(body)
        else:
            self._body = body

    def _note_progress(self, size: int, progress_bytes: int) -> None:
        self._progress_bytes += size
        if self._progress_bytes >= progress_bytes:
            self._progress_bytes = 0
            self.since_s = self.now_s

    def _reserve(self, size: int) -> bool:
        if not self.budget.take(size - self._reserved):
            return False
        self._reserved = size
        return True

    def _discard(self) -> None:
        """Discard the request that was being read."""
        self._body = b""
        self._body_buffer = self._bulk = None
        self.budget.release(self._reserved)
        self._reserved = 0
        if self.upload is not None:
            self.upload.abandon()
            self.upload = None

    def _url_too_long(self) -> Refusal:
        return UrlTooLong(
            f"The URL is longer than {self._limits.max_url_bytes} bytes (http.max_url_bytes); shorten it."
        )

    def _headers_too_large(self) -> Refusal:
        limit = self._limits.max_header_bytes
        return HeadersTooLarge(f"The headers are larger than {limit} bytes (http.max_header_bytes); send fewer.")

    def _body_too_large(self) -> Refusal:
        limit = self._limits.max_body_bytes
        return PayloadTooLarge(f"The body is larger than {limit} bytes (http.max_body_bytes); send several requests.")


def overloaded() -> Refusal:
    return Overloaded("Too many requests are in memory; retry later.", (("Retry-After", "1"),))
