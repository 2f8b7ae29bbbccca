#!/usr/bin/env python3
"""Write the archive of the JVM's classes for the Sparks of the tests, unless there is one.

    scripts/archive_spark_classes.py

Each JVM then loads its classes in a few seconds of CPU time less (`headwater.spark.class_archive`). The archive has the
classes that a query loads which reads from a stream, groups, and writes to a stream.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.serving import serve
from tests.spark.session import use_test_environment

from headwater.pipeline.session import spark_session
from headwater.spark.home import use_quick_home


def main() -> None:
    use_test_environment()
    archive = use_quick_home("local")
    if archive is None or archive.exists:
        return
    with (
        tempfile.TemporaryDirectory() as checkpoint,
        serve(DS_STORAGE__MODE="memory") as server,
        spark_session("archive", archives_classes=True) as spark,
    ):
        root = f"{server.url}/v1/stream"
        httpx.put(f"{root}/in", content=b"[1,2]", headers={"Content-Type": "application/json"}).raise_for_status()
        rows = spark.readStream.format("headwater").options(url=root, streams="in").load()
        query = (
            rows.writeStream.format("headwater")
            .options(url=root, stream="out", createMissing="true", checkpointLocation=checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        read = spark.read.format("headwater").options(url=root, streams="out").load()
        counted = read.groupBy("value").count().collect()
        assert len(counted) == 2, counted


if __name__ == "__main__":
    main()
