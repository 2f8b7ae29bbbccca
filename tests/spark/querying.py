"""Shortcuts for tests: reading and writing streams with Spark, and running a query to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests import waiting

WAIT_S = 180


def read(spark: SparkSession, url: str, schema: str | None = None, **options: Any) -> DataFrame:
    reader = spark.read.format("headwater").option("url", url).options(**options)
    return (reader.schema(schema) if schema else reader).load()


def follow(spark: SparkSession, url: str, schema: str | None = None, **options: Any) -> DataFrame:
    reader = spark.readStream.format("headwater").option("url", url).options(**options)
    return (reader.schema(schema) if schema else reader).load()


def write(df: DataFrame, url: str, **options: Any) -> None:
    df.write.format("headwater").option("url", url).options(**options).mode("append").save()


def start(df: DataFrame, url: str, checkpoint: Any, *, available_now: bool = False, **options: Any) -> StreamingQuery:
    writer = (
        df.writeStream.format("headwater")
        .option("url", url)
        .option("checkpointLocation", str(checkpoint))
        .options(**options)
    )
    writer = writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
    return writer.start()


def run(df: DataFrame, url: str, checkpoint: Any, **options: Any) -> list[dict[str, Any]]:
    """Process everything that exists now; return the progress of each batch."""
    query = start(df, url, checkpoint, available_now=True, **options)
    try:
        assert query.awaitTermination(WAIT_S), "the query did not end"
        return [dict(progress) for progress in query.recentProgress]
    finally:
        query.stop()


def wait_until(is_so: Callable[[], bool], what: str, query: StreamingQuery | None = None) -> None:
    def look() -> bool:
        if query is not None and query.exception() is not None:
            raise AssertionError(f"the query failed while waiting until {what}: {query.exception()}")
        return is_so()

    waiting.wait_until(look, what=what, limit_s=WAIT_S, every_s=0.05)
