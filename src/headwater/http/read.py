"""GET: read a stream from an offset (protocol §5.6). Live reads are in `long_poll` and `sse`."""

from __future__ import annotations

from headwater.core.errors import BadRequest, InvalidOffset
from headwater.core.offsets import BEGINNING, NOW, Offset
from headwater.engine.reading import earliest
from headwater.engine.stream import LiveStream
from headwater.http import ranges
from headwater.http.chunks import chunk_response
from headwater.http.context import Context
from headwater.http.headers import (
    NO_STORE,
    OK,
    STREAM_CLOSED,
    UP_TO_DATE,
    content_type,
    header,
    next_offset,
    offset_text,
)
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, PiecewiseResponse, Response


def handle(context: Context, request: Request, address: Address) -> Response | PiecewiseResponse | Deferred:
    query = address.query
    if "live" in query:
        raise BadRequest(f"live must be long-poll or sse, not {query['live']!r}.")
    token = query.get("offset")
    if token == "":
        raise empty_offset()
    stream = context.engine.look_up(address.name, touch=True)
    reader = context.engine.reader
    if len(query) > 1 and ranges.asked_for(query):
        # A planned range begins exactly where it was planned, or is refused.
        return ranges.respond(context, request, stream, reader.resolve(stream, token), query)
    start = reader.begin(stream, token)
    if token == NOW:
        return _tail(stream, start)
    chunk = reader.chunk(stream, start, context.limits.max_chunk_bytes)
    if stream.durable_retained_index and token in (None, BEGINNING):
        # The meaning of `-1` changes when retention drops messages, so the answer must not be cached.
        return chunk_response(context, request, chunk, earliest_offset(stream), is_cacheable=False)
    return chunk_response(context, request, chunk)


def begin_live(
    context: Context, address: Address, *, resumes_after: str | None = None
) -> tuple[LiveStream, Offset, bytes]:
    """The stream and the offset that a live read starts from, and a header if the beginning is not retained."""
    token = resumes_after or address.query.get("offset")
    if token is None:
        raise BadRequest("A live read needs an offset: -1, now, or one that the server returned.")
    if token == "":
        raise empty_offset()
    if ranges.asked_for(address.query):
        raise ranges.not_for_live_reads()
    stream = context.engine.look_up(address.name, touch=True)
    start = context.engine.reader.begin(stream, token)
    return stream, start, earliest_offset(stream) if token == BEGINNING else b""


def earliest_offset(stream: LiveStream) -> bytes:
    """Where a stream begins that has lost its first messages to retention (our extension)."""
    if not stream.durable_retained_index:
        return b""
    return header("Stream-Earliest-Offset", offset_text(stream.id, earliest(stream)))


def empty_offset() -> InvalidOffset:
    return InvalidOffset("The offset is empty. Leave it out, or use -1, now, or one that the server returned.")


def _tail(stream: LiveStream, tail: Offset) -> Response:
    headers = (
        NO_STORE + content_type(stream.type.header) + next_offset(stream.id, tail.message_index, tail.byte_position)
    )
    closed = STREAM_CLOSED if stream.durable_closed else b""
    return Response(OK, headers + UP_TO_DATE + closed, b"[]" if stream.type.json else b"")
