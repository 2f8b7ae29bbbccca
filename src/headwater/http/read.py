"""GET: read a stream, in one of three modes: catch-up, long-poll, server-sent events (protocol §5.6 to §5.8)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from headwater.core.cursors import next_cursor
from headwater.core.errors import BadRequest, InvalidOffset
from headwater.core.offsets import NOW
from headwater.engine.reading import SLICE_BYTES, Chunk
from headwater.http import long_poll, ranges, sse
from headwater.http.events import as_array
from headwater.http.request import Request
from headwater.http.response import (
    NO_STORE,
    NOT_MODIFIED,
    OK,
    STREAM_CLOSED,
    UP_TO_DATE,
    content_type,
    header,
    next_offset,
)

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection

_CACHEABLE: Final = "max-age=60, stale-while-revalidate=300"


def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "read"
    query = target.query
    token = query.get("offset")
    live = query.get("live")
    if token == "":
        raise InvalidOffset("The offset is empty. Leave it out, or use -1, now, or one that the server returned.")
    if live is not None:
        if live not in _LIVE_MODES:
            raise BadRequest(f"live must be long-poll or sse, not {live!r}.")
        if token is None:
            raise BadRequest("A live read needs an offset: -1, now, or one that the server returned.")
        connection.operation = live
    stream = app.engine.look_up(target.name, touch=True)
    start = app.engine.reader.resolve(stream, token)
    if len(query) > 1 and ranges.asked_for(query):
        ranges.handle(app, connection, request, stream, start, query)
        return
    if live is not None:
        _LIVE_MODES[live](app, connection, stream, start, query.get("cursor"))
        return
    if token == NOW:
        body = b"[]" if stream.type.json else b""
        headers = NO_STORE + content_type(stream.type.header) + next_offset(start.index, start.position)
        closed = STREAM_CLOSED if stream.durable_closed else b""
        connection.reply(OK, headers + UP_TO_DATE + closed, body)
        return
    chunk = app.engine.reader.chunk(stream, start, app.limits.max_chunk_bytes)
    reply_chunk(app, connection, request, chunk)


def reply_chunk(app: App, connection: Connection, request: Request, chunk: Chunk, extra: bytes = b"") -> None:
    """Answer with a chunk, or with 304 when the client has it already."""
    etag = etag_of(chunk)
    headers = b"".join(
        (
            cache_control(app, chunk),
            content_type(chunk.stream.type.header),
            next_offset(chunk.end.index, chunk.end.position),
            ranges.position(chunk.end.index),
            UP_TO_DATE if chunk.up_to_date else b"",
            STREAM_CLOSED if chunk.closed else b"",
            b"ETag: " + etag + b"\r\n",
            extra,
        )
    )
    asked = request.headers.get(b"if-none-match")
    if asked is not None and _matches(asked, etag):
        connection.reply(NOT_MODIFIED, headers)
        return
    reader = app.engine.reader
    json = chunk.stream.type.json
    app.metrics.read_bytes += chunk.length
    if chunk.length <= SLICE_BYTES:
        data = b"".join(reader.buffers(chunk))
        connection.reply(OK, headers, b"[" + data[:-1] + b"]" if json else data)
    elif json:
        slices = as_array(reader.slices(chunk), chunk.length)
        connection.reply_slices(OK, headers, chunk.length + 1, slices)
    else:
        connection.reply_slices(OK, headers, chunk.length, reader.slices(chunk))


def etag_of(chunk: Chunk) -> bytes:
    """Differs with the stream's incarnation, the range and closure (protocol §8.1)."""
    suffix = b":c" if chunk.closed else b""
    return b'"%016x:%b:%b%b"' % (chunk.stream.id, str(chunk.start).encode(), str(chunk.end).encode(), suffix)


def cache_control(app: App, chunk: Chunk) -> bytes:
    """Only full chunks below the tail never change, so only they may be kept by a cache."""
    if app.cache_control == "no-store" or chunk.up_to_date:
        return NO_STORE
    return header("Cache-Control", f"{app.cache_control}, {_CACHEABLE}")


def cursor_for(app: App, echoed: str | None) -> str:
    return next_cursor(app.engine.now_ms(), app.cursor_interval_secs, echoed, random.random())


def _matches(asked: bytes, etag: bytes) -> bool:
    """If-None-Match compares weakly: `*`, lists and W/ are all allowed (RFC 9110 §13.1.2)."""
    if asked.strip() == b"*":
        return True
    return any(tag.strip().removeprefix(b"W/") == etag for tag in asked.split(b","))


_LIVE_MODES: Final = {"long-poll": long_poll.begin, "sse": sse.begin}
