"""A driver of its own, to be killed: copies streams to streams until it is killed or all is copied.

Run as `python -m tests.spark.copy_job JSON`, the JSON telling where from and where to. Prints `running` once.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from headwater.spark import by_target, configure


def main() -> None:
    job = json.loads(sys.argv[1])
    builder = (
        SparkSession.Builder()
        .master(job["master"])
        .appName("copy")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.local.dir", job["scratch"])
        .config("spark.sql.warehouse.dir", job["scratch"] + "/warehouse")
        .config("spark.task.maxFailures", "20")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    )
    for name, value in job.get("conf", {}).items():
        builder = builder.config(name, value)
    spark = configure(builder).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    reader = spark.readStream.format("headwater").options(url=job["url"], **job["source"]).load()
    rows = reader.select(F.concat(F.lit("copy-of-"), "stream").alias("stream"), "position", "value")
    query = (
        by_target(rows, partitions=2)
        .writeStream.format("headwater")
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
