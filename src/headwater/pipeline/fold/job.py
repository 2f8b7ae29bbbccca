"""The fold as a job: which streams, into which table, published how often; one query for one stream or ten thousand.

No state is kept in Spark. A batch is folded onto what its targets hold: the stream's last snapshot, the table's rows.
Invariant: a batch that is done again finds its targets at or behind its end, and does only what is missing.
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
        description="Publish once there are this many messages behind the last snapshot. Publishing makes a stream"
        " forget what lies before, so readers that are behind must bootstrap: more means fewer of them.",
    )
    table: str = Field("", description="Also keep the state in this table of the database.")
    tasks: int = Field(2, ge=1, description="Spark tasks that a batch is folded by.")
    parallel: int = Field(8, ge=1, description="Streams under way at once in each task.")
    batch_bytes: int = Field(64 * 1024 * 1024, ge=1, description="Most bytes of messages in one batch.")
    once: bool = Field(False, description="End when everything there was at the start is folded.")

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if not self.snapshots and not self.table:
            raise ValueError("a fold without snapshots and without a table has nowhere to go")
        if self.snapshots and not self.bucket:
            raise ValueError(
                "streams of /v1/stream/ have no snapshots, only those of a bucket (/ds/BUCKET/…): name a bucket, or"
                " fold into a table alone"
            )
        return self

    @property
    def target(self) -> str:
        return self.table or "snapshots"

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        if self.table and not environment.postgres:
            raise ValueError(f"fold {self.name!r} has a table but there is no database: set POSTGRES_URL")
        task = self.task(environment)
        if self.table:
            self._prepare_table(spark, environment, task)

        def fold_batch(batch: DataFrame, batch_id: int) -> None:
            totals = self.run(batch, task)
            log.info("fold %s: batch %d: %s", self.name, batch_id, totals)

        # What a snapshot of ours stands for is gone from the stream, and streams come and go: neither is an error.
        # A place that does not join the rows is seen, and read from the snapshot.
        options: dict[str, str | int] = {"onGone": "skip", "maxBytesPerBatch": self.batch_bytes}
        return self.start_batches(spark, environment, COLUMNS, options, fold_batch, once=self.once)

    def run(self, batch: DataFrame, task: FoldTask) -> FoldTotals:
        """Fold a batch of rows of any order."""
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
        """Make it, and put in what only snapshots still hold."""
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
    """Brings streams into the table whose beginning is only a snapshot any more, and which may never speak again."""

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
