"""GET: read a stream from an offset (protocol §5.6). Live reads are in `long_poll` and `sse`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Final

from headwater.core.errors import BadRequest, InvalidOffset
from headwater.core.expiry import parse_instant
from headwater.core.offsets import BEGINNING, NOW, Offset
from headwater.engine.reading import earliest
from headwater.engine.stream import LiveStream
from headwater.http import ranges
from headwater.http.chunks import catch_up_response
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

_MILLISECONDS: Final = re.compile(r"[0-9]{1,15}", re.ASCII)


def handle(context: Context, request: Request, address: Address) -> Response | PiecewiseResponse | Deferred:
    query = address.query
    if "live" in query:
        raise BadRequest(f"live must be long-poll or sse, not {query['live']!r}.")
    token = query.get("offset")
    if token == "":
        raise empty_offset()
    stream = context.engine.look_up(address.name, touch=True)
    reader = context.engine.reader
    if "since" in query:
        return _since(context, request, stream, query)
    if len(query) > 1 and ranges.is_range_read(query):
        # A planned range begins exactly at its offset, or is refused.
        return ranges.respond(context, request, stream, reader.resolve(stream, token), query)
    start = reader.begin(stream, token)
    if token == NOW:
        return _tail(stream, start)
    cut = partial(reader.chunk, stream, start)
    if stream.durable_retained_index and token in (None, BEGINNING):
        # The meaning of `-1` changes when retention drops messages, so the response must not be cached.
        return catch_up_response(context, request, stream, cut, earliest_offset(stream), is_cacheable=False)
    return catch_up_response(context, request, stream, cut)


def begin_live(
    context: Context, address: Address, *, resumes_after: str | None = None
) -> tuple[LiveStream, Offset, bytes]:
    """The stream and the offset that a live read starts from, and a header if the beginning is not retained."""
    token = resumes_after or address.query.get("offset")
    if "since" in address.query and not resumes_after:
        if ranges.is_range_read(address.query):
            raise ranges.not_for_live_reads()
        stream = _followed(context, address)
        start = since(context, stream, address.query)
        return stream, start, since_offset(stream, start)
    if token is None:
        raise BadRequest("A live read needs an offset: -1, now, or one that the server returned; or since.")
    if token == "":
        raise empty_offset()
    if ranges.is_range_read(address.query):
        raise ranges.not_for_live_reads()
    stream = _followed(context, address)
    start = context.engine.reader.begin(stream, token)
    return stream, start, earliest_offset(stream) if token == BEGINNING else b""


def _followed(context: Context, address: Address) -> LiveStream:
    """The stream of a live read, if its namespace may have another reader."""
    stream = context.engine.look_up(address.name, touch=True)
    namespaces = context.engine.quota.namespaces
    if namespaces is not None:
        namespaces.check_reader(stream.name)
    return stream


def since(context: Context, stream: LiveStream, query: Mapping[str, str]) -> Offset:
    """The offset of the first message that arrived at the requested time or later (our extension)."""
    text = query["since"]
    if "offset" in query:
        raise BadRequest("Give either offset or since, not both.")
    at_ms = int(text) if _MILLISECONDS.fullmatch(text) else parse_instant(text)
    if at_ms is None:
        raise BadRequest(
            f"since must be a time such as 2030-01-31T12:00:00Z (with + written as %2B), or milliseconds since 1970,"
            f" not {text!r}."
        )
    return context.engine.reader.since(stream, max(at_ms, 1))


def since_offset(stream: LiveStream, start: Offset) -> bytes:
    return header("Stream-Since-Offset", offset_text(stream.id, start))


def earliest_offset(stream: LiveStream) -> bytes:
    """A header with the earliest offset, if retention has dropped the first messages (our extension)."""
    if not stream.durable_retained_index:
        return b""
    return header("Stream-Earliest-Offset", offset_text(stream.id, earliest(stream)))


def empty_offset() -> InvalidOffset:
    return InvalidOffset("The offset is empty. Leave it out, or use -1, now, or one that the server returned.")


def _since(
    context: Context, request: Request, stream: LiveStream, query: Mapping[str, str]
) -> Response | PiecewiseResponse | Deferred:
    start = since(context, stream, query)
    if ranges.is_range_read(query):
        return ranges.respond(context, request, stream, start, query)
    cut = partial(context.engine.reader.chunk, stream, start)
    return catch_up_response(context, request, stream, cut, since_offset(stream, start), is_cacheable=False)


def _tail(stream: LiveStream, tail: Offset) -> Response:
    headers = (
        NO_STORE + content_type(stream.type.header) + next_offset(stream.id, tail.message_index, tail.byte_position)
    )
    closed = STREAM_CLOSED if stream.durable_closed else b""
    return Response(OK, headers + UP_TO_DATE + closed, b"[]" if stream.type.json else b"")
