"""Long-poll: answer as soon as there is data, or 204 when the time is up (protocol §5.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.engine.reading import gone_before
from headwater.engine.stream import LiveStream
from headwater.http import read
from headwater.http.response import NO_CONTENT, NO_STORE, STREAM_CLOSED, UP_TO_DATE, header, next_offset

if TYPE_CHECKING:
    from headwater.http.app import App
    from headwater.http.connection import Connection


def begin(app: App, connection: Connection, stream: LiveStream, start: Offset, cursor: str | None) -> None:
    poll = LongPoll(app, connection, stream, start, cursor)
    # Register first, then look at the tail: no wake-up can fall between the two.
    app.engine.follow(stream, poll)
    connection.live = poll
    app.metrics.followers["long-poll"] += 1
    poll.wake()


class LongPoll:
    """One waiting request."""

    __slots__ = ("_app", "_connection", "_cursor", "_deadline", "_start", "_stream", "_waiting")

    def __init__(self, app: App, connection: Connection, stream: LiveStream, start: Offset, cursor: str | None) -> None:
        self._app = app
        self._connection = connection
        self._stream = stream
        self._start = start
        self._cursor = cursor
        self._waiting = True
        self._deadline = app.long_poll_deadlines.set(self._time_is_up)

    def wake(self) -> None:
        stream = self._stream
        if self._start.index < stream.durable_retained_index:
            self._end()
            self._connection.refuse(gone_before(stream))
        elif stream.durable_index > self._start.index:
            self._end()
            app = self._app
            app.engine.touch(stream)
            chunk = app.engine.reader.chunk(stream, self._start, app.limits.max_chunk_bytes)
            cursor = header("Stream-Cursor", read.cursor_for(app, self._cursor))
            read.reply_chunk(app, self._connection, self._connection.request, chunk, cursor)
        elif stream.durable_closed:
            self._end()
            self._nothing(STREAM_CLOSED)

    def gone(self, refusal: Refusal) -> None:
        self._end()
        self._connection.refuse(refusal)

    def writable(self) -> None:
        """Nothing was written yet."""

    def drain(self) -> None:
        self._time_is_up()

    def disconnected(self) -> None:
        self._end()

    def _time_is_up(self) -> None:
        if self._waiting:
            self._end()
            self._nothing(b"")

    def _nothing(self, closed: bytes) -> None:
        headers = NO_STORE + next_offset(self._start.index, self._start.position) + UP_TO_DATE + closed
        headers += header("Stream-Cursor", read.cursor_for(self._app, self._cursor))
        self._connection.reply(NO_CONTENT, headers)

    def _end(self) -> None:
        if self._waiting:
            self._waiting = False
            self._deadline.cancel()
            self._connection.live = None
            self._app.metrics.followers["long-poll"] -= 1
            self._app.engine.unfollow(self._stream, self)
