"""GET: read a stream from an offset (protocol §5.6). Live reads are in `long_poll` and `sse`."""

from __future__ import annotations

from headwater.core.errors import BadRequest, InvalidOffset
from headwater.core.offsets import NOW, Offset
from headwater.engine.stream import LiveStream
from headwater.http import ranges
from headwater.http.chunks import chunk_response
from headwater.http.context import Context
from headwater.http.headers import NO_STORE, OK, STREAM_CLOSED, UP_TO_DATE, content_type, next_offset
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import PiecewiseResponse, Response


def handle(context: Context, request: Request, address: Address) -> Response | PiecewiseResponse:
    query = address.query
    if "live" in query:
        raise BadRequest(f"live must be long-poll or sse, not {query['live']!r}.")
    token = query.get("offset")
    if token == "":
        raise empty_offset()
    stream = context.engine.look_up(address.name, touch=True)
    start = context.engine.reader.resolve(stream, token)
    if len(query) > 1 and ranges.asked_for(query):
        return ranges.respond(context, request, stream, start, query)
    if token == NOW:
        return _tail(stream, start)
    return chunk_response(context, request, context.engine.reader.chunk(stream, start, context.limits.max_chunk_bytes))


def begin_live(context: Context, address: Address) -> tuple[LiveStream, Offset]:
    """The stream and the place that a live read starts from."""
    token = address.query.get("offset")
    if token is None:
        raise BadRequest("A live read needs an offset: -1, now, or one that the server returned.")
    if token == "":
        raise empty_offset()
    if ranges.asked_for(address.query):
        raise ranges.not_for_live_reads()
    stream = context.engine.look_up(address.name, touch=True)
    return stream, context.engine.reader.resolve(stream, token)


def empty_offset() -> InvalidOffset:
    return InvalidOffset("The offset is empty. Leave it out, or use -1, now, or one that the server returned.")


def _tail(stream: LiveStream, tail: Offset) -> Response:
    headers = NO_STORE + content_type(stream.type.header) + next_offset(stream.id, tail.index, tail.position)
    closed = STREAM_CLOSED if stream.durable_closed else b""
    return Response(OK, headers + UP_TO_DATE + closed, b"[]" if stream.type.json else b"")
