"""Long-poll: respond as soon as there is data, or with 204 at the deadline (protocol §5.7)."""

from __future__ import annotations

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.reading import gone_before
from headwater.engine.stream import LiveStream
from headwater.http.chunks import chunk_response
from headwater.http.context import Context
from headwater.http.headers import NO_CONTENT, NO_STORE, STREAM_CLOSED, UP_TO_DATE, header, next_offset
from headwater.http.paths import Address
from headwater.http.polling import WaitingPoll
from headwater.http.read import begin_live
from headwater.http.request import Request
from headwater.http.responses import Channel, Response


def handle(context: Context, request: Request, address: Address) -> LongPoll:
    stream, start, retention = begin_live(context, address)
    if context.engine.deferring is not None and start.message_index < stream.durable_index:
        # The response is immediate, and it cannot wait for a fetch later.
        context.engine.reader.fetch(context.engine.reader.chunk(stream, start, context.limits.max_chunk_bytes))
    return LongPoll(context, request, stream, start, address.query.get("cursor"), retention)


class LongPoll(WaitingPoll):
    """One request that waits for data of a stream."""

    __slots__ = ("_cursor", "_request", "_retention", "_start", "_stream")

    def __init__(
        self,
        context: Context,
        request: Request,
        stream: LiveStream,
        start: Offset,
        cursor: str | None,
        retention: bytes = b"",
    ) -> None:
        super().__init__(context)
        self._request = request
        self._stream = stream
        self._start = start
        self._cursor = cursor
        self._retention = retention
        """A header for a stream whose beginning is no longer retained."""

    def start(self, channel: Channel) -> None:
        self._wait(channel)
        # Register first, then check the tail, so that no wake-up is lost.
        self._context.engine.follow(self._stream, self)
        self.wake()

    def wake(self) -> None:
        stream = self._stream
        context = self._context
        if self._start.message_index < stream.durable_retained_index:
            self.gone(gone_before(stream))
        elif stream.durable_index > self._start.message_index:
            channel = self._leave()
            if channel is None:
                return
            try:
                context.engine.touch(stream)
                chunk = context.engine.reader.chunk(stream, self._start, context.limits.max_chunk_bytes)
                # The cursor is part of the request, so a later response has another cache key (§8.1).
                extra = self._cursor_header() + self._retention
                channel.respond(chunk_response(context, self._request, chunk, extra, is_cacheable=not self._retention))
            except Refusal as refusal:
                channel.refuse(refusal)
        elif stream.durable_closed:
            self._respond_without_data(STREAM_CLOSED)

    def gone(self, refusal: Refusal) -> None:
        channel = self._leave()
        if channel is not None:
            channel.refuse(refusal)

    def on_drain(self) -> None:
        self._respond_without_data(b"")

    def _respond_without_data(self, closed: bytes) -> None:
        channel = self._leave()
        if channel is None:
            return
        offset = next_offset(self._stream.id, self._start.message_index, self._start.byte_position)
        headers = NO_STORE + offset + UP_TO_DATE + closed + self._cursor_header() + self._retention
        channel.respond(Response(NO_CONTENT, headers))

    def _cursor_header(self) -> bytes:
        context = self._context
        return header("Stream-Cursor", context.current_cursor if self._cursor is None else context.cursor(self._cursor))

    def _forget(self) -> None:
        self._context.engine.unfollow(self._stream, self)
