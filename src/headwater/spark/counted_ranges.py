"""Ranges on servers that cannot end a read at an offset: a place is an offset and a number of messages after it.

The base protocol cannot end a read at an offset and does not send the offset of each message, so a batch is defined by
counts: read from the offset, drop the messages that were read before, take as many as planned. Streams are append-only,
so this always gives the same messages. The driver reads once to count, and passes small bodies to the tasks. Reads of
streams that are not JSON have no message boundaries; for them bytes are counted, and a span is one row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from headwater.spark.errors import DataShorterThanPlannedError
from headwater.spark.message_runs import MessageRun, from_values, is_json, split_json
from headwater.spark.offsets import Place
from headwater.spark.protocol import Chunk, StreamsClient
from headwater.spark.read_tasks import Span

INLINE_BYTES: Final = 1024 * 1024
_KEPT_BYTES: Final = 64 * 1024 * 1024
_ROWS_PER_RUN: Final = 20_000

TO_THE_TAIL: Final = -1
"""An end position that means: read until the server reports the tail."""


class MessageCounter:
    """Reads ahead on the driver and caches the data for the next batch."""

    def __init__(self, client: StreamsClient) -> None:
        self._client = client
        self._kept: OrderedDict[tuple[str, str], Chunk] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def advance(self, stream: str, start: Place, rows_max: float, bytes_max: float) -> Place:
        """The end of a batch that begins at `start`: at most the end of one response of the server."""
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
        """The response at this offset, requested again when the cached one is used up."""
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
        """Drop cached data before a committed place."""
        for key in [key for key in self._kept if key[0] == stream and key[1] != before.offset]:
            del self._kept[key]


def read(client: StreamsClient, span: Span) -> Iterator[MessageRun]:
    """Read exactly the planned messages."""
    to_the_tail = span.end.position == TO_THE_TAIL
    left = None if to_the_tail else span.end.position - span.start.position
    offset, skip, position = span.start.offset, span.start.skip, span.start.position
    chunk = span.inline
    while left is None or left > 0:
        if chunk is None:
            chunk = client.read(span.stream, offset)
        runs = _runs(chunk, skip, left)
        if not to_the_tail and not runs and chunk.next_offset == offset:
            raise DataShorterThanPlannedError(
                f"Stream {span.stream!r} ends at {offset}, {left} messages before what was planned: it was deleted and"
                " created again. Start with a new checkpoint."
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
