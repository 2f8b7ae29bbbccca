"""Responses with a chunk of a stream: headers, ETag, caching and body."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from headwater.engine.reading import SLICE_BYTES, ReadChunk
from headwater.engine.stream import LiveStream
from headwater.http.compression import CHUNK_MAX_BYTES, MIN_BYTES, accepted_coding, is_compressible
from headwater.http.context import Context
from headwater.http.headers import (
    NO_STORE,
    NOT_MODIFIED,
    OK,
    STREAM_CLOSED,
    UP_TO_DATE,
    VARY_ENCODING,
    content_type,
    header,
    next_offset,
    next_position,
)
from headwater.http.request import Request
from headwater.http.responses import Buffer, Deferred, PiecewiseResponse, Response

MAX_AGE_SECS: Final = 60
STALE_SECS: Final = 300
"""The values that the protocol suggests for shared streams (§8.1)."""


def catch_up_response(
    context: Context,
    request: Request,
    stream: LiveStream,
    cut: Callable[[int], ReadChunk],
    extra: bytes = b"",
    *,
    is_cacheable: bool | None = None,
) -> Response | PiecewiseResponse | Deferred:
    """Respond with a chunk, compressed if the client accepts it; `cut` makes a chunk of a number of bytes."""
    accepted = request.headers.get(b"accept-encoding")
    max_bytes = context.limits.max_chunk_bytes
    compression = context.compression
    if accepted is None or compression is None or not is_compressible(stream.type.media):
        return chunk_response(context, request, cut(max_bytes), extra, is_cacheable=is_cacheable)
    coding = accepted_coding(accepted)
    chunk = cut(max_bytes if coding is None else min(max_bytes, CHUNK_MAX_BYTES))
    if coding is None or not MIN_BYTES <= chunk.length <= CHUNK_MAX_BYTES or compression.is_busy:
        return chunk_response(context, request, chunk, extra, is_cacheable=is_cacheable)
    etag = etag_of(chunk, coding)
    headers = _headers(context, chunk, etag, extra, is_cacheable) + header("Content-Encoding", coding)
    condition = request.headers.get(b"if-none-match")
    if condition is not None and matches(condition, etag):
        return Response(NOT_MODIFIED, headers)
    context.metrics.read_bytes += chunk.length
    kept = compression.get(etag)
    if kept is not None:
        return Response(OK, headers, kept)
    if context.engine.deferring is not None:
        context.engine.reader.fetch(chunk)
    begin = partial(compression.make, etag, coding, partial(_body, context, chunk))
    return Deferred(begin, partial(Response, OK, headers))


def chunk_response(
    context: Context, request: Request, chunk: ReadChunk, extra: bytes = b"", *, is_cacheable: bool | None = None
) -> Response | PiecewiseResponse:
    """Respond with a chunk, or with 304 if the client already has it.

    By default only full chunks before the tail are cacheable: at the tail, the same request soon gets another response.
    """
    etag = etag_of(chunk)
    headers = _headers(context, chunk, etag, extra, is_cacheable)
    condition = request.headers.get(b"if-none-match")
    if condition is not None and matches(condition, etag):
        return Response(NOT_MODIFIED, headers)
    reader = context.engine.reader
    context.metrics.read_bytes += chunk.length
    if chunk.length <= SLICE_BYTES:
        return Response(OK, headers, _body(context, chunk))
    if chunk.stream.type.json:
        return PiecewiseResponse(
            OK, headers, chunk.length + 1, as_array(reader.slices(chunk, waits=True), chunk.length)
        )
    return PiecewiseResponse(OK, headers, chunk.length, reader.slices(chunk, waits=True))


def _body(context: Context, chunk: ReadChunk) -> bytes:
    """The body of a chunk."""
    data = b"".join(context.engine.reader.buffers(chunk))
    return b"[" + data[:-1] + b"]" if chunk.stream.type.json else data


def _headers(context: Context, chunk: ReadChunk, etag: bytes, extra: bytes, is_cacheable: bool | None) -> bytes:
    if is_cacheable is None:
        is_cacheable = not chunk.up_to_date
    varies = chunk.length >= MIN_BYTES and context.compression is not None and is_compressible(chunk.stream.type.media)
    return b"".join(
        (
            cache_control(context, chunk.stream) if is_cacheable else NO_STORE,
            content_type(chunk.stream.type.header),
            next_offset(chunk.stream.id, chunk.end.message_index, chunk.end.byte_position),
            next_position(chunk.end.message_index),
            UP_TO_DATE if chunk.up_to_date else b"",
            STREAM_CLOSED if chunk.closed else b"",
            b"ETag: " + etag + b"\r\n",
            VARY_ENCODING if varies else b"",
            extra,
        )
    )


def as_array(pieces: Iterator[Buffer], length: int) -> Iterator[Buffer]:
    """Convert stored JSON messages to one array: add brackets, and remove the comma after the last."""
    yield b"["
    left = length - 1
    for piece in pieces:
        yield piece[:left] if len(piece) > left else piece
        left -= len(piece)
    yield b"]"


def etag_of(chunk: ReadChunk, coding: str = "") -> bytes:
    """An ETag that depends on the stream's incarnation, the range, closure (protocol §8.1) and the coding of the
    body."""
    suffix = b":c" if chunk.closed else b""
    if coding:
        suffix += b"-" + coding.encode()
    start, end = chunk.start, chunk.end
    return b'"%016x:%016x_%016x:%016x_%016x%b"' % (
        chunk.stream.id,
        start.message_index,
        start.byte_position,
        end.message_index,
        end.byte_position,
        suffix,
    )


def cache_control(context: Context, stream: LiveStream) -> bytes:
    """How long caches may keep data of the stream: as configured, but not beyond its expiry (§5.6)."""
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


def matches(condition: bytes, etag: bytes) -> bool:
    """Whether If-None-Match contains an ETag, by weak comparison: `*`, lists and W/ are allowed (RFC 9110 §13.1.2)."""
    if condition.strip() == b"*":
        return True
    return any(tag.strip().removeprefix(b"W/") == etag for tag in condition.split(b","))
