"""The job that publishes tables to streams: first the existing rows, then every committed change once."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pyspark.sql import DataFrame

from headwater.pipeline import electric, postgres_source
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.postgres_reader import FollowedTable, ReaderPlan
from headwater.pipeline.postgres_source import PLAN
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
    idle_wait: float = Field(0.5, gt=0, description="Seconds that one request for changes waits for the first one.")
    wait_max: float = Field(600.0, gt=0, description="Seconds that a batch waits for the database.")
    lag_bytes_warn: int = Field(256 * MIB, ge=0, description="Warn when the slot keeps more WAL than this.")
    lag_bytes_max: int = Field(0, ge=0, description="Above this the job stops and drops the slot; 0 disables it.")
    create_items: bool = Field(False, description="Create the reference's table `items` when it is missing.")

    @model_validator(mode="after")
    def _streams_are_separate(self) -> Self:
        changed = [one.stream for one in self.tables if one.format == "changes" and "{key}" not in one.stream]
        if len(set(changed)) < len(changed):
            raise ValueError("each table in the format changes needs its own stream: a TRUNCATE resets the stream")
        for one in self.electric_tables:
            if "{key}" in one.stream:
                raise ValueError("a table read from Electric needs one stream: a reset is published in it")
        if len({one.table for one in self.tables}) < len(self.tables):
            raise ValueError("a job can follow a table only once")
        return self

    @property
    def source(self) -> str:
        return "table " + ", ".join(one.table for one in self.tables)

    @property
    def target(self) -> str:
        return ", ".join(dict.fromkeys(one.stream for one in self.tables))

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        create_streams(environment.connection(), [one.stream for one in self.tables if "{key}" not in one.stream])
        if self.create_items:
            self._create_items(environment)
        sources = []
        if self.slot_tables:
            sources.append(self._from_slot(spark, environment))
        if self.electric_tables:
            sources.append(self._from_electric(spark, environment))
        return (
            reduce(DataFrame.union, sources)
            .writeStream.format("headwater")
            .queryName(self.name)
            .options(**environment.options)
            .option("createMissing", "true")
            .option("orderBy", "position")
            .option("checkpointLocation", environment.checkpoint(self.name))
            .trigger(processingTime="0 seconds")
            .start()
        )

    @property
    def slot_tables(self) -> tuple[FollowedTable, ...]:
        return tuple(one for one in self.tables if one.cdc == "slot")

    @property
    def electric_tables(self) -> tuple[FollowedTable, ...]:
        return tuple(one for one in self.tables if one.cdc == "electric")

    def _from_slot(self, spark: SparkSession, environment: JobEnvironment) -> DataFrame:
        postgres_source.register(spark)
        plan = ReaderPlan(
            self.slot,
            self.publication,
            self.slot_tables,
            self.changes_per_batch_max,
            self.idle_wait,
            self.wait_max,
        )
        return (
            spark.readStream.format(postgres_source.NAME)
            .option("url", environment.postgres)
            .option(PLAN, msgspec.json.encode(plan).decode())
            .load()
        )

    def _from_electric(self, spark: SparkSession, environment: JobEnvironment) -> DataFrame:
        electric.register(spark)
        followed = electric.ShapesFollowed(self.electric_tables, self.idle_wait, self.wait_max)
        return (
            spark.readStream.format(electric.NAME)
            .option("url", environment.electric)
            .option(PLAN, msgspec.json.encode(followed).decode())
            .load()
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
