"""A client of a Spark Connect server: a batch read, a batch write, a streaming copy, and a listener of its progress."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from headwater.spark import by_target
from headwater.spark.progress import ProgressStream

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import QueryTerminatedEvent


class RecordingProgress(ProgressStream):
    """Records that the end of the query was reported."""

    is_terminated = False

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        super().onQueryTerminated(event)
        self.is_terminated = True


def main() -> None:
    job = json.loads(sys.argv[1])
    spark = SparkSession.builder.remote(job["address"]).getOrCreate()
    url = {"url": job["url"]}
    rows = spark.read.format("headwater").options(**url, streams=job["source"]).load()
    assert rows.count() == 500
    rows.write.format("headwater").options(**url, stream=job["copy"], createMissing="true").mode("append").save()
    progress = RecordingProgress(job["url"], job["progress"])
    spark.streams.addListener(progress)
    followed = spark.readStream.format("headwater").options(**url, streams=job["source"], maxRowsPerBatch="200").load()
    query = (
        by_target(followed, partitions=2)
        .writeStream.format("headwater")
        .options(**url, stream=job["streamed"], createMissing="true", orderBy="position")
        .option("checkpointLocation", job["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    deadline = time.monotonic() + 60
    while not progress.is_terminated:
        assert time.monotonic() < deadline, "the end of the query was not reported to the listener"
        time.sleep(0.1)
    spark.streams.removeListener(progress)
    progress.close()
    spark.stop()


if __name__ == "__main__":
    main()
