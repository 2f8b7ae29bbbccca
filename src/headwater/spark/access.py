"""What a batch of ranges becomes: spans for tasks, with what is to happen when data is gone; and reading them.

Here the two kinds of servers meet, and the option `onGone`. Invariant: data that is gone is never passed over in
silence. It fails, or it is a warning and, if asked for, a snapshot row in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import pyarrow as pa

from headwater.spark import bounded, counted
from headwater.spark.arrow import Layout, Messages
from headwater.spark.counted import Counter
from headwater.spark.errors import OffsetGone, StreamMissing, StreamRecreated
from headwater.spark.offsets import START, Place, SplitPlan, are_of_two_streams, at
from headwater.spark.options import OnGone, SourceOptions
from headwater.spark.planning import Span, Task, into_tasks
from headwater.spark.protocol import Client, Head

log = logging.getLogger("headwater.spark")

_PARALLEL_REQUESTS: Final = 8

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def ask_each(ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """Ask about many streams, several at once: the answers in their order."""
    if len(items) < 2:
        return [ask(item) for item in items]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="headwater-ask") as pool:
        return list(pool.map(ask, items))


def tail_of(head: Head) -> Place:
    return Place(head.offset, head.position or 0)


def beginning_of(head: Head, on_gone: OnGone) -> Place:
    """The earliest place that can be read.

    Where a snapshot stands for what is gone, the very beginning, so that `onGone` decides about the snapshot.
    """
    if not head.bounds_reads or head.earliest is None:
        return START
    return START if head.snapshot is not None and on_gone in ("fail", "bootstrap") else at(head.earliest)


class Planner:
    """Turns (start, end] of each stream into tasks, on the driver."""

    def __init__(self, client: Client, options: SourceOptions, counter: Counter) -> None:
        self._client = client
        self._options = options
        self._counter = counter

    def tasks(
        self, starts: Mapping[str, Place], ends: Mapping[str, Place], heads: Mapping[str, Head], plan: SplitPlan
    ) -> list[Task]:
        """The tasks that read from `starts` to `ends`. Streams without a start begin at the earliest message."""
        bounds = {stream: heads[stream].bounds_reads for stream in ends}
        begin = {stream: beginning_of(heads[stream], self._options.on_gone) for stream in ends}
        wanted = [(stream, starts.get(stream, begin[stream]), ends[stream]) for stream in sorted(ends)]
        bounded_ones = [self._forwards(*one, begin[one[0]]) for one in wanted if bounds[one[0]]]
        spans = self._spans([one for one in bounded_ones if one[2].position > one[1].position])
        spans += [self._counter.span(*one) for one in wanted if not bounds[one[0]] and one[1] != one[2]]
        return into_tasks(spans, plan, lambda span, n: bounded.split(self._client, span, n))

    @staticmethod
    def _forwards(stream: str, start: Place, end: Place, begin: Place) -> tuple[str, Place, Place]:
        """A range that ends in another incarnation, or before its start, is of a stream to be read from scratch."""
        is_new = start.position > end.position or are_of_two_streams(start.offset, end.offset)
        return stream, begin if is_new and begin.position < end.position else START if is_new else start, end

    def _spans(self, ranges: list[tuple[str, Place, Place]]) -> list[Span]:
        if self._options.on_gone == "fail":
            # Nothing to find out beforehand: a task that meets missing data fails, and says so.
            return [bounded.span(*one) for one in ranges]
        return [span for spans in ask_each(lambda one: self._still_there(*one), ranges) for span in spans]

    def _still_there(self, stream: str, start: Place, end: Place) -> list[Span]:
        try:
            bounded.check_retained(self._client, stream, start, end)
        except StreamRecreated as recreated:
            log.warning("%s What was planned of the old one is skipped.", recreated)
            return []
        except OffsetGone as gone:
            return self._behind(stream, start, end, gone)
        except StreamMissing as missing:
            if not self._options.waits_for_streams:
                raise
            log.warning("%s Skipped.", missing)
            return []
        return [bounded.span(stream, start, end)]

    def _behind(self, stream: str, start: Place, end: Place, gone: OffsetGone) -> list[Span]:
        """What to read instead of data that is gone."""
        if self._options.on_gone == "bootstrap":
            offset = self._client.head(stream).snapshot
            if offset is None:
                raise gone
            log.warning("%s Going on from the snapshot at %s.", gone, offset)
            place = at(offset)
            spans = [Span(stream, start, place, 0, bounded=True, snapshot=offset)]
        elif gone.earliest is None or self._options.on_gone == "restart":
            raise gone
        else:
            log.warning("%s Skipped to %s.", gone, gone.earliest)
            place = at(gone.earliest)
            spans = []
        return [*spans, bounded.span(stream, place, end)] if place.position < end.position else spans


def read_batches(client: Client, layout: Layout, spans: Iterable[Span]) -> Iterator[pa.RecordBatch]:
    """The rows of a task, in order."""
    for span in spans:
        for messages in _read(client, span):
            if len(messages):
                yield layout.batch(messages)


def _read(client: Client, span: Span) -> Iterator[Messages]:
    if span.snapshot is not None:
        chunk = client.snapshot(span.stream, span.snapshot)
        stored = pa.array([chunk.body], pa.binary())
        yield Messages(
            span.stream,
            chunk.content_type,
            stored,
            separated=False,
            first_position=span.end.position,
            last_end=span.snapshot,
            snapshot=True,
        )
    elif span.bounded:
        yield from bounded.read(client, span)
    else:
        yield from counted.read(client, span)
