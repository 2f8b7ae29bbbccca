"""Reads for pipelines: bounded ranges, splits and message boundaries (our extensions; see docs/extensions.md).

`until` ends a catch-up read at an offset, regardless of later appends, so that a planned range always reads the same.
`splits` returns message boundaries that divide a range into parts of about equal size. `frames` sends the messages
after a table of their lengths, so that a reader of any content type can separate them without parsing; `times` adds
their arrival times. `find` returns the messages that contain a text (`http/find`).
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Final

from msgspec import structs

from headwater.core.errors import BadRequest, InvalidOffset
from headwater.core.offsets import NOW, Offset
from headwater.engine.reading import ReadChunk
from headwater.engine.stream import LiveStream
from headwater.http import find
from headwater.http.chunks import catch_up_response
from headwater.http.context import Context
from headwater.http.headers import (
    JSON_TYPE,
    NO_STORE,
    OK,
    STREAM_CLOSED,
    UP_TO_DATE,
    header,
    next_offset,
    next_position,
    offset_text,
)
from headwater.http.request import Request
from headwater.http.responses import Deferred, PiecewiseResponse, Response

SPLITS_MAX: Final = 10_000
"""Parts into which one request can split a range."""
FRAMES_MAX: Final = 50_000
"""Messages in one response with frames: their lengths are computed at once, in about 10 ms."""
FRAMES_TYPE: Final = "application/vnd.headwater.frames"
FRAME_TIMES: Final = b"Stream-Frame-Times: 1\r\n"
PARAMETERS: Final = frozenset(("until", "splits", "frames", "times", "find"))

_COUNT: Final = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


def is_range_read(query: Mapping[str, str]) -> bool:
    return not PARAMETERS.isdisjoint(query)


def not_for_live_reads() -> BadRequest:
    return BadRequest(
        "until, splits, frames, times and find are for catch-up reads; leave out live, and use another offset than now."
    )


def respond(
    context: Context, request: Request, stream: LiveStream, start: Offset, query: Mapping[str, str]
) -> Response | PiecewiseResponse | Deferred:
    """Respond to a read that uses one of the extensions."""
    if query.get("offset") == NOW:
        raise not_for_live_reads()
    if "times" in query and (query["times"] != "1" or "frames" not in query):
        raise BadRequest(f"times must be 1, not {query['times']!r}, and needs frames=1.")
    until = _until(context, stream, start, query.get("until"))
    if "splits" in query:
        return _splits(context, stream, start, until, query["splits"])
    if "find" in query:
        wanted = find.check_text(query["find"])
        until_scan = context.engine.reader.first_messages(stream, start, until, find.MESSAGES_MAX)
        chunk = context.engine.reader.run(stream, start, until_scan, find.SCAN_BYTES)
        return find.respond(context, chunk, wanted, until)
    if "frames" not in query:
        return catch_up_response(context, request, stream, partial(_bounded, context, stream, start, until))
    if query["frames"] == "1":
        until = context.engine.reader.first_messages(stream, start, until, FRAMES_MAX)
        chunk = _bounded(context, stream, start, until, context.limits.max_chunk_bytes)
        return _frames(context, chunk, "times" in query)
    raise BadRequest(f"frames must be 1, not {query['frames']!r}.")


def _until(context: Context, stream: LiveStream, start: Offset, token: str | None) -> Offset:
    until = context.engine.reader.resolve(stream, token if token is not None else NOW)
    if until < start:
        raise InvalidOffset(f"until ({until}) is before offset ({start}); exchange them, or leave out until.")
    return until


def _bounded(context: Context, stream: LiveStream, start: Offset, until: Offset, max_bytes: int) -> ReadChunk:
    chunk = context.engine.reader.run(stream, start, until, max_bytes)
    at_tail = chunk.end.message_index == stream.durable_index
    return structs.replace(chunk, up_to_date=at_tail, closed=at_tail and stream.durable_closed)


def _frames(context: Context, chunk: ReadChunk, with_times: bool) -> PiecewiseResponse:
    """A body of: the count, that many stored lengths of 32 bits, optional arrival times of 64 bits, the stored
    bytes."""
    lengths = array("I", context.engine.reader.lengths(chunk))
    times = context.engine.reader.arrivals(chunk) if with_times else array("Q")
    if sys.byteorder == "big":
        lengths.byteswap()
        times.byteswap()
    prefix = len(lengths).to_bytes(4, "little") + lengths.tobytes() + times.tobytes()
    headers = b"".join(
        (
            NO_STORE,
            header("Content-Type", FRAMES_TYPE),
            header("Stream-Content-Type", chunk.stream.type.header),
            FRAME_TIMES if with_times else b"",
            next_offset(chunk.stream.id, chunk.end.message_index, chunk.end.byte_position),
            next_position(chunk.end.message_index),
            UP_TO_DATE if chunk.up_to_date else b"",
            STREAM_CLOSED if chunk.closed else b"",
        )
    )
    context.metrics.read_bytes += chunk.length
    pieces = chain((prefix,), context.engine.reader.slices(chunk, waits=True))
    return PiecewiseResponse(OK, headers, len(prefix) + chunk.length, pieces)


def _splits(context: Context, stream: LiveStream, start: Offset, until: Offset, count: str) -> Deferred:
    if _COUNT.fullmatch(count) is None or int(count) > SPLITS_MAX:
        raise BadRequest(f"splits must be a whole number from 1 to {SPLITS_MAX}, not {count!r}.")

    last = offset_text(stream.id, start)

    def convert(at: Offset, end: Offset) -> str:
        # Formatted by hand, because encoding 10,000 objects as JSON takes three times as long.
        nonlocal last
        before, last = last, offset_text(stream.id, end)
        return (
            f'{{"start":"{before}","end":"{last}","start_position":{at.message_index},'
            f'"end_position":{end.message_index},"bytes":{end.byte_position - at.byte_position}}}'
        )

    def render(ranges: list[str]) -> Response:
        headers = NO_STORE + JSON_TYPE + next_offset(stream.id, until.message_index, until.byte_position)
        body = f'{{"ranges":[{",".join(ranges)}]}}'.encode()
        return Response(OK, headers + next_position(until.message_index), body)

    return Deferred(partial(context.engine.split, stream, start, until, int(count), convert), render)
