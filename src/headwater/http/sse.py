"""Server-sent events: a live reader is only a cursor on a stream (protocol §5.8).

A reader at the tail whose socket is writable gets the frame that was encoded once for all readers. When its socket is
full it falls behind and later continues from storage, in bounded steps: there is no queue that could grow. Cursors
never decrease: a frame is shared only by readers whose next cursor it contains.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from msgspec import structs

from headwater.core.cursors import is_later
from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.cold_reads import ColdRead
from headwater.engine.reading import ReadChunk
from headwater.engine.stream import LiveStream
from headwater.http.chunks import as_array
from headwater.http.compression import CompressedChannel, accepted_coding
from headwater.http.context import Context
from headwater.http.deadlines import Deadline
from headwater.http.headers import NO_CACHE, offset_text
from headwater.http.paths import Address
from headwater.http.read import begin_live
from headwater.http.request import Request
from headwater.http.responses import Channel
from headwater.http.sse_encoding import (
    SseEvent,
    as_chunk,
    control_event,
    events_of,
    id_line,
    json_event,
    large_event,
    with_id,
)

log = logging.getLogger("headwater.http")

STEP_BYTES: Final = 64 * 1024
"""Payload that is encoded at a time while catching up: enough to fill a socket, with little memory."""
STEP_MESSAGES: Final = 512
"""Messages that are encoded at a time: each has two events, regardless of its size. The step size adapts to it."""
LARGE_BYTES: Final = 4 * STEP_BYTES
"""A larger message is encoded in pieces, separately for each reader."""
HOLD_S: Final = 2.0
"""How long text that ends within a character is held back."""
_HEADERS: Final = NO_CACHE + b"Content-Type: text/event-stream\r\n"
_BASE64: Final = b"Stream-SSE-Data-Encoding: base64\r\n"


class SharedFrame(NamedTuple):
    """Encoded events from `start_index` to the tail at that time, with their control event."""

    start_index: int
    tail_index: int
    closed: bool
    cursor: str
    end: Offset
    ends_open_at_tail: bool
    """Whether its readers only wait for more after it: no text is held back, and the stream is not closed."""
    wire: bytes
    """One chunk of a chunked body."""


def handle(context: Context, request: Request, address: Address) -> EventReader:
    # A browser reconnects with the original URL and the id of the last event that it received.
    stream, start, retention = begin_live(context, address, resumes_after=request.header(b"last-event-id"))
    return EventReader(context, request, stream, start, address.query.get("cursor"), retention)


class EventReader:
    """One event stream: a cursor at (`_message_index`, `_byte_position`)."""

    __slots__ = (
        "_byte_position",
        "_channel",
        "_coding",
        "_context",
        "_cursor",
        "_deadline",
        "_event_end",
        "_event_pieces",
        "_has_written",
        "_headers",
        "_hold_timer",
        "_holds",
        "_message_index",
        "_open",
        "_shares",
        "_step_bytes",
        "_stream",
    )

    def __init__(
        self,
        context: Context,
        request: Request,
        stream: LiveStream,
        start: Offset,
        cursor: str | None,
        retention: bytes = b"",
    ) -> None:
        self._context = context
        self._stream = stream
        self._message_index = start.message_index
        self._byte_position = start.byte_position
        self._cursor = context.cursor(cursor)
        """The cursor of the last control event, or of the first one before it is sent."""
        accepted = request.headers.get(b"accept-encoding") if context.compresses_events else None
        self._coding = accepted_coding(accepted) if accepted is not None else None
        self._shares = not request.http_1_0 and self._coding is None
        self._headers = (_HEADERS if stream.type.text else _HEADERS + _BASE64) + retention
        self._channel: Channel = None  # type: ignore[assignment]
        self._open = False
        self._has_written = False
        self._deadline: Deadline | None = None
        self._step_bytes = STEP_BYTES
        self._event_pieces: Iterator[bytes] | None = None
        """The rest of a large event that is being sent; `_event_end` is the offset after it."""
        self._event_end = start
        self._holds = True
        """Whether text that ends within a character is held back; False after `HOLD_S`."""
        self._hold_timer: asyncio.TimerHandle | None = None

    # -- the connection --------------------------------------------------------------------------------------------

    def start(self, channel: Channel) -> None:
        context = self._context
        if self._coding is not None:
            channel = CompressedChannel(channel, self._coding)
        self._channel = channel
        self._open = True
        if context.sse_deadlines is not None:
            self._deadline = context.sse_deadlines.set(self.end)
        context.engine.follow(self._stream, self)
        context.metrics.followers["sse"] += 1
        channel.begin_body(self._headers)
        self._pump()
        if self._open and not self._has_written and self._event_pieces is None:
            # There is no data: send a control event with the offset to resume from.
            at_tail = self._message_index == self._stream.durable_index
            offset = self._offset_text()
            self._write(with_id(control_event(offset, self._next_cursor(), up_to_date=at_tail, closed=False), offset))

    def on_writable(self) -> None:
        self._pump()

    def on_drain(self) -> None:
        self.end()

    def on_disconnect(self) -> None:
        self._leave()

    # -- the stream ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        stream = self._stream
        frame = stream.frame
        # Most readers of an event are at the tail and get the same frame, in as few calls as possible.
        if (
            type(frame) is SharedFrame
            and frame.ends_open_at_tail
            and frame.start_index == self._message_index
            and frame.tail_index == stream.durable_index
            and frame.cursor == self._cursor == self._context.current_cursor
            and not stream.durable_closed
            and self._shares
            and self._open
            and self._event_pieces is None
            and self._hold_timer is None
            and self._message_index >= stream.durable_retained_index
            and self._channel.offer_chunk(frame.wire)
        ):
            end = frame.end
            self._context.metrics.read_bytes += end.byte_position - self._byte_position
            self._message_index = end.message_index
            self._byte_position = end.byte_position
            self._has_written = self._holds = True
        else:
            self._pump()

    def gone(self, refusal: Refusal) -> None:
        self.end()

    def end(self) -> None:
        """End the response cleanly; the client resumes from its last control event."""
        if self._open:
            self._leave()
            self._channel.end_body()

    # -- sending ---------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Send the messages between the cursor and the tail, as long as the channel accepts them."""
        try:
            while self._open and self._channel.writable and self._send_next():
                pass
        except ColdRead as miss:
            miss.then(self._context.loop, self._fetched)
        except Refusal as refusal:
            # The stream or its beginning was deleted, or data is corrupt: the client gets the error when it resumes.
            log.warning("ended an event stream of %r: %s", self._stream.name, refusal.detail)
            self.end()
        except Exception:
            log.exception("an event stream of %r failed", self._stream.name)
            self.end()

    def _fetched(self, refusal: Refusal | None) -> None:
        """Continue after the data was fetched from the object store; if that failed, end, and the client resumes
        later."""
        if refusal is None:
            self._pump()
        else:
            self.end()

    def _send_next(self) -> bool:
        """Send one frame or one piece; False if there is nothing to send now."""
        stream = self._stream
        if self._event_pieces is not None:
            self._send_piece(self._event_pieces)
            return True
        if self._message_index == stream.durable_index:
            if stream.durable_closed:
                self._write(control_event(self._offset_text(), None, up_to_date=True, closed=True))
                self.end()
            return False
        if self._message_index < stream.durable_retained_index:
            # The next message is no longer retained: the client gets 410 when it resumes.
            self.end()
            return False
        cursor = self._next_cursor()
        frame = stream.frame
        if (
            self._shares
            and type(frame) is SharedFrame
            and frame.start_index == self._message_index
            and frame.tail_index == stream.durable_index
            and frame.cursor == cursor
            and frame.closed == stream.durable_closed
        ):
            if not self._channel.offer_chunk(frame.wire):
                return False
            self._advance(frame.end, is_closed=frame.closed)
            return True
        deferring = self._context.engine.deferring
        if deferring is None:
            return self._encode(cursor)
        with deferring():
            return self._encode(cursor)

    def _encode(self, cursor: str) -> bool:
        """Encode and send the next events; False if they are held back."""
        context = self._context
        reader = context.engine.reader
        stream = self._stream
        step_bytes = self._step_bytes
        while True:
            chunk = reader.chunk(stream, Offset(self._message_index, self._byte_position), step_bytes)
            if chunk.length > LARGE_BYTES and chunk.end.message_index == self._message_index + 1:
                if context.engine.deferring is not None:
                    reader.fetch(chunk)
                context.engine.touch(stream)
                self._begin_large(chunk)
                return False
            data = b"".join(reader.buffers(chunk))
            if stream.type.json:
                events = [json_event(data, chunk.end)]
                break
            lengths = reader.lengths(chunk)
            self._step_bytes = _next_step(step_bytes, len(lengths))
            if len(lengths) > STEP_MESSAGES:
                del lengths[STEP_MESSAGES:]
                data = data[: sum(lengths)]
                end = Offset(chunk.start.message_index + STEP_MESSAGES, chunk.start.byte_position + len(data))
                chunk = structs.replace(chunk, end=end, up_to_date=False, closed=False)
            # If there is more data, or may be soon, an incomplete character can still be completed.
            hold = not chunk.up_to_date or (self._holds and not chunk.closed)
            events = events_of(stream.type, data, lengths, chunk.start, hold=hold)
            if events:
                break
            if chunk.up_to_date:
                self._set_hold_timer()
                return False
            step_bytes *= 2
        context.engine.touch(stream)
        payload = self._render(chunk, events, cursor)
        end = events[-1].end
        is_closed = chunk.closed and end == chunk.end
        if self._shares:
            wire = as_chunk(payload)
            if chunk.up_to_date:
                tail, closed = stream.durable_index, stream.durable_closed
                ends_open = not closed and end.message_index == tail
                stream.frame = SharedFrame(self._message_index, tail, closed, cursor, end, ends_open, wire)
            if not self._channel.offer_chunk(wire):
                return False
        else:
            self._channel.write(payload)
        self._advance(end, is_closed=is_closed)
        return True

    def _render(self, chunk: ReadChunk, events: list[SseEvent], cursor: str) -> bytes:
        stream_id = self._stream.id
        parts: list[bytes] = []
        last = events[-1]
        for event in events[:-1]:
            offset = offset_text(stream_id, event.end)
            parts += (with_id(event.payload, offset), control_event(offset, cursor, up_to_date=False, closed=False))
        # A reader is not up to date while text is held back.
        at_end = last.end == chunk.end
        offset = offset_text(stream_id, last.end)
        up_to_date, closed = chunk.up_to_date and at_end, chunk.closed and at_end
        parts += (with_id(last.payload, offset), control_event(offset, cursor, up_to_date=up_to_date, closed=closed))
        return b"".join(parts)

    def _begin_large(self, chunk: ReadChunk) -> None:
        self._event_pieces = self._large_event(chunk)
        self._event_end = chunk.end
        # In a later turn, because all readers of the stream may have been woken at once.
        self._channel.yield_turn()

    def _large_event(self, chunk: ReadChunk) -> Iterator[bytes]:
        """The pieces of a large event. A generator, so that storage is read only when the first piece is needed."""
        pieces = self._context.engine.reader.slices(chunk, size=STEP_BYTES)
        kind = self._stream.type
        last_line = id_line(offset_text(self._stream.id, chunk.end))
        yield from large_event(kind, as_array(pieces, chunk.length) if kind.json else pieces, last_line)

    def _send_piece(self, pieces: Iterator[bytes]) -> None:
        piece = next(pieces, None)
        if piece is not None:
            if piece:
                self._channel.write(piece)
            return
        self._event_pieces = None
        end = self._event_end
        stream = self._stream
        at_tail = end.message_index == stream.durable_index
        is_closed = at_tail and stream.durable_closed
        text = offset_text(stream.id, end)
        self._write(control_event(text, self._next_cursor(), up_to_date=at_tail, closed=is_closed))
        self._advance(end, is_closed=is_closed)

    def _advance(self, end: Offset, *, is_closed: bool) -> None:
        self._has_written = True
        self._context.metrics.read_bytes += end.byte_position - self._byte_position
        self._message_index = end.message_index
        self._byte_position = end.byte_position
        self._holds = True
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        if is_closed and self._message_index == self._stream.durable_index:
            self.end()

    def _write(self, payload: bytes) -> None:
        self._has_written = True
        self._channel.write(payload)

    def _offset_text(self) -> str:
        return offset_text(self._stream.id, Offset(self._message_index, self._byte_position))

    def _next_cursor(self) -> str:
        """The current cursor, or the last one sent if that is ahead of it."""
        current = self._context.current_cursor
        if current != self._cursor and is_later(current, self._cursor):
            self._cursor = current
        return self._cursor

    def _set_hold_timer(self) -> None:
        if self._hold_timer is None:
            self._hold_timer = self._context.loop.call_later(HOLD_S, self._stop_holding)

    def _stop_holding(self) -> None:
        self._hold_timer = None
        self._holds = False
        self._pump()

    def _leave(self) -> None:
        if self._open:
            self._open = False
            if self._deadline is not None:
                self._deadline.cancel()
            if self._hold_timer is not None:
                self._hold_timer.cancel()
            self._event_pieces = None
            self._context.metrics.followers["sse"] -= 1
            self._context.engine.unfollow(self._stream, self)


def _next_step(step_bytes: int, messages: int) -> int:
    """The next step size: about `STEP_MESSAGES` messages, at most `STEP_BYTES`."""
    if messages > STEP_MESSAGES:
        return max(1, step_bytes * STEP_MESSAGES // messages)
    return min(STEP_BYTES, step_bytes * 2)
