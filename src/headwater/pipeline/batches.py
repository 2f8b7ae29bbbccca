"""A query over chosen streams, handed over batch by batch: what folds and archives have in common around their work.

Invariant: the query goes by the job's name and keeps its place under it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater.pipeline.job import Surroundings


class Chosen(Protocol):
    """Which streams a job reads, and how."""

    @property
    def name(self) -> str: ...
    @property
    def bucket(self) -> str: ...
    @property
    def streams(self) -> tuple[str, ...]: ...
    @property
    def prefix(self) -> str: ...
    @property
    def batch_bytes(self) -> int: ...
    @property
    def once(self) -> bool: ...


def start_batches(
    job: Chosen,
    spark: SparkSession,
    surroundings: Surroundings,
    columns: str,
    options: Mapping[str, str],
    each: Callable[[DataFrame, int], None],
) -> StreamingQuery:
    """Read the job's streams as these columns, and call `each` with every batch and its number."""
    given: dict[str, Any] = {**surroundings.options, "maxBytesPerBatch": job.batch_bytes, **options}
    chosen = {
        "bucket": job.bucket,
        "streams": ",".join(job.streams),
        "prefix": job.prefix,
    }
    given |= {name: value for name, value in chosen.items() if value}
    query = (
        spark.readStream.format("headwater")
        .schema(columns)
        .options(**given)
        .load()
        .writeStream.queryName(job.name)
        .foreachBatch(each)
        .option("checkpointLocation", surroundings.checkpoint(job.name))
    )
    return (query.trigger(availableNow=True) if job.once else query.trigger(processingTime="0 seconds")).start()
