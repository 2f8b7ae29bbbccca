"""Orders above 15 go from the stream `orders` to the stream `large-orders`, exactly once."""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

URL = os.environ.get("STREAMS_URL", "http://localhost:4437/v1/stream")


@dp.temporary_view
def orders() -> DataFrame:
    """The messages that are new since the last run."""
    return (
        SparkSession.active()
        .readStream.format("headwater")
        .option("url", URL)
        .option("streams", "orders")
        .schema("id long, customer string, amount double, value string, _corrupt string")
        .load()
        .where("_corrupt is null")
    )


dp.create_sink(
    "large_orders", format="headwater", options={"url": URL, "stream": "large-orders", "createMissing": "true"}
)


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """The rows for the other stream."""
    return SparkSession.active().readStream.table("orders").where("amount > 15").select("value")
