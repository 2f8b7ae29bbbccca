"""One HTTP/1.1 connection: receive bytes, dispatch requests to their handlers, send responses in order.

Requests wait in the input of the connection (`connection_input`). They are processed one at a time, in a loop and never
by recursion, and only while the client reads the responses (`response_writer`); what one connection does in one turn of
the event loop is limited. The states are in `states`, the reasons not to read from the socket in `flow`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, ClassVar, Final

from headwater.core.errors import Refusal
from headwater.engine.cold_reads import ColdRead
from headwater.engine.uploads import BlobUpload
from headwater.http.body_receiver import BodyReceiver
from headwater.http.connection_input import ConnectionInput
from headwater.http.context import Context
from headwater.http.flow import (
    POSTPONED_BYTES,
    QUICK_S,
    TURN_BYTES,
    TURN_REQUESTS,
    UNPARSED,
    UNREAD,
    UPLOAD_AHEAD,
)
from headwater.http.head_cache import KnownHead
from headwater.http.headers import CONTINUE, NO_CONTENT
from headwater.http.parser import RequestParser
from headwater.http.request import Request, UploadRequest
from headwater.http.response_writer import UNKNOWN, ResponseWriter
from headwater.http.responses import Deferred, PiecewiseResponse, Repeat, Response, problem
from headwater.http.routing import Router
from headwater.http.states import (
    ANSWERED,
    BODY,
    CLOSE,
    CLOSED,
    DONE,
    IDLE,
    LINGER,
    LINGERING,
    LIVE,
    REFUSING,
    SENDING,
    SERVING,
    TAKE,
    TAKE_REFUSED,
    TAKEN,
    WRITING,
)

log = logging.getLogger("headwater.http")

LINGER_S: Final = 2.0
"""How long the rest of a refused request is discarded before the connection is closed."""
REST_S: Final = 1.0
"""After this time without a request a connection frees what it needs only for the next one."""
UNSENT_BYTES: Final = 64 * 1024
"""The size of the piece of a response that is prepared while the client does not read; larger ones are shared."""
MALFORMED: Final = "malformed"
_END: Final = b"\r\n"
_END_OF_HEAD: Final = b"\r\n\r\n"


class Connection(ResponseWriter):
    """The protocol of one socket, from accept to close."""

    __slots__ = (
        "_is_proxied",
        "_known",
        "_repeat",
        "_router",
        "_serving",
        "_since_s",
    )

    _counts_namespace: ClassVar = True
    """Whether quotas of namespaces count this connection."""

    def __init__(self, context: Context, router: Router) -> None:
        parser = RequestParser(context.parser_limits, context.budget, context.check_head, self)
        super().__init__(context, ConnectionInput(parser))
        self._router = router
        self._known: KnownHead | None = None
        """The head of the last request, if that is cached."""
        self._repeat: Repeat = None  # type: ignore[assignment]
        """How the current request is processed, if its head was known."""
        self._is_proxied = False
        """Whether the peer is a trusted proxy."""
        self._serving = False
        """Whether `_serve` is on the stack: a response that is complete at once must not call it again."""
        self._since_s = 0.0
        """When the connection became idle, began to linger, or the client stopped reading."""

    # -- asyncio ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._input.attach(self._transport)
        self._since_s = self._context.now_s
        if self._context.proxies:
            peer = transport.get_extra_info("peername")
            self._is_proxied = bool(peer) and self._context.proxies.trusts(peer[0])
        refusal = self._context.connections.add(self)
        if refusal is not None:
            self._input.parser.refuse(refusal)
            self._serve()
        elif self._context.draining:
            self.drain()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writing = WRITING[self._writing][CLOSE]
        if self._request is not None:
            self._input.free(self._request)
        self._input.close()
        self._drop_pieces()
        self._context.connections.discard(self)
        self._leave_namespace()
        live, self._live = self._live, None
        if live is not None:
            live.on_disconnect()

    def data_received(self, data: bytes) -> None:
        append_known = self._context.append_known
        if append_known is not None and append_known(self, data):
            return
        received = self._input
        if received.unparsed:
            received.extend(data)
            return
        now_s = perf_counter()
        turns = self._context.turns
        if now_s >= turns.ends_at_s and not turns.begin(now_s):
            self._postpone(data)
            return
        parser = received.parser
        if self._writing is IDLE and parser.state is IDLE and not received.requests and not received.reasons:
            # Usually the head is the same as that of the previous request: then it is not looked up.
            known = self._known
            if (
                known is None
                or len(data) != known.size
                or not data.startswith(known.head)
                or not known.generation.is_current
            ):
                known = self._known = self._router.head_cache.find(data)
                if known is not None and append_known is not None and append_known(self, data):
                    return
            if known is not None:
                self._answer_known(known, data[len(known.head) :], now_s)
                # Not measured if it is a small append, which is never slow.
                if (known.repeat is not None and known.size <= POSTPONED_BYTES) or perf_counter() - now_s < QUICK_S:
                    self._quick_turns += 1
                else:
                    self._quick_turns = 0
                return
            received.parse(data, self._context.now_s)
            if len(received.requests) == 1 and parser.state is IDLE and not received.unparsed:
                known = self._known = self._router.head_cache.remember(data, received.requests[0])
                if known is not None:
                    self._answer(received.take(), now_s, known)
        elif self._writing is LINGERING and self._context.connections.has_many_refused:
            # All received bytes were read, so closing does not reset the connection.
            self.close()
            return
        else:
            received.parse(data, self._context.now_s)
        if parser.state is BODY and not received.unparsed:
            self._receive_bulk()
        self._serve(now_s)
        self._quick_turns = self._quick_turns + 1 if perf_counter() - now_s < QUICK_S else 0

    def _postpone(self, data: bytes) -> None:
        """Keep received data for a turn, because this iteration of the event loop has no time left for requests."""
        self._input.keep(data)
        self._input.reserve()
        self._schedule_turn()

    def _receive_bulk(self) -> None:
        """Receive the rest of a large body without the parser, if the transport can change its protocol."""
        if hasattr(self._transport, "set_protocol") and self._input.parser.begin_bulk():
            context = self._context
            BodyReceiver(self, self._transport, self._input, lambda: context.now_s, self._serve)

    def eof_received(self) -> bool:
        # A half-closed client still gets the responses to its requests. A half-closed live reader has disconnected.
        if self._writing is LINGERING:
            return False  # The response was sent completely.
        received = self._input
        return self._live is None and (self._writing is not IDLE or bool(received.requests) or bool(received.unparsed))

    def pause_writing(self) -> None:
        self._input.hold(UNREAD)
        self._since_s = self._context.now_s

    def resume_writing(self) -> None:
        self._input.release(UNREAD)
        self._since_s = self._context.now_s
        self._continue()

    # -- the parser's sink -----------------------------------------------------------------------------------------

    def on_request(self, request: Request) -> None:
        self._input.add(request, waits=self._writing is not IDLE)

    def on_expect_continue(self) -> None:
        # Only if this request is next: `100 Continue` must not be sent before an earlier response.
        if self._is_next():
            self._transport.write(CONTINUE)

    def begin_upload(self, head: Request) -> BlobUpload | None:
        upload = self._router.begin_upload(self._context, head, is_next=self._is_next())
        if upload is not None:
            upload.on_drained = partial(self._input.release, UPLOAD_AHEAD)
        return upload

    def on_upload_ahead(self) -> None:
        self._input.hold(UPLOAD_AHEAD)

    def _is_next(self) -> bool:
        """Whether all requests before the one that is being read have been answered."""
        return self._writing is IDLE and not self._input.requests

    # -- the server ------------------------------------------------------------------------------------------------

    @property
    def is_slow_reader(self) -> bool:
        """Whether the client has not read its responses."""
        return bool(self._input.reasons & UNREAD) and self._writing is not CLOSED

    @property
    def unread_bytes(self) -> int:
        """Memory for the response that the client has not read: what is written, and the next piece."""
        return self._transport.get_write_buffer_size() + UNSENT_BYTES

    @property
    def waits_since_s(self) -> float:
        """The time since which the client has not read, if it is a slow reader."""
        return self._since_s

    def check_time(self, now_s: float) -> None:
        """Apply the timeouts of the connection. Called about twice a second."""
        context = self._context
        waited_s = now_s - self._since_s
        if self._writing is CLOSED:
            return  # It was lost since the check of all connections began.
        received = self._input
        if received.reasons & UNREAD:
            if waited_s > context.limits.write_timeout_s:
                context.metrics.slow_followers += 1
                self.abort()
        elif self._writing is LINGERING:
            if waited_s > LINGER_S:
                self.abort()
        elif self._writing is LIVE and received.is_empty:
            received.rest()  # A live reader rarely sends its next request soon.
        elif self._writing is not IDLE or received.requests or received.unparsed:
            return
        elif received.parser.state is not IDLE:
            received.parser.check_time(now_s)
            self._serve()
        elif waited_s > context.limits.idle_timeout_s:
            self.close()
        elif self._began_s and waited_s > REST_S:
            self._rest()

    def _rest(self) -> None:
        """Free what only the next request needs: most connections are idle most of the time."""
        self._began_s = 0.0
        self._request = self._known = None  # type: ignore[assignment]
        self._input.rest()

    def drain(self) -> None:
        """Finish the running requests, then close, because the server is stopping."""
        self._is_last = True
        if self._live is not None:
            self._live.on_drain()
        elif self._writing is LINGERING or (self._writing is IDLE and self._input.is_empty):
            self.close()

    # -- processing requests ---------------------------------------------------------------------------------------

    def _serve(self, now_s: float = 0.0) -> None:
        """Process queued requests in order, until one has to wait, the client does not read, or the turn ends.

        `now_s` is the time at which the turn was found to have time left, if that was just checked.
        """
        if self._serving:
            return
        self._serving = True
        context, received = self._context, self._input
        turns = context.turns
        left = TURN_REQUESTS
        while not self._turn_is_due and not self._transport.is_closing():
            is_next = received.requests and self._writing is IDLE and not received.reasons & UNREAD
            if not is_next and not (received.unparsed and received.has_space()):
                break
            if left != TURN_REQUESTS or not now_s:
                now_s = perf_counter()
                if not left or self._turn_bytes >= TURN_BYTES or (now_s >= turns.ends_at_s and not turns.begin(now_s)):
                    self._schedule_turn()
                    break
            left -= 1
            if is_next:
                self._answer(received.take(), now_s)
            else:
                received.parse_rest(context.now_s)
        self._serving = False
        received.refresh()
        refusal = received.parser.refusal
        if refusal is not None and not received.requests and self._writing is IDLE and not self._transport.is_closing():
            self._answer_refused(refusal)

    def _answer_known(self, known: KnownHead, body: bytes, began_s: float) -> None:
        """Process a request whose head is cached, without the steps that depend only on the head."""
        repeat = known.repeat
        context = self._context
        if repeat is None or self._is_proxied or self._is_last or context.request_log.is_on:
            self._answer(known.request_with(body), began_s, known)
            return
        self._request = known.request
        self._operation = known.operation
        self._request_id = ""
        self._began_s = began_s
        self._writing = TAKEN
        self._repeat = repeat
        try:
            rest = repeat.begin(body, self._complete_known)
            if rest is not None:
                head = context.common_headers.beginnings[NO_CONTENT]
                self._transport.write(b"".join((head, repeat.beginning, rest, _END_OF_HEAD)))
                context.metrics.count_request(known.operation, NO_CONTENT, perf_counter() - began_s)
                # `_finish` without what cannot be: no other request was received since.
                self._writing = ANSWERED
                self._since_s = context.now_s
        except Refusal as refusal:
            self._send(problem(refusal))
        except Exception as error:
            self._fail(error)

    def _complete_known(self, result: object) -> None:
        """Send the response to a request with a cached head. There is no other request until it is sent."""
        if self._writing is not SERVING:
            return  # The client has disconnected.
        try:
            if isinstance(result, Refusal):
                self._send(problem(result))
                return
            response = self._repeat.render(result)
            if isinstance(response, Response):
                self._write_whole(response)
            elif self._is_last:
                self._write_whole(Response(NO_CONTENT, response))
            else:
                context = self._context
                self._transport.write(context.common_headers.beginnings[NO_CONTENT] + response + _END)
                context.metrics.count_request(self._operation, NO_CONTENT, perf_counter() - self._began_s)
            self._finish()
        except Refusal as refusal:
            self._send(problem(refusal))
        except Exception as error:
            self._fail(error)

    def _answer(self, request: Request, began_s: float, known: KnownHead | None = None) -> None:
        self._request = request
        self._operation = UNKNOWN
        self._began_s = began_s
        self._writing = WRITING[self._writing][TAKE]
        if self._is_proxied:
            request.is_proxied = True
        request_log = self._context.request_log
        self._request_id = request_log.id_of(request) if request_log.is_debug else ""
        self._handle(request, known)

    def _handle(self, request: Request, known: KnownHead | None = None) -> None:
        try:
            route, address = self._router.resolve(self._context, request)
            self._operation = route.operation
            namespaces = self._context.limited_namespaces
            if namespaces is not None and self._namespace is None and self._counts_namespace:
                self._namespace = namespaces.begin_request(address.name)
            deferring = self._context.engine.deferring
            if deferring is None:
                response = route.handler(self._context, request, address)
            else:
                with deferring():
                    response = route.handler(self._context, request, address)
            if isinstance(response, Deferred):
                if response.operation is not None:
                    self._operation = response.operation
                if known is not None:
                    known.operation = self._operation
                    # A repetition skips these steps, and with them the count of connections and the CORS headers.
                    is_plain = self._namespace is None and b"origin" not in request.headers
                    known.repeat = response.repeat if is_plain else None
                    if is_plain and namespaces is None and response.repeat_for is not None:
                        self._router.head_cache.remember_headers(known, response.repeat_for)
                response.begin(partial(self._complete, request, response.render))
            else:
                self._send(response)
        except ColdRead as miss:
            miss.then(self._context.loop, partial(self._handle_again, request))
        except Refusal as refusal:
            self._send(problem(refusal))
        except Exception as error:
            self._fail(error)

    def _handle_again(self, request: Request, refusal: Refusal | None) -> None:
        """Process the request again after its data was fetched, or refuse it if that failed."""
        if self._request is request and self._writing is SERVING:
            if refusal is None:
                self._handle(request)
            else:
                self._send(problem(refusal))

    def _answer_refused(self, refusal: Refusal) -> None:
        """Send the refusal of a request that is not read completely, then close the connection."""
        self._writing = WRITING[self._writing][TAKE_REFUSED]
        self._request = request = self._input.parser.refused_request()
        self._operation = MALFORMED
        self._began_s = perf_counter()
        request.is_proxied = self._is_proxied
        request_log = self._context.request_log
        self._request_id = request_log.id_of(request) if request_log.is_debug else ""
        if refusal.__cause__ is None:
            self._send(problem(refusal))
        else:
            self._fail(refusal.__cause__)  # Of the server, while it read the request.

    def _complete(
        self, request: Request, render: Callable[[Any], Response | PiecewiseResponse], result: object
    ) -> None:
        """Send the response for the engine's result."""
        if self._request is not request or self._writing is not SERVING:
            return  # The client has disconnected.
        try:
            response = problem(result) if isinstance(result, Refusal) else render(result)
            if type(response) is Response:
                self._write_whole(response)
                self._finish()
            else:
                self._send(response)
        except Refusal as refusal:
            self._send(problem(refusal))
        except Exception as error:
            self._fail(error)

    def _finish(self) -> None:
        """Complete the current response: process the next request, or close."""
        request = self._request
        if request.reserved_bytes or type(request) is UploadRequest:
            self._input.free(request)
        if self._namespace is not None:
            self._leave_namespace()
        if self._writing is REFUSING:
            self._linger()
            return
        self._writing = WRITING[self._writing][DONE]
        if not request.keep_alive or self._is_last:
            self.close()
        elif self._serving:
            return  # `_serve` processes the next one.
        elif self._input.requests or self._input.parser.refusal is not None:
            self._serve()
        else:
            self._since_s = self._context.now_s

    def _linger(self) -> None:
        """Close without a reset: a client that is still sending its body must be able to read the response."""
        self._writing = WRITING[self._writing][LINGER]
        self._is_last = True
        self._since_s = self._context.now_s
        if self._transport.can_write_eof():
            self._transport.write_eof()

    # -- turns -----------------------------------------------------------------------------------------------------

    def _next_turn(self) -> None:
        self._turn_is_due = False
        self._turn_bytes = 0
        if not self._input.reasons & UNREAD:
            began_s = perf_counter()
            self._continue()
            if perf_counter() - began_s >= QUICK_S:
                self._quick_turns = 0

    def _continue(self) -> None:
        """Continue to send, or process the next request, because the client reads again or a new turn began."""
        if self._writing is SENDING:
            self._send_pieces()
        elif self._live is not None:
            self._live.on_writable()
        received = self._input
        if received.unparsed and not received.reasons & UNPARSED and not self._transport.is_closing():
            # It may be as it was received, so that its head may be known.
            data, received.unparsed = received.unparsed, b""
            self.data_received(data)
        elif received.unparsed or self._writing is IDLE:
            self._serve()
