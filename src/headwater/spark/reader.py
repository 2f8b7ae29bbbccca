"""Batch reads: what the streams hold when the read is planned, or between two given offsets.

Invariant: start and end of every stream are fixed on the driver, once, before any task reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from headwater.spark.access import Planner, ask_each, read_batches, tail_of
from headwater.spark.arrow import Layout
from headwater.spark.counted import TO_THE_TAIL, Counter
from headwater.spark.discovery import Discovery
from headwater.spark.errors import OptionError, StreamMissing
from headwater.spark.offsets import BEGINNING, START, Place, Places, split_token
from headwater.spark.options import LATEST, SourceOptions
from headwater.spark.planning import Task
from headwater.spark.protocol import Head, connect

log = logging.getLogger("headwater.spark")


class BatchReader(DataSourceReader):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._layout = Layout(schema, options.metadata_prefix, options.bad_records)

    def partitions(self) -> list[InputPartition]:
        client = connect(self._options.connection)
        discovery = Discovery(client, self._options)
        discovery.refresh()
        starts: Places = {}
        ends: Places = {}
        bounds: dict[str, bool] = {}
        streams = sorted(discovery.names)
        for stream, head in zip(streams, ask_each(self._head, streams), strict=True):
            if head is None:
                continue
            starts[stream] = starting_place(self._options, stream, head)
            ends[stream] = self._ending_place(stream, head)
            bounds[stream] = head.bounds_reads
        tasks: list[InputPartition] = []
        tasks += Planner(client, self._options, Counter(client)).tasks(starts, ends, bounds)
        # Without any, Spark would make one of its own.
        return tasks or [Task(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        return read_batches(connect(self._options.connection), self._layout, partition.spans)

    def _head(self, stream: str) -> Head | None:
        try:
            return connect(self._options.connection).head(stream)
        except StreamMissing as missing:
            if self._options.on_gone != "skip":
                raise
            log.warning("%s Skipped.", missing)
            return None

    def _ending_place(self, stream: str, head: Head) -> Place:
        asked = self._options.ending
        token = asked if isinstance(asked, str) else asked.get(stream, LATEST)
        if not head.bounds_reads:
            if token != LATEST:
                raise OptionError(
                    f"endingOffsets: the server of {stream!r} cannot end a read at an offset; only latest works there."
                )
            return Place(head.offset, TO_THE_TAIL)
        return tail_of(head) if token == LATEST else _at(token)


def starting_place(options: SourceOptions, stream: str, head: Head) -> Place:
    """Where a query begins that has no checkpoint."""
    token = _starting_token(options, stream)
    if token == BEGINNING:
        return START
    if token == LATEST:
        return tail_of(head)
    return _at(token) if head.bounds_reads else Place(token)


def starts_at_tail(options: SourceOptions, stream: str) -> bool:
    """Whether a query without a checkpoint begins where the stream ends at that moment."""
    return _starting_token(options, stream) == LATEST


def _starting_token(options: SourceOptions, stream: str) -> str:
    asked = options.starting
    return asked if isinstance(asked, str) else asked.get(stream, BEGINNING)


def _at(token: str) -> Place:
    return Place(token, split_token(token)[0])
