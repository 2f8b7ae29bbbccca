"""The job that tells the changes of tables in streams: what was there first, then every committed change, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.postgres_reader import FollowedTable, ReaderPlan
from headwater.pipeline.postgres_source import NAME, PLAN, register
from headwater.pipeline.server import create_streams
from headwater.pipeline.stream_job import MIB, JobName
from headwater.postgres import tables
from headwater.postgres.catalog import table_name
from headwater.postgres.connections import Connection, RetryingConnection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class FromPostgres(BaseModel):
    """Several tables, each with its stream, read through one replication slot."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: JobName = "pg-items"
    slot: str = Field("headwater", pattern=r"^[a-z0-9_]{1,63}$", description="The replication slot.")
    publication: str = Field("headwater", description="The publication; tables are added to it.")
    tables: tuple[FollowedTable, ...] = Field(min_length=1)
    changes_per_batch_max: int = Field(100_000, ge=1, description="Most changes in a batch; transactions stay whole.")
    idle_wait: float = Field(0.5, gt=0, description="Seconds that one request for changes may wait for some.")
    wait_max: float = Field(600.0, gt=0, description="Seconds that a batch waits for the database.")
    lag_bytes_warn: int = Field(256 * MIB, ge=0, description="Log kept for the slot above which there is a warning.")
    lag_bytes_max: int = Field(0, ge=0, description="Above it the job stops and the slot is dropped; 0 is never.")
    create_items: bool = Field(False, description="Create the reference's table `items` when it is missing.")

    @model_validator(mode="after")
    def _streams_are_separate(self) -> Self:
        changed = [one.stream for one in self.tables if one.format == "changes" and "{key}" not in one.stream]
        if len(set(changed)) < len(changed):
            raise ValueError("tables in the format changes need a stream each: a TRUNCATE of one resets all of it")
        if len({one.table for one in self.tables}) < len(self.tables):
            raise ValueError("a table can be followed once in a job")
        return self

    @property
    def source(self) -> str:
        return "table " + ", ".join(one.table for one in self.tables)

    @property
    def target(self) -> str:
        return ", ".join(dict.fromkeys(one.stream for one in self.tables))

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        register(spark)
        create_streams(environment.connection(), [one.stream for one in self.tables if "{key}" not in one.stream])
        if self.create_items:
            self._create_items(environment)
        following = ReaderPlan(
            self.slot,
            self.publication,
            self.tables,
            self.changes_per_batch_max,
            self.idle_wait,
            self.wait_max,
        )
        changes = (
            spark.readStream.format(NAME)
            .option("url", environment.postgres)
            .option(PLAN, msgspec.json.encode(following).decode())
            .load()
        )
        return (
            changes.writeStream.format("headwater")
            .queryName(self.name)
            .options(**environment.options)
            .option("createMissing", "true")
            .option("orderBy", "position")
            .option("checkpointLocation", environment.checkpoint(self.name))
            .trigger(processingTime="0 seconds")
            .start()
        )

    def _create_items(self, environment: JobEnvironment) -> None:
        def make(connection: Connection) -> None:
            for one in self.tables:
                if one.table.rpartition(".")[2] == "items":
                    tables.prepare_items(connection, table_name(one.table))

        database = RetryingConnection(environment.postgres, self.wait_max)
        try:
            database.run(make)
        finally:
            database.close()
