"""Server-sent events: a live reader is a cursor on a stream and nothing more (protocol §5.8).

At the tail and writable it gets the frame that was encoded once for all readers. When its socket is full it simply
falls behind and later reads on from storage, a bounded step at a time: there is no queue that could grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.reading import Chunk
from headwater.engine.stream import LiveStream
from headwater.http import read
from headwater.http.events import Event, as_chunk, control, events_of
from headwater.http.response import NO_CACHE

if TYPE_CHECKING:
    from headwater.http.app import App
    from headwater.http.connection import Connection

STEP_BYTES: Final = 64 * 1024
"""Payload encoded at a time while catching up: enough to fill a socket, little enough to hold in memory."""
_HEADERS: Final = NO_CACHE + b"Content-Type: text/event-stream\r\n"
_BASE64: Final = b"Stream-SSE-Data-Encoding: base64\r\n"


class Frame(NamedTuple):
    """Encoded events from `start_index` to the tail as it was, with the control event that says so."""

    start_index: int
    tail_index: int
    closed: bool
    end: Offset
    wire: bytes


def begin(app: App, connection: Connection, stream: LiveStream, start: Offset, cursor: str | None) -> None:
    reader = EventReader(app, connection, stream, start, cursor)
    app.engine.follow(stream, reader)
    connection.live = reader
    app.metrics.followers["sse"] += 1
    connection.begin_events(_HEADERS if stream.type.text else _HEADERS + _BASE64)
    reader.open()


class EventReader:
    """One event stream: a cursor at (`_index`, `_position`)."""

    __slots__ = (
        "_app",
        "_connection",
        "_cursor",
        "_deadline",
        "_greeted",
        "_index",
        "_open",
        "_position",
        "_shares",
        "_stream",
    )

    def __init__(self, app: App, connection: Connection, stream: LiveStream, start: Offset, cursor: str | None) -> None:
        self._app = app
        self._connection = connection
        self._stream = stream
        self._index = start.index
        self._position = start.position
        self._cursor = cursor
        # A frame is shared by readers whose cursor is simply the current one, over chunked HTTP/1.1.
        self._shares = read.cursor_for(app, cursor) == read.cursor_for(app, None) and not connection.request.http_1_0
        self._open = True
        self._greeted = False
        self._deadline = app.sse_deadlines.set(self.end) if app.sse_deadlines is not None else None

    def open(self) -> None:
        self._pump()
        if self._open and not self._greeted:
            # At the tail: say so at once, with the place to resume from.
            self._write(control(self._here(), self._next_cursor(), up_to_date=True, closed=False))

    def wake(self) -> None:
        if not self._connection.paused:
            self._pump()

    def writable(self) -> None:
        self._pump()

    def gone(self, refusal: Refusal) -> None:
        self.end()

    def drain(self) -> None:
        self.end()

    def disconnected(self) -> None:
        self._leave()

    def end(self) -> None:
        """End the response cleanly; the client resumes from its last control event."""
        if self._open:
            self._leave()
            self._connection.end_events()

    def _pump(self) -> None:
        """Send what lies between the cursor and the tail, as long as the socket takes it."""
        stream = self._stream
        while self._open and not self._connection.paused:
            if self._index == stream.durable_index:
                if stream.durable_closed:
                    self._write(control(self._here(), None, up_to_date=True, closed=True))
                    self.end()
                return
            if self._index < stream.durable_retained_index:
                # What comes next is no longer there: the reader meets 410 when it asks again.
                self.end()
                return
            if not self._send_frame():
                return

    def _send_frame(self) -> bool:
        """Send one frame; False when there is nothing that could go out yet."""
        stream = self._stream
        frame = stream.frame
        if (
            self._shares
            and type(frame) is Frame
            and frame.start_index == self._index
            and frame.tail_index == stream.durable_index
            and frame.closed == stream.durable_closed
        ):
            self._connection.transport.write(frame.wire)
        else:
            frame = self._encode()
            if frame is None:
                return False
            if self._shares:
                stream.frame = frame
            self._connection.transport.write(frame.wire)
        self._greeted = True
        self._app.metrics.read_bytes += frame.end.position - self._position
        self._index = frame.end.index
        self._position = frame.end.position
        if frame.closed and self._index == stream.durable_index:
            self.end()
        return True

    def _encode(self) -> Frame | None:
        app = self._app
        reader = app.engine.reader
        stream = self._stream
        step = STEP_BYTES
        while True:
            chunk = reader.chunk(stream, self._here(), step)
            data = b"".join(reader.buffers(chunk))
            waits = not (chunk.up_to_date and chunk.closed)
            events = events_of(stream.type, data, reader.lengths(chunk), chunk.start, more_may_come=waits)
            if events:
                break
            if chunk.up_to_date:
                return None
            step *= 2
        app.engine.touch(stream)
        wire = self._render(chunk, events)
        tail = stream.durable_index
        return Frame(self._index, tail, stream.durable_closed, events[-1].end, wire)

    def _render(self, chunk: Chunk, events: list[Event]) -> bytes:
        cursor = self._next_cursor()
        parts: list[bytes] = []
        last = events[-1]
        for event in events[:-1]:
            parts.append(event.payload)
            parts.append(control(event.end, cursor, up_to_date=False, closed=False))
        parts.append(last.payload)
        # What is held back for the rest of a character is not yet readable text: the reader is up to date without it.
        parts.append(
            control(last.end, cursor, up_to_date=chunk.up_to_date, closed=chunk.closed and last.end == chunk.end)
        )
        wire = b"".join(parts)
        return wire if self._connection.request.http_1_0 else as_chunk(wire)

    def _write(self, payload: bytes) -> None:
        self._greeted = True
        http_1_0 = self._connection.request.http_1_0
        self._connection.transport.write(payload if http_1_0 else as_chunk(payload))

    def _here(self) -> Offset:
        return Offset(self._index, self._position)

    def _next_cursor(self) -> str:
        return read.cursor_for(self._app, None if self._shares else self._cursor)

    def _leave(self) -> None:
        if self._open:
            self._open = False
            if self._deadline is not None:
                self._deadline.cancel()
            self._connection.live = None
            self._app.metrics.followers["sse"] -= 1
            self._app.engine.unfollow(self._stream, self)
