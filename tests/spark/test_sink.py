"""The sink: how rows are encoded, and that each is in its target once, in order, despite retries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headwater.spark import by_target
from tests.spark.holding import holding
from tests.spark.querying import follow, read, run, write
from tests.spark.streams import Streams
from tests.spark.test_source_stream import forget_last_commit


def test_structs_become_json_and_missing_streams_are_created(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str]
) -> None:
    targets = [stream_name() for _ in range(3)]
    rows = spark.range(30).select(
        F.element_at(F.array(*map(F.lit, targets)), (F.col("id") % 3 + 1).cast("int")).alias("stream"),
        F.struct(
            "id",
            F.lit("é").alias("text"),
            F.array(F.lit(1.5)).alias("list"),
            F.create_map(F.lit("k"), F.lit(True)).alias("map"),
            F.lit("2024-01-01").cast("date").alias("day"),
            F.lit("1.10").cast("decimal(5,2)").alias("price"),
        ).alias("value"),
        "id",
    )
    with pytest.raises(PySparkException, match="createMissing=true"):
        write(rows, streams.root)
    write(by_target(rows, partitions=2), streams.root, createMissing="true", orderBy="id")
    for at, target in enumerate(targets):
        assert streams.messages(target) == [
            {"id": n, "text": "é", "list": [1.5], "map": {"k": True}, "day": "2024-01-01", "price": 1.10}
            for n in range(at, 30, 3)
        ]


def test_job_repeated_with_the_same_producer_id_appends_nothing_and_may_close(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    target = stream_name()
    # The rows of a refused job stay staged; with the usual directory, the next run of this test would append them.
    job = {"stream": target, "producerId": f"job-{target}", "stagingPath": str(tmp_path)}
    rows = spark.range(10).coalesce(1).select(F.col("id").cast("string").alias("value"))
    for _ in range(2):
        write(rows, streams.root, createMissing="true", **job)
    assert streams.messages(target) == list(range(10))
    other = rows.limit(9)
    with pytest.raises(PySparkException, match=r"an earlier attempt appended crc32:.* this attempt has"):
        write(other, streams.root, **job)
    write(rows, streams.root, stream=target, producerId="another", closeStreams="true")
    assert streams.is_closed(target)
    with pytest.raises(PySparkException, match="closed"):
        write(rows, streams.root, stream=target)


def test_other_content_types_by_row_and_by_line(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str]
) -> None:
    by_row, by_line = stream_name(), stream_name()
    rows = spark.range(5).select("id", F.concat(F.lit("row "), F.col("id")).alias("value")).coalesce(1)
    text = {"contentType": "text/plain", "createMissing": "true"}
    write(rows, streams.root, stream=by_row, orderBy="id", **text)
    write(rows, streams.root, stream=by_line, rowsAs="lines", **text)
    assert streams.content(by_row) == b"row 0row 1row 2row 3row 4"
    assert streams.content(by_line) == b"row 0\nrow 1\nrow 2\nrow 3\nrow 4\n"


# -- attempts that fail halfway ----------------------------------------------------------------------------------------


def failing_after(marker: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Fail the first attempt after its rows were appended."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if not marker.exists():
            marker.touch()
            raise RuntimeError("failed on purpose")

    return pass_on


def test_a_failed_attempt_and_a_lost_commit_leave_every_row_once(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    """A task fails after some of its appends, then the driver loses its commit."""
    source = streams.filled(stream_name(), [{"n": n} for n in range(2000)])
    target = streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source).coalesce(1)
    frame = frame.mapInArrow(failing_after(tmp_path / "failed"), frame.schema)
    options = {"stream": target, "orderBy": "position", "maxRequestBytes": 2000}
    run(frame, streams.root, tmp_path / "c", **options)
    assert (tmp_path / "failed").exists()
    forget_last_commit(tmp_path / "c")
    streams.append(source, [{"n": 2000}])
    run(frame, streams.root, tmp_path / "c", **options)
    assert streams.raw(target) == streams.raw(source)


def truncating(marker: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Fail the first attempt after half of its rows; the writer's input then ends as if it were complete."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not marker.exists():
                marker.touch()
                yield batch.slice(0, batch.num_rows // 2)
                raise RuntimeError("failed on purpose")
            yield batch

    return pass_on


@pytest.mark.parametrize("options", [{}, {"commitMode": "driver"}, {"commitMode": "task"}])
def test_truncated_attempt_loses_and_duplicates_nothing(
    spark: SparkSession,
    streams: Streams,
    stream_name: Callable[[], str],
    tmp_path: Path,
    options: dict[str, str],
) -> None:
    source, target = streams.filled(stream_name(), [{"n": n} for n in range(2000)]), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source)
    frame = frame.mapInArrow(truncating(tmp_path / "failed"), frame.schema)
    run(frame, streams.root, tmp_path / "c", stream=target, **options)
    assert (tmp_path / "failed").exists()
    assert streams.raw(target) == streams.raw(source)


def test_a_truncated_attempt_of_a_batch_write_is_not_visible(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), [{"n": n} for n in range(2000)]), streams.create(stream_name())
    frame = read(spark, streams.root, streams=source).withColumn("value", F.expr("to_json(struct(uuid(), value))"))
    write(frame.mapInArrow(truncating(tmp_path / "failed"), frame.schema), streams.root, stream=target)
    assert (tmp_path / "failed").exists()
    assert [json.loads(one["value"])["n"] for one in streams.messages(target)] == list(range(2000))


def test_tasks_that_append_other_rows_on_a_retry_fail(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), [1, 2, 3]), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source).withColumn("value", F.expr("to_json(struct(uuid()))"))
    run(frame, streams.root, tmp_path / "c", stream=target, commitMode="task")
    first = streams.raw(target)
    forget_last_commit(tmp_path / "c")
    with pytest.raises(StreamingQueryException, match="without commitMode=task"):
        run(frame, streams.root, tmp_path / "c", stream=target, commitMode="task")
    assert streams.raw(target) == first


@pytest.mark.parametrize("options", [{}, {"commitMode": "driver"}, {"maxRequestBytes": 2000}])
def test_rows_that_differ_between_attempts(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path, options: dict[str, Any]
) -> None:
    """The target has the rows of the first complete attempt, even if the second one has others."""
    source, target = streams.filled(stream_name(), range(100)), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source).withColumn("value", F.expr("to_json(struct(uuid(), value))"))
    options = {"stream": target} | options
    run(frame, streams.root, tmp_path / "c", **options)
    first = streams.raw(target)
    assert len(first) == 100
    forget_last_commit(tmp_path / "c")
    streams.append(source, [100])
    run(frame, streams.root, tmp_path / "c", **options)
    assert streams.raw(target)[:100] == first
    assert [json.loads(one["value"]) for one in streams.messages(target)] == list(range(101))


def test_a_stream_that_is_read_by_many_tasks_arrives_in_order(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), [{"n": n} for n in range(20_000)]), streams.create(stream_name())
    copy = streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source, minPartitions=8)
    run(frame, streams.root, tmp_path / "c", stream=target)
    assert streams.raw(target) == streams.raw(source)
    write(read(spark, streams.root, streams=source, minPartitions=8), streams.root, stream=copy)
    assert streams.raw(copy) == streams.raw(source)


@pytest.mark.parametrize("options", [{}, {"commitMode": "task"}])
def test_another_number_of_tasks_after_a_crash_changes_nothing(
    spark: SparkSession,
    streams: Streams,
    stream_name: Callable[[], str],
    tmp_path: Path,
    options: dict[str, str],
) -> None:
    messages = [{"n": n, "pad": "x" * 500} for n in range(2000)]
    source, target = streams.filled(stream_name(), messages), streams.create(stream_name())
    for tasks, rows in ((1, 2000), (4, 2001), (3, 2001)):
        frame = follow(spark, streams.root, streams=source, minPartitions=tasks)
        run(frame, streams.root, tmp_path / "c", stream=target, **options)
        assert streams.raw(target) == streams.raw(source)
        forget_last_commit(tmp_path / "c")
        if rows == 2000:
            streams.append(source, [{"n": 2000}])


def test_staged_files_of_earlier_batches_are_removed(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    source, target = streams.filled(stream_name(), range(10)), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source, maxRowsPerBatch=2)
    run(frame, streams.root, tmp_path / "c", stream=target, producerId="copies/of/numbers")
    (query,) = (tmp_path / "c" / "headwater").iterdir()
    assert [path.name for path in query.iterdir()] == ["batch-000000000004"]
    assert streams.messages(target) == list(range(10))


def test_an_older_batch_is_fenced(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    """A query that lost its checkpoint starts with batch 0 again, which is fenced by its own producer id."""
    source, target = streams.filled(stream_name(), range(10)), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source, maxRowsPerBatch=4)
    run(frame, streams.root, tmp_path / "c", stream=target, producerId=f"copy-{target}")
    with pytest.raises(StreamingQueryException, match="was already written, so an older batch is rejected"):
        run(frame, streams.root, tmp_path / "new", stream=target, producerId=f"copy-{target}")
    assert streams.messages(target) == list(range(10))


def test_late_append_of_a_dead_executor_is_rejected(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    """A worker is killed during an append, the retry appends the rows, and then the first append arrives."""
    source, target = streams.filled(stream_name(), range(30)), streams.create(stream_name())
    frame = follow(spark, streams.root, streams=source, maxRowsPerBatch=10)
    with holding(streams.root, epoch=1) as proxy:
        batches = run(frame, proxy.root, tmp_path / "c", stream=target, commitMode="task")
        assert [batch["numInputRows"] for batch in batches] == [10, 10, 10]
        assert proxy.killed is not None
        assert streams.messages(target) == list(range(30))
        assert proxy.let_go() == 403, "a later batch was appended"
    assert streams.messages(target) == list(range(30))
