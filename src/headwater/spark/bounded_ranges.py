"""Ranges on servers that can end a read at an offset: planned by offsets, split by the server, read as frames.

Invariant: a span has an end, so reading it again gives the same messages, no matter what was appended since. Planning
does not read any data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from headwater.spark.message_runs import MessageRun, from_frames
from headwater.spark.offsets import BEGINNING, Place, bytes_between, incarnation_of, respelled, split_token
from headwater.spark.protocol import Range, StreamsClient
from headwater.spark.read_tasks import Span

_FAN_OUT: Final = 16
_REFINEMENTS: Final = 2
"""How often the remaining budget is refined; after two, at most about 1/16² of a range is unused."""
_SPLITS_MAX: Final = 10_000


def span(stream: str, start: Place, end: Place) -> Span:
    return Span(stream, start, end, bytes_between(start, end), bounded=True)


def split(client: StreamsClient, whole: Span, parts: int) -> list[Span]:
    """Split a span into about `parts` spans of the same size."""
    incarnation = incarnation_of(whole.end.offset)
    ranges = client.splits(whole.stream, _exact(whole.start, whole.end), whole.end.offset, min(parts, _SPLITS_MAX))
    return [
        Span(
            whole.stream,
            Place(respelled(part.start, incarnation), part.start_position),
            Place(respelled(part.end, incarnation), part.end_position),
            part.bytes,
            bounded=True,
        )
        for part in ranges
    ]


def check_retained(client: StreamsClient, stream: str, start: Place, end: Place) -> None:
    """Raise the server's error if a part of the range cannot be read."""
    client.splits(stream, _exact(start, end), end.offset, 1)


def narrow(
    client: StreamsClient, stream: str, start: Place, end: Place, first: int, last: float
) -> tuple[Place, Place]:
    """A range that includes the positions from `first` to before `last`, and possibly a few more."""
    while end.position - start.position > _FAN_OUT:
        ranges = client.splits(stream, _exact(start, end), end.offset, _FAN_OUT)
        used = [part for part in ranges if part.end_position > first and part.start_position < last]
        if not used or len(used) == len(ranges):
            break
        start, end = Place(used[0].start, used[0].start_position), _end(used[-1])
    return start, end


def cut(client: StreamsClient, stream: str, start: Place, end: Place, rows_max: float, bytes_max: float) -> Place:
    """The end of a batch within a budget; at least one message."""
    at = start
    refinements = 0
    while refinements <= _REFINEMENTS:
        rows_left = rows_max - (at.position - start.position)
        bytes_left = bytes_max - bytes_between(start, at)
        if end.position - at.position <= rows_left and bytes_between(at, end) <= bytes_left:
            return end
        ranges = client.splits(stream, _exact(at, end), end.offset, _FAN_OUT)
        taken = _fitting(ranges, rows_left, bytes_left)
        if taken:
            at = _end(ranges[taken - 1])
            end = _end(ranges[taken])
            refinements += 1
        elif ranges[0].end_position - ranges[0].start_position <= 1:
            # A single message exceeds the budget: take it alone, or leave it to the next batch.
            return _end(ranges[0]) if at == start else at
        else:
            end = _end(ranges[0])
            refinements += at != start
    return at


def read(client: StreamsClient, span: Span, *, times: bool = False) -> Iterator[MessageRun]:
    """Read a span, with arrival times if `times`.

    Offsets have the form of its end, so a retry after an upgrade gives the same rows.
    """
    offset = _exact(span.start, span.end)
    incarnation = incarnation_of(span.end.offset)
    while split_token(offset) != split_token(span.end.offset):
        chunk, timed = client.frames(span.stream, offset, span.end.offset, times=times)
        yield from_frames(span.stream, chunk.content_type, chunk.body, respelled(offset, incarnation), timed=timed)
        offset = chunk.next_offset


def _exact(start: Place, end: Place) -> str:
    """The offset of a start. The beginning is written out, because servers read `-1` as the earliest retained one."""
    return respelled(BEGINNING, incarnation_of(end.offset)) if start.offset == BEGINNING else start.offset


def _fitting(ranges: list[Range], rows_left: float, bytes_left: float) -> int:
    """How many of the leading ranges fit; never all of them, because the whole does not fit."""
    size = 0
    for taken, part in enumerate(ranges):
        size += part.bytes
        if size > bytes_left or part.end_position - ranges[0].start_position > rows_left:
            return taken
    return len(ranges) - 1


def _end(part: Range) -> Place:
    return Place(part.end, part.end_position)
