"""Search the messages of a range for a text (our extension `find`; see docs/extensions.md).

Invariant: one request scans a limited part of the range, at the speed of the C library, and returns where to continue.
So a search over a whole stream is a series of short requests, which do not delay other clients.
"""

from __future__ import annotations

import base64
from bisect import bisect_right
from itertools import accumulate
from typing import Final

import msgspec

from headwater.core.errors import BadRequest
from headwater.core.offsets import Offset
from headwater.engine.reading import ReadChunk
from headwater.http.context import Context
from headwater.http.headers import JSON_TYPE, NO_STORE, OK, next_offset, offset_text
from headwater.http.responses import Response

SCAN_BYTES: Final = 1024 * 1024
"""Bytes that one request scans, cut at a message boundary; of a larger message only this many bytes."""
MESSAGES_MAX: Final = 20_000
"""Messages that one request scans; a text may span message boundaries at each of them, which is not a match."""
MATCHES_MAX: Final = 200
"""Matches in one response."""
MATCH_BYTES_MAX: Final = 64 * 1024
"""Longer messages are truncated in the response; a read of their offsets returns them completely."""
TEXT_MAX: Final = 1000
"""Length of the text to find."""

_encode: Final = msgspec.json.Encoder().encode


class Match(msgspec.Struct, omit_defaults=True, rename={"message_index": "position"}):
    """One message that contains the text."""

    offset: str
    next_offset: str
    message_index: int
    size: int
    time_ms: int = 0
    """Its arrival time; 0 if unknown."""
    text: str | None = None
    """The content of JSON and text; other content is in `base64`."""
    base64: str | None = None
    is_cut: bool = False


class Found(msgspec.Struct):
    matches: list[Match]
    next_offset: str
    scanned_bytes: int
    has_more: bool


def check_text(text: str) -> bytes:
    """The text to search for as bytes, in lower case."""
    if not text or len(text) > TEXT_MAX:
        raise BadRequest(f"find must have 1 to {TEXT_MAX} characters, not {len(text)}.")
    return text.encode("utf-8", "surrogateescape").lower()


def respond(context: Context, chunk: ReadChunk, wanted: bytes, until: Offset) -> Response:
    """Respond with the messages of a chunk that contain a text, ignoring the case of ASCII letters."""
    content = _first_bytes(context, chunk)
    lengths = context.engine.reader.lengths(chunk)
    ends = list(accumulate(lengths))
    numbers = _matching(content.lower(), ends, wanted)
    end, scanned = chunk.end, chunk.length
    if len(numbers) > MATCHES_MAX:
        numbers = numbers[:MATCHES_MAX]
        scanned = ends[numbers[-1]]
        end = Offset(chunk.start.message_index + numbers[-1] + 1, chunk.start.byte_position + scanned)
    bounds = [0, *ends]
    times = context.engine.reader.arrivals(chunk) if numbers else ()
    matches = [_match(chunk, content, number, bounds[number], bounds[number + 1], times[number]) for number in numbers]
    context.metrics.read_bytes += scanned
    body = _encode(Found(matches, offset_text(chunk.stream.id, end), scanned, end < until))
    headers = NO_STORE + JSON_TYPE + next_offset(chunk.stream.id, end.message_index, end.byte_position)
    return Response(OK, headers, body)


def _first_bytes(context: Context, chunk: ReadChunk) -> bytes:
    """The content of a chunk, or the beginning of a single message that is larger than a scan."""
    pieces = []
    size = 0
    for piece in context.engine.reader.slices(chunk):
        pieces.append(bytes(piece))
        size += len(piece)
        if size >= 2 * SCAN_BYTES:
            break
    return b"".join(pieces)


def _matching(content: bytes, ends: list[int], wanted: bytes) -> list[int]:
    """The numbers of the messages that contain the text, at most one more than a response may have."""
    found: list[int] = []
    at = content.find(wanted)
    while at >= 0 and len(found) <= MATCHES_MAX:
        number = bisect_right(ends, at)
        if number >= len(ends):
            break
        if at + len(wanted) <= ends[number]:
            found.append(number)
        # Otherwise it spans two messages, as does every later occurrence in this one.
        at = content.find(wanted, ends[number])
    return found


def _match(chunk: ReadChunk, content: bytes, number: int, start: int, end: int, time_ms: int) -> Match:
    stream = chunk.stream
    first = chunk.start
    separator = 1 if stream.type.json else 0
    size = end - start - separator
    data = content[start : start + min(size, MATCH_BYTES_MAX)]
    before, after = (
        offset_text(stream.id, Offset(first.message_index + number + step, first.byte_position + at))
        for step, at in enumerate((start, end))
    )
    is_text = stream.type.json or stream.type.header.lower().startswith("text/")
    return Match(
        before,
        after,
        first.message_index + number,
        size,
        time_ms,
        data.decode("utf-8", "replace") if is_text else None,
        None if is_text else base64.b64encode(data).decode(),
        size > MATCH_BYTES_MAX,
    )
