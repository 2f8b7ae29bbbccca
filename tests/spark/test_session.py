"""The session: settings that are in force, and what the connector relies on in Spark without being promised it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from headwater.spark import conf_lines, recommended_settings
from headwater.spark.writer import BATCH_ID_PROPERTY, QUERY_ID_PROPERTY
from tests.spark.querying import follow
from tests.spark.streams import Streams


def test_the_recommended_settings_are_in_force(spark: SparkSession) -> None:
    for name, value in recommended_settings().items():
        assert spark.conf.get(name) == value
    assert all(line.startswith("--conf spark.") for line in conf_lines())
    assert len(conf_lines(local_checkpoints=True)) > len(conf_lines())


def test_spark_tells_tasks_their_query_and_batch(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    """Undocumented properties that the sink's producer names are made of: a Spark without them must be noticed here."""
    source = streams.filled(stream_name(), [1])
    directory = str(tmp_path / "seen")

    def note(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        seen = [str(task.getLocalProperty(name)) for name in (QUERY_ID_PROPERTY, BATCH_ID_PROPERTY)]
        Path(directory).write_text(" ".join(seen))
        yield from batches

    frame = follow(spark, streams.root, streams=source)
    query = (
        frame.mapInArrow(note, frame.schema)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "c"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert Path(directory).read_text() == f"{query.id} 0"
