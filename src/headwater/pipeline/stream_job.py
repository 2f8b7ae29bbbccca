"""The base of the jobs that read streams: the selection of streams, and the query over them.

Invariant: the query has the job's name and its checkpoint is under that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headwater.spark.callbacks import start_callback_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater.pipeline.job import JobEnvironment
    from headwater.spark.options import ConnectionOptions

JobName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
MIB = 1 << 20


class StreamJob(BaseModel):
    """A job that reads some streams; subclasses define what it does with them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: JobName = "streams"
    bucket: str = Field("", description="Read streams of this bucket instead of /v1/stream/.")
    streams: tuple[str, ...] = Field((), description="Stream names; if empty, all of the bucket, or those of `prefix`.")
    prefix: str = Field("", description="Streams whose names begin with this, including those created later.")

    @model_validator(mode="after")
    def _selects_streams(self) -> Self:
        if self.streams and self.prefix:
            raise ValueError("give streams or a prefix, not both")
        if not (self.bucket or self.streams or self.prefix):
            raise ValueError("name what to read: a bucket, streams, or a prefix")
        return self

    @property
    def source(self) -> str:
        root = f"/ds/{self.bucket}/" if self.bucket else ""
        return ", ".join(root + name for name in self.streams) or f"{root}{self.prefix}*"

    def connection(self, environment: JobEnvironment) -> ConnectionOptions:
        """Options for requests outside the query, in which streams have the names that `streams` uses."""
        return environment.connection(self.bucket)

    def source_options(self, environment: JobEnvironment) -> dict[str, Any]:
        """Options of the Spark source for the selected streams."""
        selected = {"bucket": self.bucket, "streams": ",".join(self.streams), "prefix": self.prefix}
        return {**environment.options, **{name: value for name, value in selected.items() if value}}

    def start_batches(
        self,
        spark: SparkSession,
        environment: JobEnvironment,
        columns: str,
        options: Mapping[str, str | int],
        process: Callable[[DataFrame, int], None],
        *,
        once: bool,
    ) -> StreamingQuery:
        """Read the streams as these columns and call `process` with every batch and its number."""
        start_callback_server()
        query = (
            spark.readStream.format("headwater")
            .schema(columns)
            .options(**self.source_options(environment), **options)
            .load()
            .writeStream.queryName(self.name)
            .foreachBatch(process)
            .option("checkpointLocation", environment.checkpoint(self.name))
        )
        return (query.trigger(availableNow=True) if once else query.trigger(processingTime="0 seconds")).start()
