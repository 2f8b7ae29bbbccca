"""A chunk of a stream as an answer: headers, ETag, caching, and the body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headwater.engine.reading import SLICE_BYTES, ReadChunk
from headwater.engine.stream import LiveStream
from headwater.http.context import Context
from headwater.http.headers import (
    NO_STORE,
    NOT_MODIFIED,
    OK,
    STREAM_CLOSED,
    UP_TO_DATE,
    content_type,
    header,
    next_offset,
    next_position,
)
from headwater.http.request import Request
from headwater.http.responses import Buffer, PiecewiseResponse, Response

MAX_AGE_SECS: Final = 60
STALE_SECS: Final = 300
"""As the protocol suggests for shared streams (§8.1)."""


def chunk_response(
    context: Context, request: Request, chunk: ReadChunk, extra: bytes = b"", *, is_cacheable: bool | None = None
) -> Response | PiecewiseResponse:
    """Answer with a chunk, or with 304 if the client has it already.

    By default only full chunks below the tail are cacheable: at the tail, the same request soon gets another answer.
    """
    etag = etag_of(chunk)
    if is_cacheable is None:
        is_cacheable = not chunk.up_to_date
    headers = b"".join(
        (
            cache_control(context, chunk.stream) if is_cacheable else NO_STORE,
            content_type(chunk.stream.type.header),
            next_offset(chunk.stream.id, chunk.end.message_index, chunk.end.byte_position),
            next_position(chunk.end.message_index),
            UP_TO_DATE if chunk.up_to_date else b"",
            STREAM_CLOSED if chunk.closed else b"",
            b"ETag: " + etag + b"\r\n",
            extra,
        )
    )
    asked = request.headers.get(b"if-none-match")
    if asked is not None and matches(asked, etag):
        return Response(NOT_MODIFIED, headers)
    reader = context.engine.reader
    json = chunk.stream.type.json
    context.metrics.read_bytes += chunk.length
    if chunk.length <= SLICE_BYTES:
        data = b"".join(reader.buffers(chunk))
        return Response(OK, headers, b"[" + data[:-1] + b"]" if json else data)
    if json:
        return PiecewiseResponse(OK, headers, chunk.length + 1, as_array(reader.slices(chunk), chunk.length))
    return PiecewiseResponse(OK, headers, chunk.length, reader.slices(chunk))


def as_array(pieces: Iterator[Buffer], length: int) -> Iterator[Buffer]:
    """Stored JSON messages as one array: brackets around them, and no comma after the last."""
    yield b"["
    left = length - 1
    for piece in pieces:
        yield piece[:left] if len(piece) > left else piece
        left -= len(piece)
    yield b"]"


def etag_of(chunk: ReadChunk) -> bytes:
    """Differs with the stream's incarnation, the range and closure (protocol §8.1)."""
    suffix = b":c" if chunk.closed else b""
    return b'"%016x:%b:%b%b"' % (chunk.stream.id, str(chunk.start).encode(), str(chunk.end).encode(), suffix)


def cache_control(context: Context, stream: LiveStream) -> bytes:
    """How long caches may keep data of the stream: as configured, and never longer than the stream lives (§5.6)."""
    if context.cache_control == "no-store":
        return NO_STORE
    left_secs = MAX_AGE_SECS + STALE_SECS
    deadline_ms = stream.deadline_ms()
    if deadline_ms is not None:
        left_secs = min(left_secs, (deadline_ms - context.engine.now_ms()) // 1000)
    max_age = min(MAX_AGE_SECS, left_secs)
    if max_age <= 0:
        return NO_STORE
    stale = f", stale-while-revalidate={left_secs - max_age}" if left_secs > max_age else ""
    return header("Cache-Control", f"{context.cache_control}, max-age={max_age}{stale}")


def matches(asked: bytes, etag: bytes) -> bool:
    """If-None-Match compares weakly: `*`, lists and W/ are all allowed (RFC 9110 §13.1.2)."""
    if asked.strip() == b"*":
        return True
    return any(tag.strip().removeprefix(b"W/") == etag for tag in asked.split(b","))
