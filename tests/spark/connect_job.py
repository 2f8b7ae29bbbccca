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


class Told(ProgressStream):
    """Notes when it has heard everything."""

    heard_of_the_end = False

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        super().onQueryTerminated(event)
        self.heard_of_the_end = True


def main() -> None:
    job = json.loads(sys.argv[1])
    spark = SparkSession.builder.remote(job["address"]).getOrCreate()
    url = {"url": job["url"]}
    rows = spark.read.format("headwater").options(**url, streams=job["source"]).load()
    assert rows.count() == 500
    rows.write.format("headwater").options(**url, stream=job["copy"], createMissing="true").mode("append").save()
    told = Told(job["url"], job["told"])
    spark.streams.addListener(told)
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
    while not told.heard_of_the_end:
        assert time.monotonic() < deadline, "the listener was not told of the end"
        time.sleep(0.1)
    spark.streams.removeListener(told)
    told.close()
    spark.stop()


if __name__ == "__main__":
    main()
