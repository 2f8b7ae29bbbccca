"""State-protocol messages: aggregations published live as upserts, and the key and headers of messages as columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from headwater.spark import upserts
from headwater.spark.arrow import Layout
from headwater.spark.bodies import rows_table
from headwater.spark.columns import default_schema
from headwater.spark.errors import BadRowError, OptionError
from headwater.spark.message_runs import from_values
from headwater.spark.options import sink_options, source_options
from tests.spark.querying import WAIT_S, follow
from tests.spark.streams import Streams
from tests.spark.test_source_stream import forget_last_commit

URL = "http://localhost:4437/v1/stream"


def messages(batch: pa.RecordBatch, **options: str) -> list[Any]:
    rows = rows_table(sink_options({"url": URL, "stream": "totals", **options}), iter([batch]))
    assert rows is not None
    return [json.loads(value) for value in rows["__value"].to_pylist()]


def test_row_becomes_an_upsert_of_its_key() -> None:
    batch = pa.RecordBatch.from_pydict({"customer": ["ada", "bob"], "total": [61.0, None]})
    assert messages(batch, keyColumns="customer") == [
        {
            "type": "totals",
            "key": "ada",
            "value": {"customer": "ada", "total": 61.0},
            "headers": {"operation": "upsert"},
        },
        {
            "type": "totals",
            "key": "bob",
            "value": {"customer": "bob", "total": None},
            "headers": {"operation": "upsert"},
        },
    ]


def test_key_of_several_columns_is_a_list_and_other_types_are_their_text() -> None:
    batch = pa.RecordBatch.from_pydict({"day": pa.array([19_000], pa.date32()), "id": [7], "n": [1]})
    assert messages(batch, keyColumns="day,id", messageType="count")[0]["key"] == '["2022-01-08",7]'
    assert messages(batch, keyColumns="id", messageType="count")[0]["key"] == "7"
    assert messages(batch, keyColumns="day", messageType="count")[0]["type"] == "count"
    assert messages(batch, keyColumns="day")[0]["key"] == "2022-01-08"


def test_operation_column_makes_deletes_and_is_not_part_of_the_value() -> None:
    batch = pa.RecordBatch.from_pydict({"id": ["a", "b"], "n": [1, 2], "op": ["delete", "insert"]})
    assert messages(batch, keyColumns="id", operationColumn="op") == [
        {"type": "totals", "key": "a", "headers": {"operation": "delete"}},
        {"type": "totals", "key": "b", "value": {"id": "b", "n": 2}, "headers": {"operation": "insert"}},
    ]
    other = pa.RecordBatch.from_pydict({"id": ["a"], "op": ["merge"]})
    with pytest.raises(BadRowError, match="'merge'"):
        messages(other, keyColumns="id", operationColumn="op")


def test_row_without_a_key_is_refused() -> None:
    with pytest.raises(BadRowError, match="id is null"):
        messages(pa.RecordBatch.from_pydict({"id": pa.array([None], pa.string())}), keyColumns="id")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keyColumns": "id", "contentType": "text/plain"}, "keyColumns makes JSON"),
        ({"messageType": "x"}, "set keyColumns too"),
        ({"batchId": "3"}, "batchId needs producerId"),
    ],
)
def test_incompatible_options_are_rejected(options: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        sink_options({"url": URL, "stream": "totals", **options})


def test_key_and_headers_of_state_messages_are_columns() -> None:
    options = source_options({"url": URL, "streams": "s", "includeHeaders": "true"})
    layout = Layout(default_schema("string", "", with_headers=True), "", "fail", with_headers=options.with_headers)
    texts = [
        b'{"type":"t","key":"ada","value":{},"headers":{"operation":"upsert","txid":7,"more":{"a":1}}}',
        b'{"key":7}',
        b'{"headers":{"control":"reset"}}',
        b"[1]",
        b'{"key":null,"headers":3}',
    ]
    batch = layout.batch(from_values("s", "application/json", texts, 0, None))
    assert batch["key"].to_pylist() == ["ada", "7", None, None, None]
    assert batch["headers"].to_pylist() == [
        [("operation", "upsert"), ("txid", "7"), ("more", '{"a":1}')],
        None,
        [("control", "reset")],
        None,
        None,
    ]
    assert batch["value"].to_pylist() == [text.decode() for text in texts]


def totals(spark: SparkSession, streams: Streams, source: str) -> DataFrame:
    orders = follow(spark, streams.root, "customer string, amount long", streams=source)
    return orders.groupBy("customer").agg(F.sum("amount").alias("total"))


def state_of(found: list[Any]) -> dict[str, Any]:
    """The final rows of a reader of the stream."""
    rows: dict[str, Any] = {}
    for message in found:
        if message["headers"].get("control") == "reset":
            rows.clear()
        else:
            rows[message["key"]] = message["value"]["total"]
    return rows


@pytest.mark.parametrize("mode", ["update", "complete"])
def test_aggregation_is_published_exactly_once_even_if_a_batch_is_repeated(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path, mode: Any
) -> None:
    source, target, checkpoint = stream_name(), stream_name(), tmp_path / "checkpoint"
    streams.create(source)

    def run() -> None:
        options = {
            "url": streams.root,
            "stream": target,
            "createMissing": "true",
            "checkpointLocation": str(checkpoint),
        }
        writer = upserts(totals(spark, streams, source), key="customer", mode=mode, **options)
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(WAIT_S), "the query did not end"
        finally:
            query.stop()

    streams.append(source, [{"customer": "ada", "amount": 1}, {"customer": "bob", "amount": 2}])
    run()
    assert state_of(streams.messages(target)) == {"ada": 1, "bob": 2}
    streams.append(source, [{"customer": "ada", "amount": 10}])
    run()
    published = streams.messages(target)
    assert state_of(published) == {"ada": 11, "bob": 2}
    keys = [message.get("key", "reset") for message in published]
    assert (keys[0] == "reset", len(keys)) == ((False, 3) if mode == "update" else (True, 6))
    forget_last_commit(checkpoint)
    run()
    assert streams.messages(target) == published
