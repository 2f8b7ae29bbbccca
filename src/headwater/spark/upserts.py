"""Publish the results of aggregations live: the rows of each batch as upserts of their keys.

Spark does not allow the output mode `update` for sinks in Python, so its batches are written by `foreachBatch`, each
under its batch number. Invariant: a batch that Spark repeats appends nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from headwater.spark.callbacks import start_callback_server
from headwater.spark.errors import OptionError
from headwater.spark.options import sink_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

QUERY_ID_PROPERTY = "sql.streaming.queryId"


def upserts(
    frame: DataFrame, *, key: str | Sequence[str], mode: Literal["update", "complete"] = "update", **options: str
) -> DataStreamWriter:
    """A writer that appends each row of a batch as a state-protocol message; add a trigger and start it.

    `mode` is Spark's output mode: with `update` a batch has the rows that changed, with `complete` it has all rows and
    replaces those before. `options` are those of the sink, with `checkpointLocation`.
    """
    given = {**options, "keyColumns": key if isinstance(key, str) else ",".join(key)}
    parsed = sink_options(given)
    if not parsed.checkpoint:
        raise OptionError("upserts needs checkpointLocation: staged rows and the number of each batch are kept there.")
    writer = frame.writeStream.outputMode(mode).option("checkpointLocation", parsed.checkpoint)
    if mode == "complete":
        return writer.format("headwater").options(**given)

    def append(batch: DataFrame, number: int) -> None:
        producer = parsed.producer_id or _query_id(batch)
        batch.write.format("headwater").options(**given, producerId=producer, batchId=number).mode("append").save()

    given.pop("producerId", None)
    start_callback_server()
    return writer.foreachBatch(append)


def _query_id(batch: DataFrame) -> str:
    """The id of the query that runs this batch; it stays the same for as long as its checkpoint exists."""
    context = getattr(batch.sparkSession, "sparkContext", None)
    found = context.getLocalProperty(QUERY_ID_PROPERTY) if context is not None else None
    if not found:
        raise OptionError("The id of the query is unknown (Spark Connect): set producerId to a unique name.")
    return str(found)
