"""From rows to appends, without Spark: grouping, order, splitting, rejected rows, and repeated appends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from headwater.spark.bodies import append_body, append_end, grouped, rows_table
from headwater.spark.delivery import Delivered, RowOrigin, deliver
from headwater.spark.errors import BadRowError, BatchFencedError, DifferingRetryError, StreamMissingError
from headwater.spark.options import ConnectionOptions, SinkOptions, sink_options
from headwater.spark.protocol import StreamsClient
from tests.spark.streams import Streams


def options_of(streams: Streams, **given: str) -> SinkOptions:
    return sink_options({"url": streams.root, **given})


def send(
    streams: Streams, options: SinkOptions, rows: list[dict[str, Any]], batch: int = 0, partition: str = "0"
) -> list[Delivered]:
    table = rows_table(options, iter(pa.Table.from_pylist(rows).to_batches()))
    assert table is not None
    origin = RowOrigin("query", batch, partition)
    client = StreamsClient(ConnectionOptions(streams.root, retry_timeout_s=60.0))
    return deliver(client, options, origin, grouped(options, table), fixed_rows=options.commit_mode != "task")


def numbered(*values: int) -> list[dict[str, Any]]:
    return [{"id": value, "value": str(value)} for value in values]


def test_targets_keep_the_order_of_their_rows(streams: Streams, stream_name: Callable[[], str]) -> None:
    one, two = streams.create(stream_name()), streams.create(stream_name())
    rows = [{"stream": (one, two)[n % 2], "value": str(n)} for n in range(2000)]
    delivered = send(streams, options_of(streams), rows)
    assert {done.stream: (done.rows, done.appends) for done in delivered} == {one: (1000, 1), two: (1000, 1)}
    assert streams.messages(one) == list(range(0, 2000, 2))
    assert streams.messages(two) == list(range(1, 2000, 2))


@pytest.mark.parametrize("value", ["not json", "1,2", "{", "", "1 2", "]["])
def test_a_row_is_one_json_text(streams: Streams, stream_name: Callable[[], str], value: str) -> None:
    name = streams.create(stream_name())
    with pytest.raises(BadRowError, match=rf"Row 1 for stream '{name}' is not one JSON text"):
        send(streams, options_of(streams, stream=name), [{"value": "1"}, {"value": value}, {"value": "3"}])
    assert streams.raw(name) == []


def test_bytes_of_a_row_are_kept(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    values = ['{"a":1.0,"a":2}', "[1,2]", "12345678901234567890", '"\\u00e9"']
    send(streams, options_of(streams, stream=name), [{"value": value} for value in values])
    assert streams.raw(name) == [value.encode() for value in values]


def test_rows_without_a_value_or_a_target_are_refused(streams: Streams) -> None:
    with pytest.raises(BadRowError, match="column value is null in 1 rows"):
        send(streams, options_of(streams, stream="x"), [{"value": "1"}, {"value": None}])
    with pytest.raises(BadRowError, match="has no target"):
        send(streams, options_of(streams), [{"value": "1", "stream": "x"}, {"value": "1", "stream": None}])


def test_task_with_several_appends_needs_a_unique_order(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    small = {"stream": name, "maxRequestBytes": "1024", "commitMode": "task"}
    with pytest.raises(BadRowError, match="commitMode=task the limit is 1024"):
        send(streams, options_of(streams, **small), numbered(*range(1000)))
    with pytest.raises(BadRowError, match=r"orderBy must be unique .* \{'id': 7\}"):
        send(streams, options_of(streams, **small, orderBy="id"), numbered(7, 8, 7))
    assert streams.raw(name) == []
    (done,) = send(streams, options_of(streams, **small, orderBy="id"), numbered(*reversed(range(1000))))
    assert done.appends > 3
    assert streams.messages(name) == list(range(1000))


def test_fixed_rows_are_split_into_any_number_of_appends(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    options = options_of(streams, stream=name, maxRequestBytes="1024")
    for duplicates in (0, 40):
        (done,) = send(streams, options, numbered(*range(10_000)))
        assert done.appends > 40
        assert done.duplicates >= duplicates
    assert streams.messages(name) == list(range(10_000))


@pytest.mark.parametrize("mode", ["task", "staged"])
def test_a_repeat_continues_where_the_first_attempt_ended(
    streams: Streams, stream_name: Callable[[], str], mode: str
) -> None:
    name = streams.create(stream_name())
    options = options_of(streams, stream=name, maxRequestBytes="1024", orderBy="id", commitMode=mode)
    rows = numbered(*range(1000))
    table = rows_table(options, iter(pa.Table.from_pylist(rows).to_batches()))
    assert table is not None
    (target,) = grouped(options, table)
    client = StreamsClient(ConnectionOptions(streams.root))
    start = 0
    for seq in range(2):
        end = append_end(target, start, "json", 1024)
        body = append_body(target, start, end, "json")
        client.append(name, body, "application/json", RowOrigin("query", 0, "0").producer(name, seq))
        start = end
    (done,) = send(streams, options, rows)
    assert done.duplicates == 2
    assert streams.messages(name) == list(range(1000))


@pytest.mark.parametrize("limits", [("50331648", "50331648"), ("1024", "50331648"), ("50331648", "1024")])
@pytest.mark.parametrize("seen", [1, 400, 999])
def test_retry_appends_the_rows_that_a_truncated_attempt_missed(
    streams: Streams, stream_name: Callable[[], str], seen: int, limits: tuple[str, str]
) -> None:
    """PySpark ends the input of a writer early, without an error, when an upstream task fails."""
    name = streams.create(stream_name())
    for limit, rows in zip((*limits, *limits), (seen, 1000, seen, 1000), strict=True):
        options = options_of(streams, stream=name, maxRequestBytes=limit, orderBy="id", commitMode="task")
        try:
            send(streams, options, numbered(*range(rows)))
        except DifferingRetryError:
            assert rows == seen, "an attempt with all rows continues"
    assert streams.messages(name) == list(range(1000))


def test_retry_appends_lines_that_a_truncated_attempt_missed(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name(), "text/plain")
    options = options_of(streams, stream=name, contentType="text/plain", rowsAs="lines", commitMode="task")
    for rows in (2, 5, 5):
        send(streams, options, numbered(*range(rows)))
    assert streams.content(name) == b"0\n1\n2\n3\n4\n"


def test_a_repeat_with_other_rows_is_an_error(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    send(streams, options_of(streams, stream=name), numbered(1, 2))
    for rows in (numbered(2, 1), numbered(3, 4, 5), numbered(7)):
        with pytest.raises(DifferingRetryError, match=r"an earlier attempt appended crc32:.* this attempt has crc32:"):
            send(streams, options_of(streams, stream=name), rows)
    assert streams.messages(name) == [1, 2]


def test_concurrent_attempts_append_each_row_once(streams: Streams, stream_name: Callable[[], str]) -> None:
    """Speculation: concurrent attempts of one task, with interleaved appends."""
    name = streams.create(stream_name())
    options = options_of(streams, stream=name, maxRequestBytes="1024", orderBy="id", commitMode="task")
    rows = numbered(*range(2000))
    together = threading.Barrier(3)

    def attempt(turned: bool) -> Delivered:
        together.wait(30)
        (done,) = send(streams, options, list(reversed(rows)) if turned else rows)
        return done

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(attempt, (False, True, False)))
    assert {one.appends for one in done} == {done[0].appends}
    assert sum(one.appends - one.duplicates for one in done) == done[0].appends, "each append was accepted once"
    assert streams.messages(name) == list(range(2000))


def test_partitions_and_batches_are_deduplicated_separately(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    options = options_of(streams, stream=name)
    for batch in (0, 1, 5):
        for partition in ("0", "1"):
            send(streams, options, numbered(batch * 10 + int(partition)), batch, partition)
    assert streams.messages(name) == [0, 1, 10, 11, 50, 51]


def test_a_zombie_of_an_older_batch_is_fenced(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name())
    options = options_of(streams, stream=name)
    send(streams, options, numbered(1), batch=4)
    send(streams, options, numbered(2), batch=5)
    with pytest.raises(BatchFencedError, match="batch 5 was already written"):
        send(streams, options, numbered(1), batch=4)
    assert streams.messages(name) == [1, 2]


def test_missing_streams_are_created_only_on_request(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    with pytest.raises(StreamMissingError, match="createMissing=true"):
        send(streams, options_of(streams, stream=name), numbered(1))
    assert not streams.exists(name)
    send(streams, options_of(streams, stream=name, createMissing="true"), numbered(1))
    assert streams.messages(name) == [1]


def test_wrong_content_type_is_reported(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.create(stream_name(), "text/plain")
    with pytest.raises(Exception, match="set contentType to that of the stream"):
        send(streams, options_of(streams, stream=name), numbered(1))
