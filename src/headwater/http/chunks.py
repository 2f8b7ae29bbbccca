"""A chunk of a stream as an answer: headers, ETag, caching, and the body whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headwater.engine.reading import SLICE_BYTES, Chunk
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

_CACHEABLE: Final = "max-age=60, stale-while-revalidate=300"


def chunk_response(
    context: Context, request: Request, chunk: Chunk, extra: bytes = b""
) -> Response | PiecewiseResponse:
    """Answer with a chunk, or with 304 if the client has it already."""
    etag = etag_of(chunk)
    headers = b"".join(
        (
            cache_control(context, chunk),
            content_type(chunk.stream.type.header),
            next_offset(chunk.stream.id, chunk.end.index, chunk.end.position),
            next_position(chunk.end.index),
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


def etag_of(chunk: Chunk) -> bytes:
    """Differs with the stream's incarnation, the range and closure (protocol §8.1)."""
    suffix = b":c" if chunk.closed else b""
    return b'"%016x:%b:%b%b"' % (chunk.stream.id, str(chunk.start).encode(), str(chunk.end).encode(), suffix)


def cache_control(context: Context, chunk: Chunk) -> bytes:
    """Only full chunks below the tail never change, so only they may be kept by a cache."""
    if context.cache_control == "no-store" or chunk.up_to_date:
        return NO_STORE
    return header("Cache-Control", f"{context.cache_control}, {_CACHEABLE}")


def matches(asked: bytes, etag: bytes) -> bool:
    """If-None-Match compares weakly: `*`, lists and W/ are all allowed (RFC 9110 §13.1.2)."""
    if asked.strip() == b"*":
        return True
    return any(tag.strip().removeprefix(b"W/") == etag for tag in asked.split(b","))
