"""The session: its settings, and undocumented behaviour of Spark that the connector relies on."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
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
from tests.spark.session import REPOSITORY, worker_environment
from tests.spark.streams import Streams


def test_recommended_settings_are_applied(spark: SparkSession) -> None:
    for name, value in recommended_settings().items():
        assert spark.conf.get(name) == value
    assert all(line.startswith("--conf spark.") for line in conf_lines())
    assert len(conf_lines(local_checkpoints=True)) > len(conf_lines())


STARTING = """
import json, os
from pyspark import SparkContext
from headwater.spark.session import start_session
conf = {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "3", "spark.sql.adaptive.enabled": "true"}
session = start_session("started", "local[1]", conf, local_checkpoints=True)
names = ("spark.app.name", "spark.master", "spark.sql.shuffle.partitions", "spark.sql.adaptive.enabled",
         "spark.hadoop.fs.file.impl", "spark.driver.extraJavaOptions")
print(json.dumps([
    {name: session.sparkContext.getConf().get(name) for name in names},
    SparkContext._gateway._callback_server is not None,
    os.environ.get("SPARK_HOME"),
]))
session.stop()
"""


def test_started_session_has_all_settings_and_preparations() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "SPARK_HOME"} | worker_environment()
    done = subprocess.run(
        [sys.executable, "-c", STARTING], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    conf, has_callback_server, home = json.loads(done.stdout.splitlines()[-1])
    java_options = conf.pop("spark.driver.extraJavaOptions")
    assert conf == {
        "spark.app.name": "started",
        "spark.master": "local[1]",
        "spark.sql.shuffle.partitions": "3",
        "spark.sql.adaptive.enabled": "false",  # What streams need is not overridden.
        "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    }
    assert "Tier4" in java_options
    assert has_callback_server
    assert home is not None
    assert "headwater" in home


def test_sessions_are_started_in_one_place() -> None:
    """Only Spark Connect, whose sessions have no JVM in the process, is started elsewhere."""
    callers = {
        str(path.relative_to(REPOSITORY))
        for directory in ("src", "bench", "tests", "scripts")
        for path in (REPOSITORY / directory).rglob("*.py")
        if "node_modules" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "getOrCreate"
    }
    assert callers == {"src/headwater/spark/session.py", "tests/spark/connect_job.py"}


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
