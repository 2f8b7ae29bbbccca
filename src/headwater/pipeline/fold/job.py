"""The fold job: which streams to fold, into which table, how often to publish; one query for any number of streams.

Spark keeps no state. A batch is folded onto the contents of its targets: the stream's last snapshot, the table's rows.
Invariant: a repeated batch finds its targets at or after its end, and writes only what is missing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from headwater.pipeline.fold.snapshot_client import SnapshotClient, snapshot_client
from headwater.pipeline.fold.task import SCHEMA, TOTALS, FoldTask, FoldTotals
from headwater.pipeline.stream_job import JobName, StreamJob

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater.pipeline.job import JobEnvironment

log = logging.getLogger("headwater.pipeline")

COLUMNS = "stream string, offset string, position long, value binary"


class Fold(StreamJob):
    """A configured fold. Only streams of a bucket have snapshots."""

    name: JobName = "fold"
    snapshots: bool = Field(True, description="Publish the state as snapshots, for bootstrap.")
    every: int = Field(
        1,
        ge=1,
        description="Publish when there are this many messages after the last snapshot. Publishing lets the server"
        " delete the messages before it, so readers that are behind must bootstrap; with a larger number, fewer must.",
    )
    table: str = Field("", description="Also keep the state in this table of the database.")
    tasks: int = Field(2, ge=1, description="Spark tasks that fold a batch.")
    parallel: int = Field(8, ge=1, description="Streams that each task folds at the same time.")
    batch_bytes: int = Field(64 * 1024 * 1024, ge=1, description="Most bytes of messages in one batch.")
    once: bool = Field(False, description="End when everything that was there at the start is folded.")

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if not self.snapshots and not self.table:
            raise ValueError("a fold needs a target: enable snapshots or name a table")
        if self.snapshots and not self.bucket:
            raise ValueError(
                "only streams of a bucket (/ds/BUCKET/…) have snapshots, those of /v1/stream/ do not: name a bucket, or"
                " disable snapshots and name a table"
            )
        return self

    @property
    def target(self) -> str:
        return self.table or "snapshots"

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        if self.table and not environment.postgres:
            raise ValueError(f"fold {self.name!r} has a table, but no database is configured: set POSTGRES_URL")
        task = self.task(environment)
        if self.table:
            self._prepare_table(spark, environment, task)

        def fold_batch(batch: DataFrame, batch_id: int) -> None:
            totals = self.run(batch, task)
            log.info("fold %s: batch %d: %s", self.name, batch_id, totals)

        # Messages that our own snapshots let the server delete, and deleted streams, are not errors. If messages are
        # missing before the rows, the fold starts from the snapshot.
        options: dict[str, str | int] = {"onGone": "skip", "maxBytesPerBatch": self.batch_bytes}
        return self.start_batches(spark, environment, COLUMNS, options, fold_batch, once=self.once)

    def run(self, batch: DataFrame, task: FoldTask) -> FoldTotals:
        """Fold a batch of rows, in any order."""
        shares = batch.repartition(self.tasks, "stream").sortWithinPartitions("stream", "position")
        rows = shares.mapInArrow(task, SCHEMA).collect()
        return FoldTotals(*(sum(row[name] for row in rows) for name in TOTALS))

    def task(self, environment: JobEnvironment) -> FoldTask:
        return FoldTask(
            self.connection(environment),
            self.snapshots,
            self.every,
            self.parallel,
            self.table,
            environment.postgres if self.table else "",
        )

    def _prepare_table(self, spark: SparkSession, environment: JobEnvironment, task: FoldTask) -> None:
        """Create the table, and write the streams whose first messages are only in snapshots."""
        from headwater.pipeline.fold.table import FoldTable, connect  # noqa: PLC0415 - only where there is a table

        with connect(environment.postgres) as connection:
            FoldTable(connection, self.table).create_missing()
        if not self.bucket:
            return
        names = list(self.streams) or self._listed(environment)
        if names:
            frame = spark.createDataFrame([(name,) for name in sorted(names)], "stream string")
            frame.repartition(self.tasks, "stream").mapInArrow(SeedTask(task), SCHEMA).collect()

    def _listed(self, environment: JobEnvironment) -> list[str]:
        client = SnapshotClient(self.connection(environment))
        try:
            return client.listing(self.prefix)
        finally:
            client.disconnect()


class SeedTask:
    """Write the streams whose first messages are only in a snapshot to the table; they may get no further messages."""

    def __init__(self, task: FoldTask) -> None:
        self._task = task

    def __call__(self, batches: Any) -> Any:
        from headwater.pipeline.fold.table import FoldTable, connect  # noqa: PLC0415 - only where there is a table

        client = snapshot_client(self._task.connection)
        totals = FoldTotals()
        for batch in batches:
            with connect(self._task.postgres) as connection:
                table = FoldTable(connection, self._task.table)
                totals.entries += table.seed(client, batch.column("stream").to_pylist()).entries
        yield totals.batch()
