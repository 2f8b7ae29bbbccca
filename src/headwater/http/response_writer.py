"""The writing side of a connection: send responses whole, in pieces or live, and no more than a turn allows.

The next piece of a body is prepared when the client has read the ones before. A connection that has sent its share of a
turn continues in the next one, after the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from time import perf_counter
from typing import Final

from headwater.core.errors import InternalError, Refusal
from headwater.engine.cold_reads import Pending
from headwater.http.connection_input import ConnectionInput
from headwater.http.context import Context
from headwater.http.flow import QUICK_TURNS, TURN_BYTES, UNREAD
from headwater.http.headers import NO_CONTENT, NOT_MODIFIED, OK, VARY_ENCODING, header, without_vary
from headwater.http.request import Request
from headwater.http.responses import Buffer, LiveResponse, PiecewiseResponse, Response, problem
from headwater.http.states import GO_LIVE, IDLE, LIVE, REFUSING, SEND_PIECES, SENDING, SERVING, WRITING

log = logging.getLogger("headwater.http")

UNKNOWN: Final = "unknown"
"""The operation of a request for which there is no route."""
_CLOSE: Final = b"Connection: close\r\n"
_KEEP_ALIVE: Final = b"Connection: keep-alive\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"


class ResponseWriter(asyncio.Protocol):
    """Sends the responses of one connection. For a live response it is the `Channel`.

    It is a base class and not an object of its own: that would be one more for each idle connection, and one more call
    for each response.
    """

    __slots__ = (
        "_began_s",
        "_context",
        "_input",
        "_is_last",
        "_live",
        "_namespace",
        "_operation",
        "_pieces",
        "_quick_turns",
        "_request",
        "_request_id",
        "_transport",
        "_turn_bytes",
        "_turn_is_due",
        "_writing",
    )

    def __init__(self, context: Context, received: ConnectionInput) -> None:
        self._context = context
        # Per connection.
        self._input = received
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._writing = IDLE
        self._is_last = False
        """Whether the connection is closed when the current response is complete."""
        self._turn_bytes = 0
        self._turn_is_due = False
        self._quick_turns = 0
        """The turns since the last one that took long."""
        # Per request that is being processed.
        self._request: Request = None  # type: ignore[assignment]
        self._request_id = ""
        """Set if requests are logged; also sent to the client."""
        self._operation = UNKNOWN
        self._namespace: str | None = None
        """The namespace whose quota of connections counts this one until the response is complete."""
        self._began_s = 0.0
        self._live: LiveResponse | None = None
        self._pieces: Iterator[Buffer] | None = None

    def _finish(self) -> None:
        """Complete the current response: process the next request, or close."""
        raise NotImplementedError

    def _next_turn(self) -> None:
        """Continue, because a new turn began."""
        raise NotImplementedError

    def close(self) -> None:
        self._is_last = True
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once. A body that cannot be completed must not look complete."""
        self._is_last = True
        self._transport.abort()

    # -- the channel of a live response ----------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        return not self._input.reasons & UNREAD and self._turn_bytes < TURN_BYTES

    def begin_body(self, headers: bytes) -> None:
        if self._request.http_1_0:
            self._request.keep_alive = False
            self._write_head(OK, headers)
        else:
            self._write_head(OK, headers + b"Transfer-Encoding: chunked\r\n")

    def write(self, data: bytes) -> None:
        self.write_chunk(data if self._request.http_1_0 else b"%x\r\n%b\r\n" % (len(data), data))

    def write_chunk(self, chunk: bytes) -> None:
        if self._writing is LIVE:
            self._transport.write(chunk)
            self._count_turn(len(chunk))

    def offer_chunk(self, chunk: bytes) -> bool:
        if self._input.reasons & UNREAD or self._turn_bytes >= TURN_BYTES or self._writing is not LIVE:
            return False
        self._transport.write(chunk)
        self._turn_bytes += len(chunk)
        if self._turn_bytes >= TURN_BYTES:
            self._schedule_turn()
        return True

    def yield_turn(self) -> None:
        self._turn_bytes = TURN_BYTES
        self._schedule_turn()

    def end_body(self) -> None:
        if self._writing is LIVE:
            self._live = None
            if not self._request.http_1_0:
                self._transport.write(_LAST_CHUNK)
            self._finish()

    def respond(self, response: Response | PiecewiseResponse) -> None:
        if self._writing is LIVE:
            self._live = None
            self._send(response)

    def refuse(self, refusal: Refusal) -> None:
        self.respond(problem(refusal))

    # -- responses -------------------------------------------------------------------------------------------------

    def _send(self, response: Response | PiecewiseResponse | LiveResponse) -> None:
        """Send the response to the current request, or begin to."""
        if type(response) is Response:
            self._write_whole(response)
            self._finish()
        elif isinstance(response, PiecewiseResponse):
            self._write_head(response.status, response.headers + b"Content-Length: %d\r\n" % response.length)
            self._writing = WRITING[self._writing][SEND_PIECES]
            self._pieces = response.pieces
            self._send_pieces()
        else:
            assert not isinstance(response, Response)
            self._writing = WRITING[self._writing][GO_LIVE]
            self._live = response
            response.start(self)

    def _fail(self, error: BaseException) -> None:
        """Handle an internal error: log it with an id that is also sent to the client, without details."""
        request_id = self._request_id or self._context.request_log.id_of(self._request)
        log.error("request %s failed: %s %r", request_id, self._request.method, self._request.target, exc_info=error)
        if self._writing is not SERVING and self._writing is not REFUSING:
            self.abort()
            return
        self._send(
            problem(
                InternalError(
                    "An unexpected error occurred in the server. Quote the X-Request-Id when you report it.",
                    () if self._request_id else (("X-Request-Id", request_id),),
                )
            )
        )

    def _write_whole(self, response: Response) -> None:
        if self._namespace is not None:
            # Before the client can send its next request to another worker.
            self._leave_namespace()
        request = self._request
        status = response.status
        headers = response.headers
        context = self._context
        if b"origin" in request.headers:
            head = context.common_headers.begin(status, request.headers[b"origin"])
        else:
            head = context.common_headers.beginnings[status]
        body = b""
        if status != NO_CONTENT:  # Checked first, because it is the status of every append.
            if VARY_ENCODING in headers:
                head = without_vary(head)
            if status != NOT_MODIFIED and request.method != b"HEAD":
                body = response.body
                headers += b"Content-Length: %d\r\n" % len(body)
                self._turn_bytes += len(body)
                if self._turn_bytes >= TURN_BYTES:
                    # Otherwise a next response in pieces, which waits for a turn, would wait forever.
                    self._schedule_turn()
        if self._request_id:
            headers += header("X-Request-Id", self._request_id)
        if self._is_last or not request.keep_alive or request.http_1_0:
            headers += self._connection_header()
        self._transport.write(b"%b%b\r\n%b" % (head, headers, body))
        context.metrics.count_request(self._operation, status, perf_counter() - self._began_s)
        if context.request_log.is_on:
            self._log(status)

    def _write_head(self, status: int, headers: bytes) -> None:
        head = self._context.common_headers.begin(status, self._request.headers.get(b"origin"))
        if VARY_ENCODING in headers:
            head = without_vary(head)
        if self._request_id:
            headers += header("X-Request-Id", self._request_id)
        self._transport.write(b"%b%b%b\r\n" % (head, headers, self._connection_header()))
        self._context.metrics.count_request(self._operation, status, perf_counter() - self._began_s)
        if self._context.request_log.is_on:
            self._log(status)

    def _log(self, status: int) -> None:
        peer = self._transport.get_extra_info("peername")
        self._context.request_log.record(self._request, self._request_id, self._operation, status, self._began_s, peer)

    def _connection_header(self) -> bytes:
        request = self._request
        if self._is_last or not request.keep_alive:
            return _CLOSE
        return _KEEP_ALIVE if request.http_1_0 else b""

    def _leave_namespace(self) -> None:
        """End the count of this connection for the namespace of its request."""
        namespace, self._namespace = self._namespace, None
        if namespace is not None and self._context.limited_namespaces is not None:
            self._context.limited_namespaces.end_request(namespace)

    # -- responses in pieces ---------------------------------------------------------------------------------------

    def _send_pieces(self) -> None:
        pieces = self._pieces
        assert pieces is not None
        deferring = self._context.engine.deferring
        try:
            while self._writing is SENDING and self.writable and not self._transport.is_closing():
                if deferring is None:
                    piece = next(pieces)
                else:
                    with deferring():
                        piece = next(pieces)
                    if type(piece) is Pending:
                        piece.miss.then(self._context.loop, partial(self._send_fetched, pieces))
                        return
                self._transport.write(piece)
                self._count_turn(len(piece))
        except StopIteration:
            self._pieces = None
            self._finish()
        except Refusal as refusal:
            # The head is already sent: a body shorter than its Content-Length is the only way to report the error.
            log.warning("a response was cut off: %s", refusal.detail)
            self._drop_pieces()
            self.abort()
        except Exception as error:
            self._drop_pieces()
            self._fail(error)

    def _send_fetched(self, pieces: Iterator[Buffer], refusal: Refusal | None) -> None:
        """Continue after the next piece was fetched; if that failed, the body ends early, which the client detects."""
        if self._pieces is pieces and self._writing is SENDING:
            if refusal is None:
                self._send_pieces()
            else:
                log.warning("a response was cut off: %s", refusal.detail)
                self._drop_pieces()
                self.abort()

    def _drop_pieces(self) -> None:
        pieces, self._pieces = self._pieces, None
        close = getattr(pieces, "close", None)
        if close is not None:
            close()

    # -- turns -----------------------------------------------------------------------------------------------------

    def _count_turn(self, size: int) -> None:
        self._turn_bytes += size
        if self._turn_bytes >= TURN_BYTES:
            self._schedule_turn()

    def _schedule_turn(self) -> None:
        """Continue when the event loop has served the other connections."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self._context.turns.schedule(self._next_turn, is_quick=self._quick_turns >= QUICK_TURNS)
