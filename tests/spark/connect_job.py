"""A client of a Spark Connect server: a batch read, a batch write, and a streaming copy."""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession


def main() -> None:
    job = json.loads(sys.argv[1])
    spark = SparkSession.builder.remote(job["address"]).getOrCreate()
    url = {"url": job["url"]}
    rows = spark.read.format("headwater").options(**url, streams=job["source"]).load()
    assert rows.count() == 500
    rows.write.format("headwater").options(**url, stream=job["copy"], createMissing="true").mode("append").save()
    query = (
        spark.readStream.format("headwater")
        .options(**url, streams=job["source"], maxRowsPerBatch="200")
        .load()
        .writeStream.format("headwater")
        .options(**url, stream=job["streamed"], createMissing="true", checkpointLocation=job["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    spark.stop()


if __name__ == "__main__":
    main()
