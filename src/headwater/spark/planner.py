"""Plan the ranges of a batch as tasks, and read them.

The planner hides the difference between servers that can end a read at an offset and those that cannot, and applies
`onGone`. Invariant: missing data is an error, or a warning and, with `onGone=bootstrap`, a snapshot row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import pyarrow as pa

from headwater.spark import bounded_ranges, counted_ranges
from headwater.spark.arrow import Layout
from headwater.spark.counted_ranges import MessageCounter
from headwater.spark.errors import DataGoneError, SourceRecreatedError, StreamMissingError
from headwater.spark.message_runs import MessageRun
from headwater.spark.offsets import START, Place, SplitPlan, are_of_two_streams, at
from headwater.spark.options import OnGone, SourceOptions
from headwater.spark.protocol import Head, StreamsClient
from headwater.spark.read_tasks import ReadTask, Span, into_tasks

log = logging.getLogger("headwater.spark")

_PARALLEL_REQUESTS: Final = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_parallel(call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call `call` for each item, several at a time; the results are in the order of the items."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="headwater-request") as pool:
        return list(pool.map(call, items))


def tail_of(head: Head) -> Place:
    return Place(head.offset, head.position or 0)


def beginning_of(head: Head, on_gone: OnGone) -> Place:
    """The earliest place that can be read.

    If a snapshot replaces deleted messages, this is the very beginning, so that `onGone` decides about the snapshot.
    """
    if not head.bounds_reads or head.earliest is None:
        return START
    return START if head.snapshot is not None and on_gone in ("fail", "bootstrap") else at(head.earliest)


class Planner:
    """Plans the tasks that read (start, end] of each stream. Runs on the driver."""

    def __init__(self, client: StreamsClient, options: SourceOptions, counter: MessageCounter) -> None:
        self._client = client
        self._options = options
        self._counter = counter

    def tasks(
        self, starts: Mapping[str, Place], ends: Mapping[str, Place], heads: Mapping[str, Head], plan: SplitPlan
    ) -> list[ReadTask]:
        """The tasks that read from `starts` to `ends`. Streams without a start begin at the earliest message."""
        bounds = {stream: heads[stream].bounds_reads for stream in ends}
        begin = {stream: beginning_of(heads[stream], self._options.on_gone) for stream in ends}
        wanted = [(stream, starts.get(stream, begin[stream]), ends[stream]) for stream in sorted(ends)]
        bounded_ones = [self._forwards(*one, begin[one[0]]) for one in wanted if bounds[one[0]]]
        spans = self._spans([one for one in bounded_ones if one[2].position > one[1].position])
        spans += [self._counter.span(*one) for one in wanted if not bounds[one[0]] and one[1] != one[2]]
        return into_tasks(spans, plan, lambda span, n: bounded_ranges.split(self._client, span, n))

    @staticmethod
    def _forwards(stream: str, start: Place, end: Place, begin: Place) -> tuple[str, Place, Place]:
        """The range to read. One that ends in another incarnation, or before its start, is read from the beginning."""
        is_new = start.position > end.position or are_of_two_streams(start.offset, end.offset)
        return stream, begin if is_new and begin.position < end.position else START if is_new else start, end

    def _spans(self, ranges: list[tuple[str, Place, Place]]) -> list[Span]:
        if self._options.on_gone == "fail":
            # No need to check in advance: a task that finds missing data fails with the server's error.
            return [bounded_ranges.span(*one) for one in ranges]
        return [span for spans in map_parallel(lambda one: self._retained_spans(*one), ranges) for span in spans]

    def _retained_spans(self, stream: str, start: Place, end: Place) -> list[Span]:
        try:
            bounded_ranges.check_retained(self._client, stream, start, end)
        except SourceRecreatedError as recreated:
            log.warning("%s Skipping the planned range of the old stream.", recreated)
            return []
        except DataGoneError as gone:
            return self._replacement_spans(stream, start, end, gone)
        except StreamMissingError as missing:
            if not self._options.waits_for_streams:
                raise
            log.warning("%s Skipped.", missing)
            return []
        return [bounded_ranges.span(stream, start, end)]

    def _replacement_spans(self, stream: str, start: Place, end: Place, gone: DataGoneError) -> list[Span]:
        """The spans to read instead of deleted data."""
        if self._options.on_gone == "bootstrap":
            offset = self._client.head(stream).snapshot
            if offset is None:
                raise gone
            log.warning("%s Continuing after the snapshot at %s.", gone, offset)
            place = at(offset)
            spans = [Span(stream, start, place, 0, bounded=True, snapshot=offset)]
        elif gone.earliest is None or self._options.on_gone == "restart":
            raise gone
        else:
            log.warning("%s Skipped to %s.", gone, gone.earliest)
            place = at(gone.earliest)
            spans = []
        return [*spans, bounded_ranges.span(stream, place, end)] if place.position < end.position else spans


def read_batches(client: StreamsClient, layout: Layout, spans: Iterable[Span]) -> Iterator[pa.RecordBatch]:
    """Read the spans of a task, in order."""
    for span in spans:
        for messages in _read(client, span, times=layout.has_times):
            if len(messages):
                yield layout.batch(messages)


def _read(client: StreamsClient, span: Span, *, times: bool) -> Iterator[MessageRun]:
    if span.snapshot is not None:
        chunk = client.snapshot(span.stream, span.snapshot)
        stored = pa.array([chunk.body], pa.binary())
        yield MessageRun(
            span.stream,
            chunk.content_type,
            stored,
            separated=False,
            first_position=span.end.position,
            last_end=span.snapshot,
            snapshot=True,
        )
    elif span.bounded:
        yield from bounded_ranges.read(client, span, times=times)
    else:
        yield from counted_ranges.read(client, span)
