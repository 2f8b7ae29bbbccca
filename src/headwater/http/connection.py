"""One HTTP/1.1 connection: bytes in, requests to the router, responses out in order.

httptools parses; this class keeps the limits while it does, holds pipelined requests back until the one before them is
answered, and never buffers more than a slice of a response for a reader that is slow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import httptools
import msgspec

from headwater.core.errors import (
    BadRequest,
    HeadersTooLarge,
    InternalError,
    MethodNotAllowed,
    Refusal,
    RequestTimeout,
    TooLarge,
    UrlTooLong,
)
from headwater.http.request import Request, UploadRequest
from headwater.http.response import ALLOWED_METHODS, CONTINUE, NO_CONTENT, NOT_MODIFIED, OK, problem

if TYPE_CHECKING:
    from headwater.engine.uploads import BlobUpload
    from headwater.http.app import App

log = logging.getLogger("headwater.http")

PIPELINE_MAX: Final = 32
"""Requests parsed ahead of their turn; beyond this the socket is not read."""
UPLOAD_PROGRESS_BYTES: Final = 64 * 1024
"""An upload must bring this much within the read time-out, again and again."""
LINGER_S: Final = 2.0
"""How long the rest of a refused request is discarded before the connection is cut."""
_BODILESS: Final = frozenset((NO_CONTENT, NOT_MODIFIED))
_CLOSE: Final = b"Connection: close\r\n"
_KEEP_ALIVE: Final = b"Connection: keep-alive\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"

Buffer = bytes | memoryview


class LiveResponse(Protocol):
    """A response that goes on: told when the socket can take more, and when it is over."""

    def writable(self) -> None: ...

    def drain(self) -> None:
        """The server is stopping: end cleanly."""

    def disconnected(self) -> None: ...


class Connection(asyncio.Protocol):
    """The protocol of one socket, from accept to close."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_head_bytes",
        "_head_done",
        "_headers",
        "_in_message",
        "_lingering",
        "_parser",
        "_pending",
        "_reading_paused",
        "_refused",
        "_since_s",
        "_slices",
        "_target",
        "_upgrading",
        "_upload",
        "_whole",
        "app",
        "busy",
        "closing",
        "live",
        "operation",
        "paused",
        "request",
        "transport",
    )

    def __init__(self, app: App) -> None:
        # Global.
        self.app = app
        # Per connection.
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request] = deque()
        self._reading_paused = False
        self.paused = False
        self.closing = False
        self._lingering = False
        self._since_s = 0.0
        """When the connection last changed between idle, reading, and waiting for the reader."""
        # Per request being read.
        self._in_message = False
        self._head_done = False
        self._upgrading = False
        self._whole = b""
        """What was received, while it began with this request."""
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._upload: BlobUpload | None = None
        """Where the body goes while it arrives, if it is not held until it is whole."""
        self._refused: Refusal | None = None
        # Per request being answered.
        self.busy = False
        self.request: Request = None  # type: ignore[assignment]
        self.operation = "unknown"
        self.live: LiveResponse | None = None
        self._slices: Iterator[Buffer] | None = None

    # -- asyncio ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._since_s = self.app.now_s
        self.app.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._abandon_uploads()
        self._pending.clear()
        self._slices = None
        self.app.lost(self)
        if self.live is not None:
            live, self.live = self.live, None
            live.disconnected()

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return  # Discarded until the client has seen the answer.
        if not self._in_message:
            if not self.busy:
                request = self.app.known_heads.request(data)
                if request is not None:
                    self._since_s = self.app.now_s
                    self._dispatch(request)
                    return
            self._whole = data
        else:
            self._whole = b""
        began_earlier = self._in_message and not self._head_done
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            if self._refused is None:
                self._refused = BadRequest(f"The request is not valid HTTP: {error}.")
        if began_earlier and not self._head_done:
            # A header line that never ends is invisible to the callbacks: count raw bytes too.
            self._head_bytes += len(data)
            self._check_head()
        if self._refused is not None:
            self._refuse_while_reading()

    def eof_received(self) -> bool:
        # A client that half-closes still gets the answer to what it sent; one that waits for more looks like one
        # that went away, and is let go.
        return self.live is None and (self.busy or bool(self._pending))

    def pause_writing(self) -> None:
        self.paused = True
        self._since_s = self.app.now_s

    def resume_writing(self) -> None:
        self.paused = False
        self._since_s = self.app.now_s
        if self._slices is not None:
            self._send_slices()
        elif self.live is not None:
            self.live.writable()

    # -- httptools -------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_message = True
        self._head_done = False
        self._target = b""
        self._headers = {}
        self._head_bytes = 0
        self._body = []
        self._body_bytes = 0
        if not self.busy:
            self._since_s = self.app.now_s

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self.app.max_url_bytes:
            self._refused = UrlTooLong(f"The URL is longer than {self.app.max_url_bytes} bytes.")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self.app.max_header_bytes:
            self._check_head()
            return
        if self._head_done:
            return  # A trailer: what was checked in the head must not be changed behind its back (RFC 9110 §6.5.1).
        key = name.lower()
        value = value.strip(b" \t")
        if key in self._headers:
            if key == b"host":
                self._refused = BadRequest("More than one Host header.")
                return
            value = self._headers[key] + b", " + value
        self._headers[key] = value

    def on_headers_complete(self) -> None:
        self._head_done = True
        headers = self._headers
        # The prefix first: it is compared in a fifth of the time that the search takes.
        is_upload = self._target[:4] == b"/ds/" and b"/snapshot/" in self._target
        if is_upload and self._refused is None and not self._begin_upload():
            return
        length = headers.get(b"content-length")
        if length is not None and self._upload is None and int(length) > self.app.max_body_bytes:
            self._refused = self._body_too_large()
            return
        if self._parser.should_upgrade():
            self._upgrading = True
            return
        expect = headers.get(b"expect")
        if expect is not None and expect.lower() == b"100-continue" and not self.busy and self._refused is None:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._upload is not None:
            self._pass_on(body)
            return
        if self._body_bytes > self.app.max_body_bytes:
            if self._refused is None:
                self._refused = self._body_too_large()
            self._body = []
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._refused is not None or self._upgrading:
            return
        self._in_message = False
        body = self._body
        parser = self._parser
        request = Request(
            parser.get_method(),
            self._target,
            self._headers,
            body[0] if len(body) == 1 else b"".join(body),
            parser.get_http_version() == "1.0",
            parser.should_keep_alive(),
        )
        if self._upload is not None:
            request = UploadRequest(**msgspec.structs.asdict(request), upload=self._upload)
            self._upload = None
        elif self._whole:
            self.app.known_heads.remember(self._whole, request)
            self._whole = b""
        if self.busy:
            self._pending.append(request)
            if len(self._pending) >= PIPELINE_MAX:
                self._stop_reading()
            return
        self._dispatch(request)

    # -- answering -------------------------------------------------------------------------------------------------

    def reply(self, status: int, headers: bytes, body: bytes = b"") -> None:
        """Answer the current request whole."""
        request = self.request
        app = self.app
        if b"origin" in request.headers:
            head = app.common_headers.begin(status, request.headers[b"origin"])
        else:
            head = app.common_headers.beginnings[status]
        if status in _BODILESS or request.method == b"HEAD":
            length = body = b""
        else:
            length = b"Content-Length: %d\r\n" % len(body)
        if request.keep_alive and not self.closing and not request.http_1_0:
            self.transport.write(b"%b%b%b\r\n%b" % (head, headers, length, body))
        else:
            self.transport.write(b"%b%b%b%b\r\n%b" % (head, headers, length, self._connection_header(), body))
        key = (self.operation, status)
        counts = app.requests
        counts[key] = counts.get(key, 0) + 1
        if app.debug:
            self._log(status)
        self._next()

    def refuse(self, refusal: Refusal) -> None:
        """Answer the current request with an error."""
        if type(self.request) is UploadRequest:
            self.request.upload.abandon()
        headers, body = problem(refusal)
        self.reply(refusal.status, headers, body)

    def settle(self, render: Callable[[Connection, Any], None], result: object) -> None:
        """Answer with what the engine called back with: a refusal, or a result that `render` turns into a reply."""
        if self.closing and self.transport.is_closing():
            return
        try:
            if isinstance(result, Refusal):
                self.refuse(result)
            else:
                render(self, result)
        except Exception as error:
            self.failed(error)

    def reply_slices(self, status: int, headers: bytes, length: int, slices: Iterator[Buffer]) -> None:
        """Answer with a body of known length that is taken from storage as the reader drains it."""
        self._begin(status, headers + b"Content-Length: %d\r\n" % length)
        self._slices = slices
        self._send_slices()

    def begin_events(self, headers: bytes) -> None:
        """Begin a body of unknown length; `write_events` goes on with it and `end_events` ends it."""
        if self.request.http_1_0:
            self.request.keep_alive = False
            self._begin(OK, headers)
        else:
            self._begin(OK, headers + b"Transfer-Encoding: chunked\r\n")

    def end_events(self) -> None:
        self.live = None
        if not self.request.http_1_0:
            self.transport.write(_LAST_CHUNK)
        self._next()

    def abort(self) -> None:
        """Cut the connection: the only honest end of a body that cannot be completed."""
        self.closing = True
        self.transport.abort()

    def turn_away(self, refusal: Refusal) -> None:
        """Answer before anything was asked, and close."""
        self._refused = refusal
        self._refuse_while_reading()

    # -- the server's sweep ----------------------------------------------------------------------------------------

    def check_time(self, now_s: float) -> None:
        """Called about once a second: close what waited too long."""
        waited_s = now_s - self._since_s
        app = self.app
        if self.paused:
            if waited_s > app.write_timeout_s:
                app.metrics.slow_followers += 1
                self.abort()
        elif self.busy:
            return
        elif self._lingering:
            if waited_s > LINGER_S:
                self.abort()
        elif self._in_message:
            if self._upload is not None and self._upload.crowded:
                self._since_s = now_s  # It is the disk that takes its time.
            elif waited_s > app.read_timeout_s:
                self._refused = RequestTimeout(f"The request did not arrive within {app.read_timeout_s:g} s.")
                self._refuse_while_reading()
        elif waited_s > app.idle_timeout_s:
            self.close()

    def drain(self) -> None:
        """The server is stopping: finish what is under way, then close."""
        self.closing = True
        if self.live is not None:
            self.live.drain()
        elif not self.busy and not self._in_message:
            self.close()

    def close(self) -> None:
        self.closing = True
        self.transport.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _dispatch(self, request: Request) -> None:
        self.busy = True
        self.request = request
        self.operation = "unknown"
        try:
            self.app.route(self, request)
        except Refusal as refusal:
            self.refuse(refusal)
        except Exception as error:
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """A bug: say so without saying what, and log what under an id that the client can quote."""
        request_id = self.app.request_id()
        log.error("request %s failed: %s %r", request_id, self.request.method, self.request.target, exc_info=error)
        if self._slices is not None or self.live is not None:
            self.abort()
            return
        self.refuse(
            InternalError(
                "The server met an error that it did not expect. Quote the X-Request-Id when you report it.",
                (("X-Request-Id", request_id),),
            )
        )

    def _pass_over_upgrade(self, rest: bytes) -> None:
        """No other protocol is spoken here: go on with the same request as if the offer had not been made.

        The parser stops at an offer and leaves the body alone, so a new one gets the head again without it.
        """
        self._upgrading = False
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refused = MethodNotAllowed("This is not a proxy.", (("Allow", ALLOWED_METHODS),))
            return
        kept = {name: value for name, value in self._headers.items() if name not in (b"upgrade", b"connection")}
        head = b"%b %b HTTP/1.1\r\n" % (method, self._target)
        fields = b"".join(b"%b: %b\r\n" % field for field in kept.items())
        self._parser = httptools.HttpRequestParser(self)
        self._in_message = False
        self.data_received(head + fields + b"\r\n" + rest)

    def _begin(self, status: int, headers: bytes) -> None:
        head = self.app.common_headers.begin(status, self.request.headers.get(b"origin"))
        self.transport.write(b"%b%b%b\r\n" % (head, headers, self._connection_header()))
        key = (self.operation, status)
        self.app.requests[key] = self.app.requests.get(key, 0) + 1
        if self.app.debug:
            self._log(status)

    def _log(self, status: int) -> None:
        method = self.request.method.decode("latin-1")
        path = self.request.target.decode("latin-1")
        log.debug("answered", extra={"method": method, "path": path, "status": status})

    def _connection_header(self) -> bytes:
        request = self.request
        if self.closing or not request.keep_alive:
            return _CLOSE
        return _KEEP_ALIVE if request.http_1_0 else b""

    def _send_slices(self) -> None:
        slices = self._slices
        assert slices is not None
        try:
            while not self.paused and not self.transport.is_closing():
                self.transport.write(next(slices))
        except StopIteration:
            self._slices = None
            self._next()
        except Refusal as refusal:
            # The head is out: cutting the body short of its Content-Length is the only way to say it.
            log.warning("cut a response short: %s", refusal.detail)
            self._slices = None
            self.abort()

    def _next(self) -> None:
        """The current response is complete: take the next request, or close."""
        self.busy = False
        if self._refused is not None and self.operation == "malformed":
            self._linger()
            return
        if self.closing or not self.request.keep_alive:
            self.close()
            return
        if self._pending:
            request = self._pending.popleft()
            if self._reading_paused:
                self._reading_paused = False
                self.transport.resume_reading()
            self._dispatch(request)
        elif self._refused is not None:
            self._refuse_while_reading()
        else:
            self._since_s = self.app.now_s

    def _linger(self) -> None:
        """Close without a reset: a client in the middle of its body must still be able to read the answer."""
        self.closing = True
        self.busy = False
        self._in_message = False
        self._lingering = True
        self._since_s = self.app.now_s
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _begin_upload(self) -> bool:
        """Find out where the body goes; False when it need not be sent at all."""
        request = Request(self._parser.get_method(), self._target, self._headers, b"", False, True)
        try:
            self._upload = self.app.begin_upload(request, is_next=not self.busy and not self._pending)
        except Refusal as refusal:
            self._refused = refusal
            return False
        if self._upload is not None:
            self._upload.on_room = self._read_on
        return True

    def _pass_on(self, body: bytes) -> None:
        """Pass a piece of the body on, and do not read faster than it is taken."""
        upload = self._upload
        assert upload is not None
        try:
            upload.write(body)
        except Refusal as refusal:
            self._refused = refusal
            return
        if self._body_bytes >= UPLOAD_PROGRESS_BYTES:
            # The whole may take long; but a client that hardly sends is no better here than elsewhere.
            self._body_bytes = 0
            self._since_s = self.app.now_s
        if upload.crowded:
            self._stop_reading()

    def _read_on(self) -> None:
        self._since_s = self.app.now_s
        if self._reading_paused and len(self._pending) < PIPELINE_MAX and not self.transport.is_closing():
            self._reading_paused = False
            self.transport.resume_reading()

    def _abandon_uploads(self) -> None:
        """What was not taken over yet will never be."""
        if self._upload is not None:
            self._upload.abandon()
            self._upload = None
        for request in (self.request, *self._pending):
            if type(request) is UploadRequest:
                request.upload.abandon()

    def _stop_reading(self) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _check_head(self) -> None:
        if self._head_bytes <= self.app.max_header_bytes:
            return
        if self._headers or self._target:
            self._refused = HeadersTooLarge(f"The headers are larger than {self.app.max_header_bytes} bytes.")
        else:
            self._refused = UrlTooLong(f"The URL is longer than {self.app.max_url_bytes} bytes.")

    def _body_too_large(self) -> Refusal:
        return TooLarge(f"The body is larger than {self.app.max_body_bytes} bytes.")

    def _refuse_while_reading(self) -> None:
        """Answer a request that will not be read to its end, then close. Earlier requests are answered first."""
        if self.busy or self._pending:
            return
        refusal = self._refused
        assert refusal is not None
        self._abandon_uploads()
        self.busy = True
        self.request = Request(b"GET", self._target, self._headers, b"", http_1_0=False, keep_alive=False)
        self.operation = "malformed"
        self.refuse(refusal)
