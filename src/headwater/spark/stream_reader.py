"""Micro-batches: the driver decides where each begins and ends, from the tails of the streams.

Invariant: an end is an offset from the server (or a count from one), so a batch that is planned again after a crash
reads the same bytes. This module keeps no state that a restart needs.
"""

from __future__ import annotations

import bisect
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headwater.spark import bounded_ranges
from headwater.spark.arrow import Layout
from headwater.spark.errors import (
    DataGoneError,
    DataShorterThanPlannedError,
    OptionError,
    SourceRecreatedError,
)
from headwater.spark.offsets import (
    START,
    Place,
    Places,
    SplitPlan,
    are_of_two_streams,
    at,
    bytes_between,
    incarnation_of,
    offset_to_json,
    places_from_json,
)
from headwater.spark.options import LATEST, SourceOptions
from headwater.spark.planner import Planner, beginning_of, map_parallel, read_batches, tail_of
from headwater.spark.protocol import READ_AGAIN, Head, StreamsClient, connect
from headwater.spark.read_tasks import ReadTask
from headwater.spark.reader import check_names, starting_place, starts_at_tail
from headwater.spark.session import warn_of_slow_sockets
from headwater.spark.stream_heads import StreamHeads, stream_heads

log = logging.getLogger("headwater.spark")

_NO_LIMIT: Final = float("inf")
_CUTS_MAX: Final = 64
"""The most streams that are cut for one batch: each costs up to three requests."""


class MicroBatchReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query, in a Python process beside the driver. Tasks have a copy, which only reads."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        if options.ending != LATEST or options.ending_ms is not None:
            name = "endingOffsets" if options.ending_ms is None else "endingTimestamp"
            raise OptionError(f"{name} is only for batch reads: a streaming query ends when it is stopped.")
        if options.streams:
            check_names(options, options.streams)
        self._options = options
        self._layout = Layout(schema, options.metadata_prefix, options.bad_records, with_headers=options.with_headers)
        self._tails: StreamHeads | None = None
        self._start: dict[str, Any] | None = None
        self._end: dict[str, Any] | None = None
        self._unread: AbstractSet[str] = frozenset()
        """Streams that may have messages after `_start`."""
        self._unread_after: AbstractSet[str] = frozenset()
        """The same for `_end`, the last offset that was returned."""
        self._until: Places | None = None
        self._served = ""
        """The stream that was cut last: the next batch begins with those after it."""
        self._restarted: set[tuple[str, str]] = set()
        self._initial: dict[str, Any] | None = None
        """Where a query without a checkpoint starts. Spark asks several times and must get the same answer."""
        self._planned = False
        self._batch_at = time.monotonic()
        """When the last batch was planned."""

    # -- the driver's side ---------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        if self._initial is None:
            tails = self._follow()
            tails.refresh({})
            heads = list(tails.heads.items())
            places = map_parallel(lambda one: starting_place(tails.client, self._options, *one), heads)
            self._initial = offset_to_json({stream: place for (stream, _), place in zip(heads, places, strict=True)})
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_per_batch_max:
            return ReadMaxRows(self._options.rows_per_batch_max)
        if self._options.bytes_per_batch_max:
            return ReadMaxBytes(self._options.bytes_per_batch_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        tails = self._follow()
        tails.refresh({})
        self._until = {stream: tail_of(head) for stream, head in tails.heads.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        begun = places_from_json(start)
        tails = self._follow()
        if start != self._start:
            # The unread streams are known only after this process has planned a batch.
            self._unread = self._unread_after if start == self._end and self._start is not None else tails.heads.keys()
            self._start = start
        deadline = time.monotonic() + self._options.idle_wait_s
        while True:
            self._unread = self._unread | tails.refresh(begun)
            ends = self._ends(begun, {name: tails.heads[name] for name in self._unread & tails.heads.keys()}, limit)
            if self._is_first:
                # If the first batch is planned again after a crash, it begins where the streams end then. So it reads
                # nothing from streams that start at their tail.
                ends |= {stream: place for stream, place in begun.items() if starts_at_tail(self._options, stream)}
            if self._is_too_little(begun, ends):
                ends = dict(begun)
            left_s = deadline - time.monotonic()
            if ends != begun or self._is_first or self._until is not None or left_s <= 0:
                break
            tails.wait(left_s)
        if ends != begun:
            self._batch_at = time.monotonic()
        else:
            # Spark compares offsets as text, and another plan would change the text.
            return start
        tails.mark_unread(stream for stream in self._unread if ends.get(stream) != begun.get(stream))
        self._unread_after = {
            stream
            for stream in self._unread
            if stream in tails.heads and ends.get(stream) != tail_of(tails.heads[stream])
        }
        self._end = offset_to_json(ends, self._options.plan)
        return self._end

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """The known tails, from which Spark computes the lag."""
        if self._tails is None or not self._tails.heads:
            return None
        return offset_to_json({stream: tail_of(head) for stream, head in self._tails.heads.items()})

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        starts, ends = places_from_json(start), places_from_json(end)
        tails = self._follow()
        moved = {
            stream: place
            for stream, place in ends.items()
            if place != starts.get(stream, START)
            and not (self._is_first and stream in starts and starts_at_tail(self._options, stream))
        }
        heads = {stream: tails.head(stream) for stream in moved}
        tasks: list[InputPartition] = []
        tasks += Planner(tails.client, self._options, tails.counter).tasks(
            starts, moved, heads, SplitPlan.from_json(end)
        )
        self._planned = True
        return tasks

    def commit(self, end: dict[str, Any]) -> None:
        if self._tails is not None and not self._tails.counter.is_empty:
            for stream, place in places_from_json(end).items():
                self._tails.counter.forget(stream, place)

    def stop(self) -> None:
        if self._tails is not None:
            self._tails.close()

    def _follow(self) -> StreamHeads:
        if self._tails is None:
            if _is_spark_process():
                warn_of_slow_sockets(os.environ)
            self._tails = stream_heads(self._options)
        return self._tails

    @property
    def _is_first(self) -> bool:
        """Whether the first batch of a query is being planned: only then Spark asks for the initial offset."""
        return self._initial is not None and not self._planned

    def _is_too_little(self, begun: Mapping[str, Place], ends: Places) -> bool:
        """Whether to wait for more rows before the next batch."""
        options = self._options
        if not options.rows_per_batch_min or self._until is not None or self._is_first:
            return False
        if time.monotonic() - self._batch_at >= options.batch_delay_max_s:
            return False
        new = ((ends[stream], begun.get(stream, START)) for stream in self._unread if stream in ends)
        return sum(max(0, end.position - start.position) for end, start in new) < options.rows_per_batch_min

    # -- the end of a batch --------------------------------------------------------------------------------------

    def _ends(self, begun: Mapping[str, Place], heads: dict[str, Head], limit: ReadLimit) -> Places:
        limited = not isinstance(limit, ReadAllAvailable)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._options.rows_per_batch_max
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.bytes_per_batch_max
        budget = _Budget(rows if limited and rows else _NO_LIMIT, size if limited and size else _NO_LIMIT)
        ends = dict(begun)
        waiting: dict[str, tuple[Place, Place]] = {}
        for stream, head in heads.items():
            place = begun[stream] if stream in begun else beginning_of(head, self._options.on_gone)
            tail = self._capped(stream, head)
            if tail is None:
                continue
            if head.bounds_reads:
                if are_of_two_streams(tail.offset, head.offset):
                    # It was created again after this run started; the next run reads it.
                    self._recreated(stream, tail, head)
                    continue
                if are_of_two_streams(place.offset, head.offset) or tail.position < place.position:
                    place = self._recreated(stream, place, head)
                if tail.position > place.position:
                    waiting[stream] = place, tail
            elif place.offset < tail.offset:
                ends[stream] = self._follow().counter.advance(stream, place, *budget.rest())
                budget.take(ends[stream].position - place.position, 0)
        self._share(waiting, budget, ends)
        return ends

    def _share(self, waiting: dict[str, tuple[Place, Place]], budget: _Budget, ends: Places) -> None:
        """Share a budget: include small streams whole, and cut some of the large ones, in turn."""
        sizes = {
            stream: (tail.position - place.position, bytes_between(place, tail))
            for stream, (place, tail) in waiting.items()
        }
        if budget.fits(*map(sum, zip(*sizes.values(), strict=True))) if sizes else True:
            ends.update({stream: tail for stream, (_, tail) in waiting.items()})
            return
        rows_fair, bytes_fair = (rest / len(sizes) for rest in budget.rest())
        large = []
        for stream, (rows, size) in sizes.items():
            if rows <= rows_fair and size <= bytes_fair:
                ends[stream] = waiting[stream][1]
                budget.take(rows, size)
            else:
                large.append(stream)
        for stream, end in self._cut_some(waiting, sorted(large), budget):
            if budget.spent:
                break
            place = waiting[stream][0]
            ends[stream] = end
            budget.take(end.position - place.position, bytes_between(place, end))
            self._served = stream

    def _cut_some(
        self, waiting: dict[str, tuple[Place, Place]], large: list[str], budget: _Budget
    ) -> list[tuple[str, Place]]:
        """The ends for the large streams whose turn it is, each with an equal share, requested in parallel."""
        client = self._follow().client
        turn = bisect.bisect_right(large, self._served)
        rows_total, bytes_total = budget.rest()
        count = int(max(1, min(len(large), _CUTS_MAX, rows_total, bytes_total)))
        streams = (large[turn:] + large[:turn])[:count]
        rows_share, bytes_share = rows_total / count, bytes_total / count

        def cut(stream: str) -> Place:
            place, tail = waiting[stream]
            return _cut(client, stream, place, tail, rows_share, bytes_share)

        return list(zip(streams, map_parallel(cut, streams), strict=True))

    def _capped(self, stream: str, head: Head) -> Place | None:
        """The tail; for Trigger.AvailableNow the tail at the start of the query, None if the stream did not exist."""
        return tail_of(head) if self._until is None else self._until.get(stream)

    def _recreated(self, stream: str, place: Place, head: Head) -> Place:
        """Where to start in a stream that replaced the one that the query was reading."""
        old, new = incarnation_of(place.offset), incarnation_of(head.offset)
        fails = self._options.on_gone == "fail"
        if old and old != new:
            what = (
                f"Stream {stream!r} was deleted and created again: the query is at {place.offset}, of incarnation"
                f" {old}, and the stream is now incarnation {new}."
            )
            if fails:
                raise SourceRecreatedError(f"{what} {READ_AGAIN}", status=410, code="stream_recreated")
        else:
            what = (
                f"Stream {stream!r} ends at {head.offset}, but the query is at {place.offset}: the stream was deleted"
                " and created again, or the server lost data."
            )
            if fails:
                raise DataShorterThanPlannedError(f"{what} {READ_AGAIN}")
        if (stream, new) not in self._restarted:
            self._restarted.add((stream, new))
            log.warning("%s Reading it from its beginning.", what)
        return START

    # -- the tasks' side -----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ReadTask)
        return read_batches(connect(self._options.connection), self._layout, partition.spans)


def _cut(client: StreamsClient, stream: str, start: Place, end: Place, rows_max: float, bytes_max: float) -> Place:
    try:
        return bounded_ranges.cut(client, stream, start, end, rows_max, bytes_max)
    except DataGoneError as gone:
        if gone.earliest is None or isinstance(gone, SourceRecreatedError):
            raise
        # Missing data does not use the budget; the planner applies onGone to it.
        return bounded_ranges.cut(client, stream, at(gone.earliest), end, rows_max, bytes_max)


def _is_spark_process() -> bool:
    """Whether Spark started this process, so that its environment has the settings of the session."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return main is not None and main.name.startswith("pyspark.")


class _Budget:
    """How many rows and bytes a batch may still have."""

    def __init__(self, rows: float, size: float) -> None:
        self._rows = rows
        self._bytes = size

    @property
    def spent(self) -> bool:
        return self._rows < 1 or self._bytes < 1

    def rest(self) -> tuple[float, float]:
        return self._rows, self._bytes

    def fits(self, rows: int, size: int) -> bool:
        return rows <= self._rows and size <= self._bytes

    def take(self, rows: int, size: int) -> None:
        self._rows -= rows
        self._bytes -= size
