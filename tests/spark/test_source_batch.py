"""Batch reads: rows, columns and streams, and missing data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime

import httpx
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tests.offsets import offset_text
from tests.serving import Server
from tests.spark.querying import read
from tests.spark.streams import Streams


def test_every_message_is_a_row(spark: SparkSession, streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.filled(stream_name(), [{"n": 1}, {"n": 2}])
    rows = [row.asDict() for row in read(spark, streams.root, streams=name).collect()]
    assert all(isinstance(row.pop("timestamp"), datetime) for row in rows)
    assert rows == [
        {
            "stream": name,
            "offset": offset_text(1, 8),
            "position": 0,
            "value": '{"n":1}',
            "content_type": "application/json",
            "snapshot": False,
        },
        {
            "stream": name,
            "offset": streams.tail(name),
            "position": 1,
            "value": '{"n":2}',
            "content_type": "application/json",
            "snapshot": False,
        },
    ]


def test_one_large_stream_is_read_by_many_tasks_in_order(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str]
) -> None:
    name = streams.filled(stream_name(), [{"n": n, "pad": "x" * (n % 50)} for n in range(5000)])
    frame = read(spark, streams.root, streams=name, splitBytes=40_000)
    assert frame.rdd.getNumPartitions() > 5
    rows = frame.select("position", "value").collect()
    assert [row.position for row in rows] == list(range(5000))
    assert [row.value.encode() for row in rows] == streams.raw(name)


def test_any_content_type(spark: SparkSession, streams: Streams, stream_name: Callable[[], str]) -> None:
    binary = streams.create(stream_name(), "application/octet-stream")
    for body in (b"\xff\x00", b"second"):
        streams.append_bytes(binary, body, "application/octet-stream")
    rows = read(spark, streams.root, streams=binary, valueType="binary").collect()
    assert [bytes(row.value) for row in rows] == [b"\xff\x00", b"second"]
    with pytest.raises(PySparkException, match="valueType=binary"):
        read(spark, streams.root, streams=binary).collect()


def test_starting_and_ending_offsets(spark: SparkSession, streams: Streams, stream_name: Callable[[], str]) -> None:
    one, two = (streams.create(stream_name()) for _ in range(2))
    middle = {name: streams.append(name, [1, 2]) for name in (one, two)}
    ends = {name: streams.append(name, [3, 4]) for name in (one, two)}
    streams.append(one, [5])

    def values(**options: str) -> set[tuple[str, int]]:
        rows = read(spark, streams.root, streams=f"{one},{two}", **options).collect()
        return {(row.stream, int(row.value)) for row in rows}

    assert values(startingOffsets="latest") == set()
    assert values(startingOffsets=json.dumps({one: middle[one], two: "latest"})) == {(one, 3), (one, 4), (one, 5)}
    assert values(startingOffsets=json.dumps(middle), endingOffsets=json.dumps({one: ends[one], two: middle[two]})) == {
        (one, 3),
        (one, 4),
    }


def test_typed_rows_with_corrupt_ones_among_them(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str]
) -> None:
    name = streams.filled(stream_name(), [{"id": 1, "tags": ["a"]}, {"id": "x"}, {"tags": []}])
    schema = "position long, id long, tags array<string>, _corrupt string"
    rows = read(spark, streams.root, schema, streams=name).collect()
    assert [tuple(row) for row in rows] == [
        (0, 1, ["a"], None),
        (1, None, None, '{"id":"x"}'),
        (2, None, [], None),
    ]


def test_a_prefix_reads_what_the_registry_lists(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str]
) -> None:
    family = stream_name()
    names = [streams.filled(f"{family}/{n}", [n]) for n in range(3)]
    streams.filled(f"{family}-other", [9])
    streams.filled(f"{family}/gone", [9])
    streams.delete(f"{family}/gone")
    rows = read(spark, streams.root, prefix=f"{family}/").collect()
    assert sorted(row.stream for row in rows) == names


def test_many_streams_share_a_few_tasks(spark: SparkSession, streams: Streams, stream_name: Callable[[], str]) -> None:
    family = stream_name()
    for n in range(100):
        streams.filled(f"{family}/{n:03d}", [n])
    frame = read(spark, streams.root, prefix=f"{family}/")
    assert 1 < frame.rdd.getNumPartitions() < 10
    assert sorted(int(row.value) for row in frame.collect()) == list(range(100))


def test_errors_reach_the_user(spark: SparkSession, streams: Streams) -> None:
    with pytest.raises(PySparkException, match=r"no such stream .* onGone=restart"):
        read(spark, streams.root, streams="nowhere").collect()
    with pytest.raises(PySparkException, match="Did you mean startingOffsets"):
        read(spark, streams.root, streams="nowhere", startingOffset="latest").collect()
    assert read(spark, streams.root, streams="nowhere", onGone="skip").collect() == []


# -- buckets, snapshots and deleted data -------------------------------------------------------------------------------


@pytest.fixture
def bucket(roomy_server: Server, stream_name: Callable[[], str]) -> Iterator[Streams]:
    with httpx.Client(timeout=60) as http:
        name = stream_name().lower()[-40:].strip("-")
        http.put(f"{roomy_server.url}/ds/{name}").raise_for_status()
        yield Streams(f"{roomy_server.url}/ds/{name}", http)


def trimmed(bucket: Streams) -> str:
    """A stream of four messages, of which a snapshot replaces the first three."""
    name = bucket.filled("trimmed", [1, 2, 3])
    offset = bucket.tail(name)
    bucket.append(name, [4])
    bucket.http.put(
        f"{bucket.root}/{name}/snapshot/{offset}", content=b'{"sum": 6}', headers={"Content-Type": "application/json"}
    ).raise_for_status()
    return offset


def bucket_options(bucket: Streams) -> dict[str, str]:
    return {"bucket": bucket.root.rpartition("/")[2]}


def test_a_bucket_is_read_by_its_listing(spark: SparkSession, streams: Streams, bucket: Streams) -> None:
    for n in range(3):
        bucket.filled(f"user-{n}", [n])
    bucket.filled("other", [9])
    everything = read(spark, streams.root, **bucket_options(bucket)).collect()
    assert sorted(int(row.value) for row in everything) == [0, 1, 2, 9]
    users = read(spark, streams.root, prefix="user-", **bucket_options(bucket)).collect()
    assert sorted(row.stream for row in users) == ["user-0", "user-1", "user-2"]


def test_deleted_data_fails_by_default(spark: SparkSession, streams: Streams, bucket: Streams) -> None:
    trimmed(bucket)
    with pytest.raises(PySparkException, match=r"no longer retained .* onGone=bootstrap"):
        read(spark, streams.root, **bucket_options(bucket)).collect()


def test_bootstrap_returns_the_snapshot_and_continues(spark: SparkSession, streams: Streams, bucket: Streams) -> None:
    offset = trimmed(bucket)
    rows = read(spark, streams.root, onGone="bootstrap", **bucket_options(bucket)).collect()
    assert [(row.snapshot, row.position, row.value) for row in rows] == [(True, 3, '{"sum": 6}'), (False, 3, "4")]
    assert rows[0].offset == offset


def test_skip_continues_with_the_remaining_data(spark: SparkSession, streams: Streams, bucket: Streams) -> None:
    trimmed(bucket)
    rows = read(spark, streams.root, onGone="skip", **bucket_options(bucket)).collect()
    assert [(row.snapshot, row.value) for row in rows] == [(False, "4")]
