"""Read a stream: catch up, then follow by server-sent events or long-poll, and resume after every break. No I/O.

Invariant: each batch is emitted once, in order, without gaps. Data of a broken response that is not followed by its
offset is dropped and read again from the last offset.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Literal
from urllib.parse import urlencode

import msgspec

from headwater.client.effects import Attempts, Emit, HttpRequest, Open, Operation, Policy, Receive
from headwater.client.errors import (
    ClientError,
    MalformedResponseError,
    RequestTimeoutError,
    SseUnavailableError,
    error_of,
)
from headwater.client.http1 import HttpResponse
from headwater.client.operations import StreamOperations
from headwater.client.results import (
    NOW,
    Batch,
    StreamInfo,
    any_json,
    decode,
    decode_base64,
    is_json,
    is_text,
    is_true,
    next_offset_of,
    number,
    split_frames,
)
from headwater.client.sse import SseParser

Live = Literal["auto", "sse", "long-poll"]
SSE_TYPE: Final = "text/event-stream"
_SSE_REFUSED: Final = frozenset((400, 405, 406, 415, 501))


class Position:
    """The position of a reader, and what it knows about the end of the stream."""

    __slots__ = ("closed", "content_type", "cursor", "offset", "position", "up_to_date")

    def __init__(self, offset: str, content_type: str = "", position: int | None = None) -> None:
        self.offset = offset
        self.content_type = content_type
        self.position = position
        self.cursor: str | None = None
        self.up_to_date = False
        self.closed = False

    def advance(self, batch: Batch) -> None:
        self.offset = batch.next_offset
        self.content_type = batch.content_type
        self.position = batch.position
        self.cursor = batch.cursor
        self.up_to_date = batch.up_to_date
        self.closed = batch.closed


class Values:
    """Decodes batches to JSON values, text (a character may span two batches), or bytes."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text: codecs.IncrementalDecoder | None = None

    def of(self, batch: Batch) -> list[Any]:
        if batch.is_json or not is_text(batch.content_type):
            return batch.values
        if self._text is None:
            self._text = codecs.getincrementaldecoder("utf-8")("replace")
        return [text for piece in batch.values if (text := self._text.decode(piece))]


def decoded(messages: list[bytes], content_type: str) -> list[Any]:
    """Decode single messages like those of a batch."""
    if is_json(content_type):
        return [decode(message, any_json) for message in messages]
    return [message.decode("utf-8", "replace") for message in messages] if is_text(content_type) else list(messages)


Take = Callable[[Batch], Any]
"""Returns the value to emit for a batch; None emits nothing."""


def read(operations: StreamOperations, start: Position, take: Take) -> Operation[Position]:
    """Emit everything up to the current end; return the position of the end."""
    at = start
    while True:
        chunk = yield from operations.read_chunk(at.offset)
        is_end = chunk.up_to_date or chunk.closed or chunk.next_offset == at.offset
        operations.content_type = chunk.content_type
        batch = Batch(
            _bodies(chunk.content_type, chunk.body),
            chunk.content_type,
            chunk.next_offset,
            up_to_date=is_end,
            closed=chunk.closed,
        )
        at.advance(batch)
        value = take(batch)
        if value is not None:
            yield Emit(value)
        if is_end:
            return at


def read_messages(operations: StreamOperations, at: Position, end: StreamInfo, take: Take) -> Operation[Position]:
    """Emit everything up to a known end, with the boundaries of messages (extension `frames`)."""
    at.content_type, at.position = end.content_type, end.position
    while at.offset not in (NOW, end.next_offset):
        chunk = yield from operations.read_frames(at.offset, end.next_offset)
        if chunk.next_offset == at.offset:
            break
        is_end = chunk.next_offset == end.next_offset
        batch = Batch(
            split_frames(chunk.body, json=end.is_json),
            end.content_type,
            chunk.next_offset,
            up_to_date=is_end,
            closed=is_end and end.closed,
            position=end.position if is_end else None,
        )
        at.advance(batch)
        value = take(batch)
        if value is not None:
            yield Emit(value)
    at.offset, at.closed = end.next_offset, end.closed
    return at


def batches(
    operations: StreamOperations,
    offset: str,
    live: Live | None,
    since: datetime | str | int | None = None,
    *,
    exact: StreamInfo | None = None,
) -> Operation[None]:
    """Emit the batches of a stream from an offset or a time; without `live`, up to the current end.

    `exact` is the current state of a stream that is not JSON, and has each message emitted by itself; the server must
    have the extension `frames`.
    """

    def take(batch: Batch) -> Batch:
        return batch

    if since is not None:
        offset = yield from operations.offset_at(since)
    if exact is None:
        at = yield from read(operations, Position(offset), take)
    else:
        at = yield from read_messages(operations, Position(offset), exact, take)
    if live is None or at.closed:
        return
    if exact is not None and live == "auto":
        live = "long-poll"  # Server-sent events turn a carriage return in text into a line feed.
    yield from Follower(operations, at, live, take, exact=exact is not None).batches()


