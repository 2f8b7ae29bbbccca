"""The job that tells the changes of tables in streams: what was there first, then every committed change, once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headwater.pipeline.changes import FollowedTable, Following
from headwater.pipeline.job import Surroundings
from headwater.pipeline.postgres_format import NAME, PLAN, register
from headwater.pipeline.server import create_streams
from headwater.postgres import tables
from headwater.postgres.catalog import table_name
from headwater.postgres.connecting import Connection, Waiting

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


@dataclass(frozen=True, slots=True)
class FromPostgres:
    """One slot, several tables, each with its stream."""

    name: str
    tables: tuple[FollowedTable, ...]
    slot: str = "headwater"
    publication: str = "headwater"
    changes_per_batch_max: int = 100_000
    idle_wait_s: float = 0.5
    wait_max_s: float = 600.0
    lag_bytes_warn: int = 256 << 20
    lag_bytes_max: int = 0
    """Above this the job stops and its slot is dropped, so that the database's disk does not fill; 0 is never."""
    create_items: bool = False
    """Make the reference's table `items` when it is missing."""

    @property
    def source(self) -> str:
        return "table " + ", ".join(one.table for one in self.tables)

    @property
    def target(self) -> str:
        return ", ".join(dict.fromkeys(one.stream for one in self.tables))

    def start(self, spark: SparkSession, surroundings: Surroundings) -> StreamingQuery:
        register(spark)
        create_streams(surroundings, [one.stream for one in self.tables if "{key}" not in one.stream])
        if self.create_items:
            self._create_items(surroundings)
        following = Following(
            self.slot,
            self.publication,
            self.tables,
            self.changes_per_batch_max,
            self.idle_wait_s,
            self.wait_max_s,
        )
        changes = (
            spark.readStream.format(NAME)
            .option("url", surroundings.postgres)
            .option(PLAN, msgspec.json.encode(following).decode())
            .load()
        )
        return (
            changes.writeStream.format("headwater")
            .queryName(self.name)
            .options(**surroundings.options)
            .option("createMissing", "true")
            .option("orderBy", "position")
            .option("checkpointLocation", surroundings.checkpoint(self.name))
            .trigger(processingTime="0 seconds")
            .start()
        )

    def _create_items(self, surroundings: Surroundings) -> None:
        def make(connection: Connection) -> None:
            for one in self.tables:
                if one.table.rpartition(".")[2] == "items":
                    tables.prepare_items(connection, table_name(one.table))

        database = Waiting(surroundings.postgres, self.wait_max_s)
        try:
            database.run(make)
        finally:
            database.close()
