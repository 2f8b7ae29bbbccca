"""A separate driver to be killed: it copies streams to streams until it is killed or everything is copied.

Run as `python -m tests.spark.copy_job JSON`; the JSON names sources and targets. Prints `running` once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import functions as F

from headwater.spark import by_target
from headwater.spark.session import start_session
from headwater.spark.writer import BATCH_ID_PROPERTY
from tests.spark.session import JAVA_OPTIONS

SLOW_S = 60.0
"""Longer than the other task takes on a busy machine; the speculative attempt ends this one."""


def slow_at_first(marks: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make the first attempt of one task slow; every attempt creates a mark."""

    def pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        assert task is not None
        batch, partition, attempt = task.getLocalProperty(BATCH_ID_PROPERTY), task.partitionId(), task.attemptNumber()
        Path(marks, f"{batch}-{partition}-{attempt}").touch()
        yield from batches
        if (batch, partition, attempt) == ("1", 0, 0):
            time.sleep(SLOW_S)

    return pass_on


def main() -> None:
    job = json.loads(sys.argv[1])
    conf = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": job["scratch"],
        "spark.sql.warehouse.dir": job["scratch"] + "/warehouse",
        "spark.task.maxFailures": "20",
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    }
    spark = start_session("copy", job["master"], conf | job.get("conf", {}))
    spark.sparkContext.setLogLevel("ERROR")
    reader = spark.readStream.format("headwater").options(url=job["url"], **job["source"]).load()
    rows = reader.select(F.concat(F.lit("copy-of-"), "stream").alias("stream"), "position", "value")
    arranged = by_target(rows, partitions=2)
    if "marks" in job:
        arranged = arranged.mapInArrow(slow_at_first(job["marks"]), arranged.schema)
    query = (
        arranged.writeStream.format("headwater")
        .options(url=job["url"], orderBy="position", createMissing="true", **job["sink"])
        .option("checkpointLocation", job["checkpoint"])
        .trigger(processingTime="0 seconds")
        .start()
    )
    sys.stdout.write("running\n")
    sys.stdout.flush()
    query.awaitTermination()


if __name__ == "__main__":
    main()
