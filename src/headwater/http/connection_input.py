"""The input of one connection: the requests that wait for their turn, and received data that is not parsed yet.

A client can send requests before it has the responses to earlier ones. Data is parsed a piece at a time, with no more
requests than fit into the queue, and the rest is kept. What waits behind a response counts in the budget for request
bodies; a request that exceeds it is refused.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from headwater.http.flow import (
    FIELD_BYTES,
    PARSE_BYTES,
    PIPELINE_MAX_BYTES,
    PIPELINE_MAX_REQUESTS,
    POSTPONED_BYTES,
    QUEUE_FULL,
    REQUEST_BYTES,
    UNPARSED,
    UNREAD,
    FlowControl,
)
from headwater.http.parser import RequestParser, overloaded
from headwater.http.request import Request, UploadRequest
from headwater.http.states import IDLE

_NO_REQUESTS: Final[deque[Request]] = deque(maxlen=0)
"""The queue of a connection that has none: an empty one takes 760 bytes."""
_END_OF_HEAD: Final = b"\r\n\r\n"
_SMALL_BYTES: Final = 16 * PIPELINE_MAX_REQUESTS
"""Data that cannot have more requests than fit into the queue: each has a method, a target and a version."""


class ConnectionInput(FlowControl):
    """What was received and waits. It is the flow control as well, so that a connection has one object for both."""

    __slots__ = ("_queued_bytes", "_reserved_bytes", "_waiting_bytes", "parser", "requests", "unparsed")

    def __init__(self, parser: RequestParser) -> None:
        super().__init__()
        self.parser = parser
        self.requests = _NO_REQUESTS
        """Complete requests, in their order."""
        self.unparsed = b""
        """Data that will be parsed in later turns."""
        self._queued_bytes = 0
        """Memory of the requests."""
        self._waiting_bytes = 0
        """The part of it that no request has reserved."""
        self._reserved_bytes = 0
        """Memory that is reserved for the requests and for the data."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits, and no request was received in part."""
        return not self.requests and not self.unparsed and self.parser.state is IDLE

    # -- data that is not parsed yet -------------------------------------------------------------------------------

    def keep(self, data: bytes) -> None:
        """Keep data that cannot be parsed now."""
        self.unparsed = data
        if len(data) > POSTPONED_BYTES:
            self.hold(UNPARSED)

    def extend(self, data: bytes) -> None:
        """Keep more data, received after what waits already."""
        self.unparsed += data
        self.hold(UNPARSED)
        self.reserve()

    def parse(self, data: bytes, now_s: float) -> None:
        """Parse a piece of data and keep the rest, or all of it if there is no space for requests."""
        if self.parser.refusal is not None:
            return
        if self.reasons & (QUEUE_FULL | UNREAD):
            self.keep(data)
            return
        parser = self.parser
        if len(data) <= _SMALL_BYTES and not self.requests:
            parser.feed(data, now_s)
            return
        end = self._end_of_piece(data)
        parser.feed(data[:end], now_s)
        if parser.takes_bulk():
            begin, end = end, end + parser.missing_bytes()
            parser.feed(data[begin:end], now_s)
        if parser.refusal is None and end < len(data):
            self.keep(data[end:])

    def parse_rest(self, now_s: float) -> None:
        """Parse a piece of the data that was kept."""
        rest, self.unparsed = self.unparsed, b""
        self.parse(rest, now_s)

    def _end_of_piece(self, data: bytes) -> int:
        """The end of a part of the data that has no more requests than fit into the queue."""
        if self.parser.takes_bulk():
            return self.parser.missing_bytes() or len(data)
        space = PIPELINE_MAX_REQUESTS - len(self.requests)
        # One request may have begun in earlier data; each other one ends at or after an empty line.
        end = 0
        for _ in range(space - 1):
            found = data.find(_END_OF_HEAD, end, PARSE_BYTES)
            if found < 0:
                return PARSE_BYTES
            end = found + len(_END_OF_HEAD)
        return end

    def has_space(self) -> bool:
        """Whether more data may be parsed."""
        if not self.requests:
            self.release(QUEUE_FULL)
        return not self.reasons & (QUEUE_FULL | UNREAD)

    # -- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, waits: bool) -> None:
        """Add a complete request; `waits` says whether an earlier one is being processed."""
        waits = waits or bool(self.requests)
        if self.requests is _NO_REQUESTS:
            self.requests = deque()
        self.requests.append(request)
        self._queued_bytes += request.reserved_bytes
        if waits:
            self._count(request)

    def _count(self, request: Request) -> None:
        """Count the memory of a request that has to wait for others."""
        size = REQUEST_BYTES + len(request.target) + self.parser.head_bytes + FIELD_BYTES * len(request.headers)
        if not request.reserved_bytes:
            size += len(request.body)
        request.waiting_bytes = size
        self._waiting_bytes += size
        self._queued_bytes += size
        # One more may be complete before the parser returns.
        if len(self.requests) >= PIPELINE_MAX_REQUESTS - 1 or self._queued_bytes >= PIPELINE_MAX_BYTES:
            self.hold(QUEUE_FULL)

    def take(self) -> Request:
        """Remove the first request from the queue, to process it."""
        request = self.requests.popleft()
        self._queued_bytes -= request.waiting_bytes + request.reserved_bytes
        self._waiting_bytes -= request.waiting_bytes
        return request

    def free(self, request: Request) -> None:
        """Release the memory budget of a request, and abort its upload if no handler finished it."""
        if request.reserved_bytes:
            self.parser.budget.release(request.reserved_bytes)
            request.reserved_bytes = 0
        if type(request) is UploadRequest and request.upload is not None:
            request.upload.abandon()

    # -- memory ----------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserve the memory of what waits, release that of what no longer does, and refuse what exceeds the budget."""
        unparsed = len(self.unparsed)
        size = self._waiting_bytes + (unparsed if unparsed > POSTPONED_BYTES else 0)
        budget = self.parser.budget
        if size > self._reserved_bytes and not budget.take(size - self._reserved_bytes):
            self.unparsed = b""
            while self._waiting_bytes > self._reserved_bytes:
                request = self.requests.pop()
                self._queued_bytes -= request.waiting_bytes + request.reserved_bytes
                self._waiting_bytes -= request.waiting_bytes
                self.free(request)
            self.parser.refuse(overloaded())
            size = self._waiting_bytes
        if size < self._reserved_bytes:
            budget.release(self._reserved_bytes - size)
        self._reserved_bytes = size

    def refresh(self) -> None:
        """Read the socket again if what waited has been parsed or processed, and update the reserved memory."""
        if self.reasons:
            if not self.unparsed:
                self.release(UNPARSED)
            if not self.requests:
                self.release(QUEUE_FULL)
        if self._waiting_bytes or self._reserved_bytes or self.unparsed:
            self.reserve()

    def rest(self) -> None:
        """Free what only the next request needs."""
        self.requests = _NO_REQUESTS
        self.parser.rest()

    def close(self) -> None:
        """Discard everything, because the connection is closed."""
        self.parser.close()
        for request in self.requests:
            self.free(request)
        self.requests = _NO_REQUESTS
        self.unparsed = b""
        self._queued_bytes = self._waiting_bytes = 0
        self.reserve()
