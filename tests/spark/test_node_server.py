"""The official Node server, which has none of our extensions: source and sink work with it too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyspark.sql import SparkSession

from tests.spark.querying import follow, read, run, start, wait_until, write
from tests.spark.streams import Streams
from tests.spark.test_source_stream import forget_last_commit


def test_batches_limits_and_a_lost_commit(
    spark: SparkSession, node_streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    one = node_streams.filled(stream_name(), [{"n": n} for n in range(500)])
    target = stream_name()
    frame = follow(spark, node_streams.root, streams=one, maxRowsPerBatch=200).coalesce(1)
    batches = run(frame, node_streams.root, tmp_path / "c", stream=target, createMissing="true")
    assert [batch["numInputRows"] for batch in batches] == [200, 200, 100]
    node_streams.append(one, [{"n": n} for n in range(500, 520)])
    forget_last_commit(tmp_path / "c")
    batches = run(frame, node_streams.root, tmp_path / "c", stream=target)
    assert [batch["numInputRows"] for batch in batches] == [100, 20]
    assert node_streams.raw(target) == node_streams.raw(one)
    rows = read(spark, node_streams.root, "n long, position long", streams=one).collect()
    assert [row.n for row in rows] == [row.position for row in rows] == list(range(520))


def test_new_messages_arrive_by_long_poll(
    spark: SparkSession, node_streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    sources = [node_streams.create(stream_name()) for _ in range(2)]
    target = node_streams.create(stream_name())
    frame = follow(spark, node_streams.root, streams=",".join(sources))
    query = start(frame, node_streams.root, tmp_path / "c", stream=target)
    try:
        for n in range(4):
            node_streams.append(sources[n % 2], [n])
            wait_until(lambda n=n: len(node_streams.raw(target)) == n + 1, "the message is copied", query)  # type: ignore[misc]
    finally:
        query.stop()
    assert node_streams.messages(target) == [0, 1, 2, 3]


def test_text_is_read_in_pieces_and_written_in_lines(
    spark: SparkSession, node_streams: Streams, stream_name: Callable[[], str]
) -> None:
    source, target = node_streams.create(stream_name(), "text/plain"), stream_name()
    node_streams.append_bytes(source, b"hello ", "text/plain")
    node_streams.append_bytes(source, b"world", "text/plain")
    rows = read(spark, node_streams.root, streams=source)
    assert [row.value for row in rows.collect()] == ["hello world"]
    write(rows, node_streams.root, stream=target, contentType="text/plain", rowsAs="lines", createMissing="true")
    assert node_streams.content(target) == b"hello world\n"
