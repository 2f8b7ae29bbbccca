"""The session: its settings, and undocumented behaviour of Spark that the connector relies on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

from headwater.spark import conf_lines, recommended_settings, session
from headwater.spark.session import skip_checksum_files, warn_of_slow_sockets
from headwater.spark.writer import BATCH_ID_PROPERTY, QUERY_ID_PROPERTY
from tests.spark.querying import follow, read
from tests.spark.streams import Streams


def test_recommended_settings_are_applied(spark: SparkSession) -> None:
    for name, value in recommended_settings().items():
        assert spark.conf.get(name) == value
    assert all(line.startswith("--conf spark.") for line in conf_lines())
    assert len(conf_lines(local_checkpoints=True)) > len(conf_lines())


def test_tasks_know_their_query_and_batch(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str], tmp_path: Path
) -> None:
    """The sink's producer ids use undocumented properties; this test fails if Spark no longer has them."""
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


def test_local_files_have_no_checksum_file_but_an_existing_one_is_used(spark: SparkSession, tmp_path: Path) -> None:
    numbers = spark.range(1000, numPartitions=1).selectExpr("cast(id as string)")
    numbers.write.text(str(tmp_path / "new"))
    assert not list((tmp_path / "new").glob(".part-*.crc"))

    hadoop: Any = spark._jvm
    hadoop.org.apache.hadoop.fs.FileSystem.getLocal(spark._jsc.hadoopConfiguration()).setWriteChecksum(True)
    try:
        numbers.write.text(str(tmp_path / "old"))
    finally:
        skip_checksum_files()
    (part,) = (tmp_path / "old").glob("part-*")
    part.write_bytes(part.read_bytes().replace(b"500", b"501"))
    with pytest.raises(Exception, match="ChecksumException"):
        spark.read.text(str(tmp_path / "old")).collect()


def test_a_session_without_the_settings_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_slow_sockets({"PYTHON_UNIX_DOMAIN_ENABLED": "true"})
    assert not caplog.records
    warn_of_slow_sockets({})
    assert "headwater.spark.session()" in caplog.text
    assert "spark.python.unix.domain.socket.enabled=true" in caplog.text


def test_running_session_is_used_and_its_settings_are_checked(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    assert session() is spark
    assert not caplog.records
    spark.conf.set("spark.sql.adaptive.enabled", "true")
    try:
        assert session() is spark
    finally:
        spark.conf.set("spark.sql.adaptive.enabled", "false")
    assert "lacks spark.sql.adaptive.enabled=false" in caplog.text


def test_filters_are_pushed_down_and_the_rows_are_correct(
    spark: SparkSession, streams: Streams, stream_name: Callable[[], str]
) -> None:
    name = streams.filled(stream_name(), range(5000))
    frame = read(spark, streams.root, streams=name).where("position >= 4990")
    assert [int(row.value) for row in frame.collect()] == list(range(4990, 5000))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert read(spark, streams.root, streams=name).where("position >= 4990").count() == 10
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
