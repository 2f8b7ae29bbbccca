"""The published progress of a query: metrics to scrape, and its state in the stream that the UI reads."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from headwater.spark.progress import Flow, ProgressMetrics, ProgressStream, lags, last_offsets
from headwater.spark.query_errors import error_sentence
from headwater.spark.status import StatusStream
from tests.offsets import offset_of
from tests.ports import free_port
from tests.serving import serve
from tests.spark.querying import follow, run, wait_until
from tests.spark.streams import Streams


def test_lag_and_offsets_are_reported_per_stream() -> None:
    end = '{"a": {"offset": "x", "position": 3}}'
    latest = '{"a": {"offset": "y", "position": 5}, "b": {"offset": "z", "position": 2}}'
    assert lags(end, latest) == {"a": 2, "b": 2}
    assert last_offsets(end) == {"a": "x"}
    assert lags(None, None) == lags("7", "9") == {}
    assert last_offsets("7") == last_offsets(None) == {}


def test_error_is_printed_without_its_traces() -> None:
    trace = (
        "[STREAM_FAILED] Query ended: boom\n=== Streaming Query ===\nTraceback (most recent call last):\nheadwater"
        ".spark.errors.StreamMissingError: stream 'a': there is no such stream. Create it.\n\n\tat org.apache.X"
    )
    assert error_sentence(trace) == "stream 'a': there is no such stream. Create it."
    assert error_sentence("\njava.lang.Oops: no\n\tat x") == "java.lang.Oops: no"


def folded(events: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Fold events as the page does: an event is the state of its key."""
    assert {event["headers"]["operation"] for event in events} <= {"upsert"}
    return {(event["type"], event["key"]): event["value"] for event in events}


def test_rates_and_lag_can_be_scraped_and_followed(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, published, target = streams.filled(stream_name(), range(300)), stream_name(), stream_name()
    metrics = ProgressMetrics()
    events = ProgressStream(streams.root, published, flows={"copying": Flow("numbers", "copies")})
    port = metrics.serve(0)

    def copying() -> dict[str, Any]:
        """The states of our query; a late state of another test's query may be there, too."""
        return folded(streams.messages(published)).get(("query", "copying"), {}) if streams.exists(published) else {}

    for listener in (metrics, events):
        spark.streams.addListener(listener)
    try:
        frame = follow(spark, streams.root, streams=source, maxRowsPerBatch=200)
        options = {"stream": target, "createMissing": "true", "queryName": "copying"}
        run(frame, streams.root, tmp_path / "c", **options)
        wait_until(lambda: copying().get("status") == "stopped", "the end of the query is published")
        state = copying()
        streams.delete(source)
        with pytest.raises(StreamingQueryException):
            run(frame, streams.root, tmp_path / "c", **options)
        wait_until(lambda: copying().get("status") == "failed", "the failure is published")
    finally:
        for listener in (metrics, events):
            spark.streams.removeListener(listener)
        events.close()
    page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    assert 'headwater_spark_rows_total{query="copying"} 300.0' in page
    assert 'headwater_spark_lag_messages{query="copying"} 0.0' in page
    assert re.search(r'^headwater_spark_batch_seconds\{phase="addBatch",query="copying"\}', page, re.MULTILINE)
    assert 'headwater_spark_query_failures_total{query="copying"} 1.0' in page
    assert "headwater_spark_queries_running 0.0" in page
    assert {"status": "stopped", "source": "numbers", "target": "copies", "error": None}.items() <= state.items()
    assert (state["name"], state["batch"], state["rows"], state["lag_messages"]) == ("copying", 1, 100, 0)
    assert {name: offset_of(token) for name, token in state["offsets"].items()} == {
        source: offset_of(last_offset(streams, target, 300))
    }
    phases = state["phases_ms"]
    assert 0 < state["batch_ms"] == phases["triggerExecution"] - phases["latestOffset"]
    assert abs(state["updated_at_ms"] - time.time() * 1000) < 300_000
    failed = copying()
    assert f"{source!r}" in failed["error"]["message"]
    assert "onGone=restart" in failed["error"]["message"]
    assert "\n" not in failed["error"]["message"]


def last_offset(streams: Streams, copy: str, count: int) -> str:
    """The last offset of the copy, which has the same messages and therefore the same offsets."""
    assert len(streams.raw(copy)) == count
    return streams.tail(copy)


def test_states_are_published_rarely_and_the_last_is_never_missed(
    streams: Streams, stream_name: Callable[[], str]
) -> None:
    published = stream_name()
    status = StatusStream(streams.root, published, interval_s=0.3)
    for n in range(200):
        status.publish("query", "one", {"batch": n})
    status.publish("slot", "items", {"lag_bytes": 7})
    status.close()
    events = streams.messages(published)
    assert len(events) < 10, "states in between are skipped"
    kept = streams.http.head(f"{streams.root}/{published}").headers
    assert int(kept["stream-retention-bytes"]) > 2**20
    assert kept["stream-retention-drop"] == "allowed", "otherwise readers that fold it would read more and more"
    states = folded(events)
    assert states["query", "one"]["batch"] == 199
    assert states["slot", "items"]["lag_bytes"] == 7


def test_states_wait_for_an_unavailable_server(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"DS_STORAGE__MODE": "file-durable", "DS_STORAGE__DATA_DIR": "data"}
    with httpx.Client(timeout=60) as http:
        with serve(directory=tmp_path, port=free_port(), **settings) as server:
            streams = Streams(f"{server.url}/v1/stream", http)
            status = StatusStream(streams.root, interval_s=0.0)
            status.publish("query", "one", {"batch": 1})
            wait_until(lambda: streams.exists("__pipeline__") and bool(streams.raw("__pipeline__")), "it is published")
            server.kill()
        # If this waited for the server, which starts after it, it would never end.
        status.publish("query", "one", {"batch": 2})
        with serve(directory=tmp_path, port=server.port, **settings):
            wait_until(lambda: streams.messages("__pipeline__")[-1]["value"]["batch"] == 2, "the new state arrives")
        status.close()
