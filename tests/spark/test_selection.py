"""The selection of streams and rows, without Spark: patterns, pushed-down filters, and waiting for enough rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from headwater.spark.errors import OptionError
from headwater.spark.options import source_options
from headwater.spark.pushdown import FilteringBatchReader, row_range
from headwater.spark.reader import BatchReader
from headwater.spark.source import HeadwaterSource
from tests.spark.driving import Query, stop_all
from tests.spark.streams import Streams
from tests.spark.test_recreated import batch_values

URL = {"url": "http://localhost:4437/v1/stream"}


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    yield
    stop_all()


def reads(names: list[str], **options: str) -> list[str]:
    selected = source_options(URL | options)
    return [name for name in names if selected.reads(name)]


NAMES = ["orders", "orders/1", "orders/2", "orders/eu/1", "order", "users/1", "a.b"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"streams": "orders/*"}, ["orders/1", "orders/2"]),
        ({"streams": "orders/**"}, ["orders/1", "orders/2", "orders/eu/1"]),
        ({"streams": "*/1, a.?"}, ["orders/1", "users/1", "a.b"]),
        ({"streams": "order*"}, ["orders", "order"]),
        ({"subscribePattern": r"orders/\d+"}, ["orders/1", "orders/2"]),
        ({"subscribePattern": r"orders?"}, ["orders", "order"]),
        ({"subscribePattern": r"orders/1|users/.*"}, ["orders/1", "users/1"]),
        ({"subscribePattern": r"a\.b"}, ["a.b"]),
        ({"subscribePattern": r".*/1", "prefix": "orders/"}, ["orders/1", "orders/eu/1"]),
    ],
)
def test_patterns_select_streams(options: dict[str, str], found: list[str]) -> None:
    assert reads(NAMES, **options) == found


def test_invalid_patterns_are_errors() -> None:
    with pytest.raises(OptionError, match="subscribePattern is not a regular expression"):
        source_options(URL | {"subscribePattern": "("})
    with pytest.raises(OptionError, match="cannot be combined"):
        source_options(URL | {"streams": "a/*", "prefix": "b"})
    with pytest.raises(OptionError, match="streams cannot be combined with"):
        source_options(URL | {"streams": "a", "subscribePattern": "b"})


KAFKA_CONNECTOR_OPTIONS = {
    "assign": '{"orders": [0]}',
    "subscribe": "orders",
    "subscribePattern": "orders.*",
    "kafka.bootstrap.servers": "host:9092",
    "kafka.security.protocol": "SASL_SSL",
    "kafka.group.id": "reports",
    "groupIdPrefix": "reports",
    "startingTimestamp": "1700000000000",
    "startingOffsetsByTimestamp": '{"orders": {"0": 1700000000000}}',
    "startingOffsetsByTimestampStrategy": "latest",
    "startingOffsets": "earliest",
    "endingTimestamp": "1700000000000",
    "endingOffsetsByTimestamp": '{"orders": {"0": 1700000000000}}',
    "endingOffsets": "latest",
    "failOnDataLoss": "false",
    "kafkaConsumer.pollTimeoutMs": "120000",
    "fetchOffset.numRetries": "3",
    "fetchOffset.retryIntervalMs": "10",
    "maxOffsetsPerTrigger": "1000",
    "minOffsetsPerTrigger": "1000",
    "maxTriggerDelay": "15m",
    "minPartitions": "4",
    "maxRecordsPerPartition": "1000",
    "includeHeaders": "true",
}
"""With values that a user of that connector would have."""
SHARED_WITH_KAFKA = {
    *("subscribePattern", "startingTimestamp", "startingOffsets", "endingTimestamp", "endingOffsets"),
    *("minOffsetsPerTrigger", "maxTriggerDelay", "minPartitions", "includeHeaders"),
}


@pytest.mark.parametrize(
    ("name", "ours"),
    [("subscribe", "streams"), ("kafka.bootstrap.servers", "url"), ("maxOffsetsPerTrigger", "maxRowsPerBatch")],
)
def test_names_of_the_connector_for_kafka_get_a_hint(name: str, ours: str) -> None:
    with pytest.raises(OptionError, match=f"which is a Kafka option; use {ours}"):
        source_options(URL | {"streams": "a", name: "x"})


@pytest.mark.parametrize("name", sorted(KAFKA_CONNECTOR_OPTIONS))
def test_every_option_of_the_connector_for_kafka_works_or_gets_a_hint(name: str) -> None:
    given = URL | ({} if name == "subscribePattern" else {"streams": "a"}) | {name: KAFKA_CONNECTOR_OPTIONS[name]}
    if name in SHARED_WITH_KAFKA:
        source_options(given)
    else:
        with pytest.raises(OptionError, match=r"Kafka option.*(; use |no counterpart)"):
            source_options(given)


def test_query_by_pattern_reads_matching_and_later_streams(streams: Streams, stream_name: Callable[[], str]) -> None:
    family = stream_name()
    for name in ("a1", "a2", "b1"):
        streams.filled(f"{family}/{name}", [name])
    assert sorted(batch_values(streams, streams=f"{family}/a*")) == ['"a1"', '"a2"']
    query = Query(streams, subscribePattern=rf"{family}/a\d")
    assert sorted(query.batch()) == ['"a1"', '"a2"']
    streams.filled(f"{family}/b3", ["b3"])
    streams.filled(f"{family}/a3", ["a3"])
    assert query.batches_until(1) == ['"a3"']


def test_batch_waits_for_enough_rows_but_not_forever(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.filled(stream_name(), [1])
    query = Query(streams, streams=name, minOffsetsPerTrigger="3", maxTriggerDelay="3600")
    assert query.batch() == ["1"], "a first batch does not wait"
    streams.append(name, [2, 3])
    assert query.batch() == []
    streams.append(name, [4])
    assert query.batches_until(3) == ["2", "3", "4"]
    streams.append(name, [5])
    assert query.batch() == []
    query.restart(maxTriggerDelay="0")
    assert query.batches_until(1) == ["5"]


# -- filters -------------------------------------------------------------------------------------------------------

STREAM, POSITION = ("stream",), ("position",)


@pytest.mark.parametrize(
    ("filters", "streams", "first", "end"),
    [
        ([EqualTo(STREAM, "a"), IsNotNull(STREAM)], {"a"}, 0, float("inf")),
        ([In(STREAM, ("a", "b")), EqualTo(STREAM, "b")], {"b"}, 0, float("inf")),
        ([GreaterThan(POSITION, 4), LessThanOrEqual(POSITION, 9)], None, 5, 10),
        ([GreaterThanOrEqual(POSITION, 4), LessThan(POSITION, 9)], None, 4, 9),
        ([EqualTo(POSITION, 7)], None, 7, 8),
        ([EqualTo(("value",), "a"), GreaterThan(("other", "position"), 3)], None, 0, float("inf")),
    ],
)
def test_filters_limit_what_is_read(filters: list[Filter], streams: set[str] | None, first: int, end: float) -> None:
    found = row_range(filters)
    assert (found.streams, found.first, found.end) == (streams, first, end)
    prefixed = row_range([StringStartsWith(("_stream",), "a/"), EqualTo(STREAM, "x")], "_")
    assert prefixed.has("a/1")
    assert not prefixed.has("x")


def filtered(at: Streams, filters: list[Filter], **options: str) -> list[str]:
    given = {"url": at.root, **options}
    reader = FilteringBatchReader(source_options(given), HeadwaterSource(given).schema())
    assert list(reader.pushFilters(filters)) == filters, "Spark applies all of them too"
    return [
        value for task in reader.partitions() for batch in reader.read(task) for value in batch["value"].to_pylist()
    ]


def test_the_last_messages_are_read_without_the_others(streams: Streams, stream_name: Callable[[], str]) -> None:
    name = streams.filled(stream_name(), [f"{n} {'x' * (n % 90)}" for n in range(20_000)])
    values = filtered(streams, [GreaterThanOrEqual(POSITION, 19_990)], streams=name)
    assert 10 <= len(values) <= 40
    assert [value.encode() for value in values[-10:]] == streams.raw(name)[-10:]
    (some,) = {
        value for value in filtered(streams, [EqualTo(POSITION, 777)], streams=name) if value.startswith('"777 ')
    }
    assert some.encode() == streams.raw(name)[777]
    assert filtered(streams, [GreaterThan(POSITION, 50_000)], streams=name) == []


def test_streams_that_a_filter_excludes_are_not_read(streams: Streams, stream_name: Callable[[], str]) -> None:
    family = stream_name()
    for n in range(4):
        streams.filled(f"{family}/{n}", [n])
    assert filtered(streams, [In(STREAM, (f"{family}/1", f"{family}/3"))], prefix=f"{family}/") == ["1", "3"]


def test_only_the_process_that_pushes_filters_gets_a_reader_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark raises an error for such a reader if pushdown is off."""
    source = HeadwaterSource(URL | {"streams": "a"})
    monkeypatch.delitem(__import__("sys").modules, "pyspark.sql.worker.data_source_pushdown_filters", raising=False)
    assert type(source.reader(source.schema())) is BatchReader
    monkeypatch.setitem(__import__("sys").modules, "pyspark.sql.worker.data_source_pushdown_filters", pytest)
    assert type(source.reader(source.schema())) is FilteringBatchReader