class Follower:
    """Follows a stream from a position, over any number of responses."""

    def __init__(self, operations: StreamOperations, at: Position, live: Live, take: Take, *, exact: bool) -> None:
        """`exact` keeps the boundaries of messages that are not JSON, if the server sends them."""
        self._operations = operations
        self._at = at
        self._take = take
        self._exact = exact
        self._falls_back = live == "auto"
        # SSE turns a carriage return in text into a line feed.
        self._uses_sse = live == "sse" or (live == "auto" and (exact or not is_text(at.content_type)))
        policy = operations.policy
        self._attempts = Attempts(Policy(policy.follow_retry, on_retry=policy.on_retry, clock=policy.clock))

    def batches(self) -> Operation[None]:
        while not self._at.closed:
            try:
                yield from self._sse() if self._uses_sse else self._long_poll()
                continue
            except SseUnavailableError:
                if not self._falls_back:
                    raise
                self._uses_sse = False
                continue
            except ClientError as error:
                wait = self._attempts.failed(error)
            yield wait

    def _emit(self, batch: Batch) -> Operation[None]:
        self._attempts.succeeded()
        self._at.advance(batch)
        value = self._take(batch)
        if value is not None:
            yield Emit(value)

    def _request(self, live: str, accept: str) -> HttpRequest:
        query = {"offset": self._at.offset, "live": live}
        if self._at.cursor is not None:
            query["cursor"] = self._at.cursor
        operations = self._operations
        return HttpRequest(
            "GET",
            operations.url,
            urlencode(query),
            {"Accept": accept},
            timeout_s=operations.policy.live_timeout_s,
        )

    # -- long-poll ---------------------------------------------------------------------------------------------------

    def _long_poll(self) -> Operation[None]:
        at = self._at
        response: HttpResponse = yield self._request("long-poll", "*/*")
        headers = response.headers
        if response.status not in {200, 204}:
            raise error_of("GET", self._operations.url, response.status, headers, response.body)
        next_offset, position = next_offset_of(response), number(headers, "stream-next-position")
        bodies: list[bytes] = []
        content_type = at.content_type
        if response.status == 200:
            content_type = headers.get("content-type", "application/octet-stream")
            if not self._exact or is_json(content_type) or position is None or position - 1 == at.position:
                bodies = _bodies(content_type, response.body)
            else:
                bodies = yield from self._operations.messages_between(at.offset, next_offset)
        yield from self._emit(
            Batch(
                bodies,
                content_type,
                next_offset,
                up_to_date=is_true(headers, "stream-up-to-date") or response.status == 204,
                closed=is_true(headers, "stream-closed"),
                cursor=headers.get("stream-cursor"),
                position=position if position is not None or bodies else at.position,
            )
        )

    # -- server-sent events ------------------------------------------------------------------------------------------

    def _sse(self) -> Operation[None]:
        """Read the events of one response."""
        response: HttpResponse = yield Open(self._request("sse", SSE_TYPE))
        yield from check_sse(response, self._operations.url)
        is_base64 = response.headers.get("stream-sse-data-encoding", "") == "base64"
        content_type, holds_json = self._at.content_type, is_json(self._at.content_type)
        parser = SseParser()
        bodies: list[bytes] = []
        silent = True
        while True:
            try:
                data: bytes = yield Receive(response)
            except RequestTimeoutError as error:
                if silent:
                    # Servers send an event immediately, so something in between is buffering it.
                    raise SseUnavailableError(f"no event arrived: {error}") from None
                raise
            if not data:
                break
            for event in parser.feed(data):
                if event.kind == "data":
                    bodies.append(decode_base64(event.data) if is_base64 and not holds_json else event.data)
                elif event.kind == "control":
                    control = _control(event.data)
                    silent = False
                    yield from self._emit(
                        Batch(
                            bodies,
                            content_type,
                            control.stream_next_offset,
                            up_to_date=control.up_to_date,
                            closed=control.stream_closed,
                            cursor=control.stream_cursor,
                        )
                    )
                    bodies = []
        if silent:
            raise MalformedResponseError("the event stream ended without an event")


def check_sse(response: HttpResponse, url: str) -> Operation[None]:
    """Raise the matching error if a response is not an event stream."""
    status = response.status
    if status in _SSE_REFUSED:
        raise SseUnavailableError(f"the server responds with {status} to a request for events")
    if status != 200:
        pieces: list[bytes] = []
        while piece := (yield Receive(response)):
            pieces.append(piece)
        raise error_of("GET", url, status, response.headers, b"".join(pieces))
    kind = response.headers.get("content-type", "")
    if not kind.startswith(SSE_TYPE):
        raise SseUnavailableError(f"the server responds with {kind or 'no content type'} instead of events")


class _Control(msgspec.Struct, rename="camel"):
    """The control event after every data event."""

    stream_next_offset: str
    stream_cursor: str | None = None
    up_to_date: bool = False
    stream_closed: bool = False


_controls: Final = msgspec.json.Decoder(_Control)


def _control(data: bytes) -> _Control:
    try:
        return _controls.decode(data)
    except msgspec.MsgspecError as error:
        raise MalformedResponseError(f"a control event is malformed: {error}") from None


def _bodies(content_type: str, body: bytes) -> list[bytes]:
    """The body of a catch-up read, or nothing if it is empty or an empty array."""
    return [] if not body or (body == b"[]" and is_json(content_type)) else [body]
