"""Bootstrap: a snapshot and all updates after it, as one multipart response (extensions §3).

The content of the response is fixed when the request is received: the snapshot is kept open and the updates are pinned,
so later changes do not affect it. The response is encoded in slices.

A boundary must not occur in a part. It is random, so a client cannot predict it, and everything that is sent is
searched for it: a small response gets another boundary; a large one is cut off, shorter than its Content-Length. So a
complete response never contains its boundary in a part.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from typing import Final

from headwater.core.content import DEFAULT_CONTENT_TYPE
from headwater.core.errors import BadRequest, InternalError, StreamNotFound
from headwater.core.offsets import BEGINNING, Offset
from headwater.engine.cold_reads import ColdRead, pending
from headwater.engine.engine import Engine
from headwater.engine.reading import SLICE_BYTES, ReadChunk, earliest
from headwater.engine.snapshots import OpenSnapshot
from headwater.engine.stream import LiveStream
from headwater.http.context import Context
from headwater.http.headers import (
    NO_STORE,
    OK,
    STREAM_CLOSED,
    UP_TO_DATE,
    header,
    next_offset,
    next_position,
    offset_text,
)
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import PiecewiseResponse, Response
from headwater.http.snapshots import begun

STEP_BYTES: Final = 64 * 1024
"""Bytes of updates that are encoded at a time."""
BOUNDARY_TRIES: Final = 8
_LINE: Final = b"\r\n"


class BoundaryFoundError(InternalError):
    """The chosen boundary occurs in a part."""


def handle(context: Context, request: Request, address: Address) -> Response | PiecewiseResponse:
    if "live" in address.query:
        raise BadRequest("Bootstrap is not live. Continue from its Stream-Next-Offset with an ordinary live read.")
    stream = context.engine.look_up(address.name, touch=True)
    body = BootstrapBody(context.engine, stream, context.engine.snapshots.open(stream))
    if request.method == b"HEAD":
        body.close()
        return Response(OK, body.headers(new_boundary()) + b"Content-Length: %d\r\n" % body.length())
    context.metrics.read_bytes += body.payload_bytes
    if body.length() <= SLICE_BYTES:
        boundary, content = complete(body)
        return Response(OK, body.headers(boundary), content)
    boundary = new_boundary()
    return PiecewiseResponse(OK, body.headers(boundary), body.length(), begun(closing(body, boundary)))


def new_boundary() -> bytes:
    return b"headwater-" + secrets.token_hex(16).encode()


def complete(body: BootstrapBody, make_boundary: Callable[[], bytes] = new_boundary) -> tuple[bytes, bytes]:
    """The boundary and the body of a small response; the boundary is chosen again until it does not occur in a part."""
    try:
        for _ in range(BOUNDARY_TRIES):
            boundary = make_boundary()
            try:
                return boundary, b"".join(body.slices(boundary))
            except BoundaryFoundError:
                continue
        raise BoundaryFoundError(f"Each of {BOUNDARY_TRIES} random boundaries occurs in a part of the response; retry.")
    finally:
        body.close()


def closing(body: BootstrapBody, boundary: bytes) -> Generator[bytes | memoryview, None, None]:
    """The slices of a large response. It is closed after the last one, or when the iteration is abandoned."""
    try:
        yield from body.slices(boundary, waits=True)
    finally:
        body.close()


class BoundaryWatch:
    """Searches for a boundary in a part that is sent in pieces."""

    __slots__ = ("_boundary", "_end")

    def __init__(self, boundary: bytes) -> None:
        self._boundary = boundary
        self._end = b""

    def check(self, piece: bytes | memoryview) -> None:
        window = self._end + piece
        if self._boundary in window:
            raise BoundaryFoundError("The boundary of the response occurs in one of its parts; retry.")
        self._end = window[1 - len(self._boundary) :]


class BootstrapBody:
    """The body of one response, fixed when it is created. Iterate over `slices`, or call `close`."""

    def __init__(self, engine: Engine, stream: LiveStream, snapshot: OpenSnapshot | None) -> None:
        self._engine = engine
        self._stream = stream
        self._snapshot = snapshot
        self._start = earliest(stream)
        self._end = Offset(stream.durable_index, stream.durable_position)
        self._closed = stream.durable_closed
        self._pin = engine.retention.pin(stream, self._start)
        # Stored JSON messages are followed by a comma, which is not part of the message.
        self._comma = 1 if stream.type.json else 0
        first = snapshot.ref.content_type if snapshot is not None else DEFAULT_CONTENT_TYPE
        self._first_type = header("Content-Type", first)
        self._update_type = header("Content-Type", stream.type.header)
        self._updates = self._end.message_index - self._start.message_index
        size = snapshot.ref.size if snapshot is not None else 0
        self.payload_bytes = size + self._end.byte_position - self._start.byte_position - self._updates * self._comma

    def headers(self, boundary: bytes) -> bytes:
        snapshot = self._snapshot
        at = BEGINNING
        if snapshot is not None:
            at = offset_text(self._stream.id, Offset(snapshot.ref.message_index, snapshot.ref.byte_position))
        return b"".join(
            (
                NO_STORE,
                b"Content-Type: multipart/mixed; boundary=%b\r\n" % boundary,
                header("Stream-Snapshot-Offset", at),
                next_offset(self._stream.id, self._end.message_index, self._end.byte_position),
                next_position(self._end.message_index),
                UP_TO_DATE,
                STREAM_CLOSED if self._closed else b"",
                # Without a snapshot, messages that retention has dropped are missing: the response says so.
                b"" if snapshot is not None or not self._start.message_index else self._earliest(),
            )
        )

    def _earliest(self) -> bytes:
        return header("Stream-Earliest-Offset", offset_text(self._stream.id, self._start))

    def length(self) -> int:
        boundary = new_boundary()
        first = len(_head(boundary, self._first_type)) + len(_LINE)
        updates = self._updates * (len(_head(boundary, self._update_type)) + len(_LINE))
        return first + updates + self.payload_bytes + len(_end(boundary))

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
        self._pin.release()

    def slices(self, boundary: bytes, *, waits: bool = False) -> Iterator[bytes | memoryview]:
        """The body. Raises `BoundaryFoundError` before a slice that would make it ambiguous.

        A reader that `waits` gets a `Pending` while data is being fetched.
        """
        yield _head(boundary, self._first_type)
        if self._snapshot is not None:
            watch = BoundaryWatch(boundary)
            for page in self._snapshot.pages(waits=waits):
                watch.check(page)
                yield page
        yield _LINE
        at = self._start
        while at.message_index < self._end.message_index:
            if self._stream.id not in self._engine.catalog.by_id:
                raise StreamNotFound(
                    f"Stream {self._stream.name!r} was deleted while it was being read; discard its offsets."
                )
            try:
                chunk = self._engine.reader.run(self._stream, at, self._end, STEP_BYTES)
                small = self._small(chunk, boundary) if chunk.length <= SLICE_BYTES else None
                large = self._engine.reader.slices(chunk, waits=waits) if small is None else None
            except ColdRead as miss:
                if not waits:
                    raise
                yield pending(miss)
                continue
            if small is not None:
                yield small
            elif large is not None:
                yield from self._large(chunk, large, boundary)
            at = chunk.end
        yield _end(boundary)

    def _small(self, chunk: ReadChunk, boundary: bytes) -> bytes:
        """Several small updates, each as a part."""
        reader = self._engine.reader
        data = b"".join(reader.buffers(chunk))
        BoundaryWatch(boundary).check(data)
        messages = []
        start = 0
        for length in reader.lengths(chunk):
            messages.append(data[start : start + length - self._comma])
            start += length
        head = _head(boundary, self._update_type)
        return head + (_LINE + head).join(messages) + _LINE

    def _large(
        self, chunk: ReadChunk, pieces: Iterator[bytes | memoryview], boundary: bytes
    ) -> Iterator[bytes | memoryview]:
        """One update that is itself larger than a slice."""
        assert chunk.end.message_index == chunk.start.message_index + 1
        watch = BoundaryWatch(boundary)
        left = chunk.length - self._comma
        yield _head(boundary, self._update_type)
        for piece in pieces:
            watch.check(piece)
            yield piece[:left] if len(piece) > left else piece
            left -= len(piece)
        yield _LINE


def _head(boundary: bytes, content_type: bytes) -> bytes:
    return b"--%b\r\n%b\r\n" % (boundary, content_type)


def _end(boundary: bytes) -> bytes:
    return b"--%b--\r\n" % boundary
