"""Ranges of streams on servers that cannot bound a read: a place is an offset and how many messages after it.

The protocol alone has no end for a read and no offset for a single message, so what a batch holds is said by count:
read from the offset, drop what was read before, take as many as planned. A log does not change, so that is the same
for ever. The driver has to read once to count, and hands small bodies over to the tasks. Streams that are not JSON have
no message boundaries in a read; there the count is of bytes, and a span is one row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from headwater.spark.arrow import Messages, from_values, is_json, split_json
from headwater.spark.errors import DataShorterThanPlanned
from headwater.spark.offsets import Place
from headwater.spark.planning import Span
from headwater.spark.protocol import Chunk, Client

INLINE_BYTES: Final = 1024 * 1024
_KEPT_BYTES: Final = 64 * 1024 * 1024
_ROWS_PER_RUN: Final = 20_000

TO_THE_TAIL: Final = -1
"""As the position of an end: read until the server says that there is no more."""


class Counter:
    """Reads ahead on the driver, and keeps what it read for the next question."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: OrderedDict[tuple[str, str], Chunk] = OrderedDict()

    def advance(self, stream: str, start: Place, rows_max: float, bytes_max: float) -> Place:
        """How far a batch may go from `start`: at most to the end of one answer of the server."""
        chunk = self._chunk(stream, start)
        sizes = _sizes(chunk)
        done = start.skip
        if done >= len(sizes):
            return start
        if not is_json(chunk.content_type):
            total = len(chunk.body)
            taken = int(min(total - done, bytes_max))
        else:
            taken, size = 0, 0
            total = len(sizes)
            while done + taken < total and taken < rows_max and (not taken or size + sizes[done + taken] <= bytes_max):
                size += sizes[done + taken]
                taken += 1
        if done + taken == total:
            return Place(chunk.next_offset, start.position + taken)
        return Place(start.offset, start.position + taken, done + taken)

    def span(self, stream: str, start: Place, end: Place) -> Span:
        chunk = self._kept.get((stream, start.offset))
        inline = chunk if chunk is not None and len(chunk.body) <= INLINE_BYTES else None
        return Span(stream, start, end, len(chunk.body) if chunk else 0, bounded=False, inline=inline)

    def _chunk(self, stream: str, start: Place) -> Chunk:
        """The answer at this offset, read anew when all of what is kept was used."""
        key = (stream, start.offset)
        kept = self._kept.get(key)
        if kept is not None and start.skip < len(_sizes(kept)):
            return kept
        chunk = self._client.read(stream, start.offset)
        self._kept[key] = chunk
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(len(one.body) for one in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return chunk

    def forget(self, stream: str, before: Place) -> None:
        """What lies before a committed place is not asked for again."""
        for key in [key for key in self._kept if key[0] == stream and key[1] != before.offset]:
            del self._kept[key]


def read(client: Client, span: Span) -> Iterator[Messages]:
    """Exactly the planned messages, in runs."""
    to_the_tail = span.end.position == TO_THE_TAIL
    left = None if to_the_tail else span.end.position - span.start.position
    offset, skip, position = span.start.offset, span.start.skip, span.start.position
    chunk = span.inline
    while left is None or left > 0:
        if chunk is None:
            chunk = client.read(span.stream, offset)
        runs = _runs(chunk, skip, left)
        if not to_the_tail and not runs and chunk.next_offset == offset:
            raise DataShorterThanPlanned(
                f"Stream {span.stream!r} ends at {offset}, {left} messages before what was planned: it was deleted and"
                " created again. Begin with a new checkpoint."
            )
        for at, run in enumerate(runs):
            position_after = position + _length(chunk, run)
            is_last = left is not None and position_after == span.end.position and at == len(runs) - 1
            last_end = span.end.offset if is_last and not span.end.skip else None
            yield replace(
                from_values(span.stream, chunk.content_type, run, position, last_end), first_position=position
            )
            left = None if left is None else left - (position_after - position)
            position = position_after
        if to_the_tail and (chunk.up_to_date or chunk.next_offset == offset):
            return
        skip = max(0, skip - len(_sizes(chunk)))
        offset, chunk = chunk.next_offset, None


def _runs(chunk: Chunk, skip: int, left: int | None) -> list[list[bytes]]:
    if not is_json(chunk.content_type):
        taken = chunk.body[skip:] if left is None else chunk.body[skip : skip + left]
        return [[taken]] if taken else []
    values = split_json(chunk.body)[skip:]
    if left is not None:
        values = values[:left]
    return [[bytes(value) for value in values[at : at + _ROWS_PER_RUN]] for at in range(0, len(values), _ROWS_PER_RUN)]


def _length(chunk: Chunk, run: list[bytes]) -> int:
    return len(run) if is_json(chunk.content_type) else len(run[0])


def _sizes(chunk: Chunk) -> list[int] | range:
    """The length of each message, or as many entries as there are bytes."""
    if is_json(chunk.content_type):
        return [len(bytes(value)) for value in split_json(chunk.body)]
    return range(len(chunk.body))
