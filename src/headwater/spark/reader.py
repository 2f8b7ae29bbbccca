"""Batch reads: the messages of streams at the time of planning, or between two given offsets.

Invariant: the driver fixes start and end of every stream once, before any task reads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.spark import bounded_ranges
from headwater.spark.arrow import Layout
from headwater.spark.counted_ranges import TO_THE_TAIL, MessageCounter
from headwater.spark.discovery import Discovery
from headwater.spark.errors import (
    DataGoneError,
    OptionError,
    ServerRefusedError,
    SourceRecreatedError,
    StreamMissingError,
)
from headwater.spark.offsets import BEGINNING, Place, Places, are_of_two_streams, at
from headwater.spark.options import LATEST, SourceOptions
from headwater.spark.planner import Planner, beginning_of, map_parallel, read_batches, tail_of
from headwater.spark.protocol import Head, StreamsClient, connect
from headwater.spark.read_tasks import ReadTask

log = logging.getLogger("headwater.spark")


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows that a query can use: of these streams, and from one position to another."""

    streams: frozenset[str] | None = None
    prefix: str = ""
    first: int = 0
    end: float = float("inf")

    def has(self, stream: str) -> bool:
        return stream.startswith(self.prefix) and (self.streams is None or stream in self.streams)


class BatchReader(DataSourceReader):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self.row_range = RowRange()
        self._layout = Layout(schema, options.metadata_prefix, options.bad_records, with_headers=options.with_headers)

    def partitions(self) -> list[InputPartition]:
        client = connect(self._options.connection)
        heads = self._heads(client)
        starts: Places = {}
        ends: Places = {}
        check_names(self._options, heads)
        for stream, head in heads.items():
            if self.row_range.has(stream):
                start = starting_place(client, self._options, stream, head)
                end = self._ending_place(client, stream, head)
                _check_range(stream, start, end)
                starts[stream], ends[stream] = self._within(client, stream, start, end)
        tasks: list[InputPartition] = []
        tasks += Planner(client, self._options, MessageCounter(client)).tasks(starts, ends, heads, self._options.plan)
        # Without any task, Spark would create one.
        return tasks or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReadTask)
        return read_batches(connect(self._options.connection), self._layout, partition.spans)

    def _within(self, client: StreamsClient, stream: str, start: Place, end: Place) -> tuple[Place, Place]:
        """The part of a range that the query can use, or a little more."""
        rows = self.row_range
        if end.position == TO_THE_TAIL or (rows.first <= start.position and end.position <= rows.end):
            return start, end
        if end.position <= rows.first or rows.end <= start.position:
            return start, start
        try:
            return bounded_ranges.narrow(client, stream, start, end, rows.first, rows.end)
        except DataGoneError:
            # The planner applies onGone to the whole range.
            return start, end

    def _heads(self, client: StreamsClient) -> dict[str, Head]:
        """The heads of all streams, from the server's listing or with one request per stream."""
        if not self._options.streams:
            try:
                tails = client.tails(self._options.prefix)
                return {stream: head for stream, head in tails.items() if self._options.reads(stream)}
            except ServerRefusedError as refused:
                log.debug("no listing of streams: %s", refused)
        discovery = Discovery(client, self._options)
        discovery.refresh()
        streams = sorted(discovery.names)
        found = zip(streams, map_parallel(self._head, streams), strict=True)
        return {stream: head for stream, head in found if head is not None}

    def _head(self, stream: str) -> Head | None:
        try:
            return connect(self._options.connection).head(stream)
        except StreamMissingError as missing:
            if not self._options.waits_for_streams:
                raise
            log.warning("%s Skipped.", missing)
            return None

    def _ending_place(self, client: StreamsClient, stream: str, head: Head) -> Place:
        if self._options.ending_ms is not None:
            return _place_of_time("endingTimestamp", client, stream, self._options.ending_ms, head)
        asked = self._options.ending
        token = asked if isinstance(asked, str) else asked.get(stream, LATEST)
        if not head.bounds_reads:
            if token != LATEST:
                raise OptionError(
                    f"endingOffsets: the server of {stream!r} cannot end a read at an offset; only latest works there."
                )
            return Place(head.offset, TO_THE_TAIL)
        return tail_of(head) if token == LATEST else _place("endingOffsets", client, stream, token, head)


def check_names(options: SourceOptions, streams: Collection[str]) -> None:
    """Reject offsets for streams that the query does not read."""
    for option, given in (("startingOffsets", options.starting), ("endingOffsets", options.ending)):
        unknown = sorted(given.keys() - set(streams)) if not isinstance(given, str) else []
        if unknown:
            raise OptionError(f"{option} names {', '.join(map(repr, unknown[:3]))}, which the query does not read.")


def _check_range(stream: str, start: Place, end: Place) -> None:
    if end.position not in (TO_THE_TAIL, start.position) and end.position < start.position:
        raise OptionError(
            f"startingOffsets {start.offset} of stream {stream!r} is after endingOffsets {end.offset}; swap them."
        )


def starting_place(client: StreamsClient, options: SourceOptions, stream: str, head: Head) -> Place:
    """Where a query without a checkpoint starts."""
    if options.starting_ms is not None:
        return _place_of_time("startingTimestamp", client, stream, options.starting_ms, head)
    token = _starting_token(options, stream)
    if token == BEGINNING:
        return beginning_of(head, options.on_gone)
    if token == LATEST:
        return tail_of(head)
    if not head.bounds_reads:
        return Place(token)
    try:
        return _place("startingOffsets", client, stream, token, head)
    except SourceRecreatedError as recreated:
        if options.on_gone == "fail":
            raise
        log.warning("%s Reading it from its beginning.", recreated)
        return beginning_of(head, options.on_gone)


def _place_of_time(option: str, client: StreamsClient, stream: str, at_ms: int, head: Head) -> Place:
    """The place of the first message that arrived at a time or later."""
    token = client.offset_at(stream, at_ms) if head.bounds_reads else None
    if token is None:
        raise OptionError(f"{option}: the server of {stream!r} does not store when messages arrived; use offsets.")
    return at(token)


def starts_at_tail(options: SourceOptions, stream: str) -> bool:
    """Whether a query without a checkpoint starts at the current tail of the stream."""
    return _starting_token(options, stream) == LATEST


def _starting_token(options: SourceOptions, stream: str) -> str:
    asked = options.starting
    return asked if isinstance(asked, str) else asked.get(stream, BEGINNING)


def _place(option: str, client: StreamsClient, stream: str, token: str, head: Head) -> Place:
    """The place of an offset given by the user, which must be within the stream."""
    place, tail = at(_with_incarnation(client, stream, token, head)), tail_of(head)
    if place.position > tail.position:
        raise OptionError(f"{option} {token} is beyond the end of stream {stream!r}, which is {head.offset}.")
    return place


def _with_incarnation(client: StreamsClient, stream: str, token: str, head: Head) -> str:
    """The token with the incarnation of the stream: a fork accepts offsets of its source."""
    if not are_of_two_streams(token, head.offset):
        return token
    ranges = client.splits(stream, token, head.offset, 1)
    return ranges[0].start if ranges else head.offset
