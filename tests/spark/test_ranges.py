"""Planned ranges on real servers: reads are repeatable, cuts are between messages, and budgets are met."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from headwater.spark import bounded_ranges, counted_ranges
from headwater.spark.counted_ranges import MessageCounter
from headwater.spark.errors import DataShorterThanPlannedError
from headwater.spark.message_runs import MessageRun
from headwater.spark.offsets import START, Place, SplitPlan, bytes_between, offset_to_json, places_from_json
from headwater.spark.options import ConnectionOptions
from headwater.spark.planner import tail_of
from headwater.spark.protocol import StreamsClient
from headwater.spark.read_tasks import ReadTask, Span, into_tasks
from tests.spark.streams import Streams


def client_of(streams: Streams) -> StreamsClient:
    return StreamsClient(ConnectionOptions(streams.root, retry_timeout_s=60.0))


def values(runs: list[MessageRun]) -> list[bytes]:
    return [value.as_py() for run in runs for value in run.values]


def test_place_round_trips_through_json() -> None:
    places = {"b": Place("0000000000000002_0000000000000008", 2), "a": Place("-1", 5, 5)}
    spelled = offset_to_json(places)
    assert list(spelled) == ["a", "b"]
    assert spelled["b"] == {"offset": "0000000000000002_0000000000000008", "position": 2}
    assert places_from_json(spelled) == places


def test_range_reads_the_same_after_later_appends(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.filled(stream_name(), [{"n": n} for n in range(50)])
    client = client_of(streams)
    whole = bounded_ranges.span(name, START, tail_of(client.head(name)))
    before = values(list(bounded_ranges.read(client, whole)))
    streams.append(name, [{"n": n} for n in range(50, 80)])
    assert values(list(bounded_ranges.read(client, whole))) == before == streams.raw(name)[:50]


def test_every_message_has_the_offset_that_a_client_would_resume_from(
    streams: Streams, stream_name: Callable[[], str]
) -> None:
    name = streams.filled(stream_name(), ["a", "bb", {"c": "é"}, 4])
    (run,) = bounded_ranges.read(
        client_of(streams), bounded_ranges.span(name, START, tail_of(client_of(streams).head(name)))
    )
    everything = streams.raw(name)
    for at, offset in enumerate(run.ends.to_pylist()):
        rest = streams.http.get(f"{streams.root}/{name}", params={"offset": offset})
        assert rest.content == b"[" + b",".join(everything[at + 1 :]) + b"]"


@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream"])
def test_messages_of_any_type_keep_their_boundaries(
    streams: Streams, stream_name: Callable[[], str], content_type: str
) -> None:
    name = streams.create(stream_name(), content_type)
    bodies = [b"one", b"\x00\xff," if content_type != "text/plain" else b"two, ", b"3"]
    for body in bodies:
        streams.append_bytes(name, body, content_type)
    client = client_of(streams)
    (run,) = bounded_ranges.read(client, bounded_ranges.span(name, START, tail_of(client.head(name))))
    assert values([run]) == bodies
    assert run.content_type == content_type


def test_parts_of_a_range_add_up_to_the_range(streams: Streams, stream_name: Callable[[], str]) -> None:
    messages = [{"n": n, "pad": "x" * (n % 97)} for n in range(3000)]
    name = streams.filled(stream_name(), messages)
    client = client_of(streams)
    whole = bounded_ranges.span(name, START, tail_of(client.head(name)))
    parts = bounded_ranges.split(client, whole, 7)
    assert 6 <= len(parts) <= 8
    assert parts[0].start.position == 0
    assert all(one.end == two.start for one, two in pairwise(parts))
    assert sum(part.bytes for part in parts) == whole.bytes
    read = [value for part in parts for value in values(list(bounded_ranges.read(client, part)))]
    assert read == streams.raw(name)


def test_a_cut_stays_within_its_budget_and_uses_most_of_it(streams: Streams, stream_name: Callable[[], str]) -> None:
    rng = random.Random(5)
    name = streams.filled(stream_name(), ["x" * rng.randrange(1, 300) for _ in range(4000)])
    client = client_of(streams)
    tail = tail_of(client.head(name))
    for rows in (1, 7, 100, 1500, 3999, 4000, 9999):
        end = bounded_ranges.cut(client, name, START, tail, rows, float("inf"))
        assert min(rows, 4000) * 0.8 <= end.position <= min(rows, 4000)
    for size in (1, 500, 20_000, 300_000):
        end = bounded_ranges.cut(client, name, START, tail, float("inf"), size)
        # The next message may not fit any more.
        assert end.position == 1 or min(size * 0.8, size - 303) <= bytes_between(START, end) <= size


def test_small_streams_share_tasks_and_large_ones_are_split() -> None:
    def split(span: Span, parts: int) -> list[Span]:
        return [Span(span.stream, span.start, span.end, span.bytes // parts, bounded=True) for _ in range(parts)]

    small = [Span(f"s{n}", START, START, 1000, bounded=True) for n in range(200)]
    large = Span("large", START, START, 100 * 2**20, bounded=True)
    tasks = into_tasks([*small, large], SplitPlan(), split)
    spans = [span for task in tasks for span in task.spans]
    assert [span.stream for span in spans] == [f"s{n}" for n in range(200)] + ["large"] * 8, "an even number"
    assert 8 <= len(tasks) <= 12
    assert len(into_tasks([large], SplitPlan(2**30, 12), split)) >= 12
    assert into_tasks([], SplitPlan(1), split) == []
    assert isinstance(tasks[0], ReadTask)


# -- a server that cannot bound a read ---------------------------------------------------------------------------------


def test_counted_range_is_repeatable(node_streams: Streams, stream_name: Callable[[], str]) -> None:
    name = node_streams.filled(stream_name(), [{"n": n} for n in range(100)])
    client = client_of(node_streams)
    assert not client.head(name).bounds_reads
    counter = MessageCounter(client)
    first = counter.advance(name, START, 30, float("inf"))
    assert (first.position, first.skip) == (30, 30)
    span = counter.span(name, START, first)
    assert span.inline is not None
    before = values(list(counted_ranges.read(client, span)))
    node_streams.append(name, [{"n": n} for n in range(100, 150)])
    again = Span(name, START, first, 0, bounded=False)
    assert values(list(counted_ranges.read(client, again))) == before == node_streams.raw(name)[:30]
    second = counter.advance(name, first, float("inf"), float("inf"))
    third = counter.advance(name, second, float("inf"), float("inf"))
    rest = [Span(name, first, second, 0, bounded=False), Span(name, second, third, 0, bounded=False)]
    runs = [run for span in rest for run in counted_ranges.read(client, span)]
    assert before + values(runs) == node_streams.raw(name)
    assert [run.first_position for run in runs] == [30, 100]
    assert runs[-1].ends[-1].as_py() == node_streams.tail(name)


def test_bytes_are_counted_without_message_boundaries(node_streams: Streams, stream_name: Callable[[], str]) -> None:
    name = node_streams.create(stream_name(), "text/plain")
    node_streams.append_bytes(name, b"hello ", "text/plain")
    client = client_of(node_streams)
    counter = MessageCounter(client)
    end = counter.advance(name, START, 1, float("inf"))
    node_streams.append_bytes(name, b"world", "text/plain")
    later = counter.advance(name, end, 1, float("inf"))
    pieces = [
        values(list(counted_ranges.read(client, Span(name, *ends, 0, bounded=False))))
        for ends in ((START, end), (end, later))
    ]
    assert pieces == [[b"hello "], [b"world"]]


def test_a_stream_that_is_shorter_than_planned_is_an_error(
    node_streams: Streams, stream_name: Callable[[], str]
) -> None:
    name = node_streams.filled(stream_name(), [1, 2, 3])
    span = Span(name, START, Place("0000000000000000_0000000000000099", 9), 0, bounded=False)
    with pytest.raises(DataShorterThanPlannedError, match="6 messages before what was planned"):
        list(counted_ranges.read(client_of(node_streams), span))
