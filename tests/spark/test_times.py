"""Arrival times of messages, without Spark: as a column, and as the start and end of a read."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from headwater.spark.arrow import Layout
from headwater.spark.columns import default_schema
from headwater.spark.errors import OptionError
from headwater.spark.message_runs import from_frames, from_values
from headwater.spark.options import source_options
from headwater.spark.reader import BatchReader
from headwater.spark.source import HeadwaterSource
from tests.spark.driving import Query
from tests.spark.streams import Streams
from tests.waiting import wait_until

URL = "http://localhost:4437/v1/stream"


def rows(at: Streams, /, **options: str) -> list[dict[str, Any]]:
    given = {"url": at.root, **options}
    reader = BatchReader(source_options(given), HeadwaterSource(given).schema())
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


def later_millisecond() -> int:
    """Wait for the next millisecond, so that the next message has another time; return the current time."""
    began = time.time_ns() // 1_000_000
    wait_until(lambda: time.time_ns() // 1_000_000 > began + 1)
    return time.time_ns() // 1_000_000


@pytest.fixture
def source(streams: Streams, stream_name: Callable[[], str]) -> str:
    """A stream of three appends, some milliseconds apart."""
    name = streams.create(stream_name())
    for first in (0, 2, 4):
        streams.append(name, [first, first + 1])
        later_millisecond()
    return name


def test_every_message_has_its_arrival_time(streams: Streams, source: str) -> None:
    found = [row["timestamp"] for row in rows(streams, streams=source)]
    assert found == sorted(found)
    assert [len(set(found[at : at + 2])) for at in (0, 2, 4)] == [1, 1, 1]
    assert len(set(found)) == 3
    assert all(abs((datetime.now(UTC) - one).total_seconds()) < 3600 for one in found)


def test_batch_read_starts_and_ends_at_times(streams: Streams, source: str) -> None:
    times = sorted({row["timestamp"] for row in rows(streams, streams=source)})
    second, third = times[1].isoformat(), str(round(times[2].timestamp() * 1000))

    def values(**options: str) -> list[int]:
        return [int(row["value"]) for row in rows(streams, streams=source, **options)]

    assert values(startingTimestamp=second) == [2, 3, 4, 5]
    assert values(endingTimestamp=third) == [0, 1, 2, 3]
    assert values(startingTimestamp=second, endingTimestamp=third) == [2, 3]
    assert values(startingTimestamp=str(later_millisecond())) == []


def test_query_starts_at_a_time_and_reads_later_messages(streams: Streams, source: str) -> None:
    query = Query(streams, streams=source, startingTimestamp=str(later_millisecond()))
    assert query.batch() == []
    streams.append(source, [6])
    assert query.batches_until(1) == ["6"]


def test_unknown_times_are_null() -> None:
    layout = Layout(default_schema("string", ""), "", "fail")
    head = (2).to_bytes(4, "little") + np.array([2, 2], "<u4").tobytes()
    body = head + np.array([0, 1_700_000_000_123], "<u8").tobytes() + b"1,2,"
    run = from_frames("s", "application/json", body, "0" * 16 + "_" + "0" * 16, timed=True)
    assert layout.batch(run)["timestamp"].to_pylist() == [
        None,
        datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=123_000),
    ]
    assert layout.batch(from_values("s", "application/json", [b"1"], 0, None))["timestamp"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingTimestamp": "yesterday"}, "startingTimestamp must be a time with its zone"),
        ({"startingTimestamp": "2026-01-31T12:00:00"}, "with its zone"),
        ({"startingTimestamp": "9999-01-01T00:00:00Z"}, "is in the future"),
        (
            {"startingTimestamp": "1", "startingOffsets": "latest"},
            "startingTimestamp cannot be combined with startingOffsets",
        ),
        ({"startingOffsetsByTimestamp": "{}"}, "use startingTimestamp"),
    ],
)
def test_invalid_times_are_rejected(options: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        source_options({"url": URL, "streams": "s", **options})


def test_query_cannot_end_at_a_time(streams: Streams, source: str) -> None:
    with pytest.raises(OptionError, match="endingTimestamp is only for batch reads"):
        Query(streams, streams=source, endingTimestamp="1")


def test_server_without_times_is_reported(node_streams: Streams, stream_name: Callable[[], str]) -> None:
    name = node_streams.filled(stream_name(), [1])
    assert [row["timestamp"] for row in rows(node_streams, streams=name)] == [None]
    with pytest.raises(OptionError, match="does not store when messages arrived"):
        rows(node_streams, streams=name, startingTimestamp="1")
