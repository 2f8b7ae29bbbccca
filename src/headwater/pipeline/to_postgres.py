"""The job that brings the events of streams into a table, each once and in the order of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from headwater.pipeline.events import Filling
from headwater.pipeline.job import Surroundings
from headwater.pipeline.loading import Statements, statements
from headwater.pipeline.postgres_format import NAME, PLAN, register
from headwater.pipeline.server import create_streams
from headwater.postgres import tables
from headwater.postgres.catalog import table_name
from headwater.postgres.connecting import Connection, Waiting
from headwater.postgres.tables import SESSION_EVENTS, Mapped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ToPostgres:
    """Which streams go to which table, and which field to which column."""

    name: str
    table: str = "session_events"
    streams: tuple[str, ...] = ()
    prefix: str = ""
    columns: Mapping[str, str] = field(default_factory=lambda: dict(SESSION_EVENTS))
    types: Mapping[str, str] = field(default_factory=dict)
    batch_bytes_max: int = 32 * MIB
    event_bytes_max: int = 16 * MIB
    on_gone: str = "restart"
    wait_max_s: float = 600.0

    @property
    def source(self) -> str:
        return f"{self.prefix}*" if self.prefix else ", ".join(self.streams)

    @property
    def target(self) -> str:
        return f"table {self.table}"

    def start(self, spark: SparkSession, surroundings: Surroundings) -> StreamingQuery:
        register(spark)
        create_streams(surroundings, self.streams)
        mapped = Mapped(table_name(self.table), self.columns, self.types)

        def prepare(connection: Connection) -> Statements:
            tables.prepare(connection, mapped)
            return statements(connection, mapped)

        database = Waiting(surroundings.postgres, self.wait_max_s)
        try:
            prepared = database.run(prepare)
        finally:
            database.close()
        filling = Filling(self.name, prepared, self.event_bytes_max, self.wait_max_s)
        chosen = {"prefix": self.prefix} if self.prefix else {"streams": ",".join(self.streams)}
        events = (
            spark.readStream.format("headwater")
            .options(**surroundings.options, **chosen)
            .option("valueType", "binary")
            .option("onGone", self.on_gone)
            .option("maxBytesPerBatch", str(self.batch_bytes_max))
            # One task for all of a stream: its rows must come one after the other.
            .option("splitBytes", str(self.batch_bytes_max))
            .load()
        )
        return (
            events.select("stream", "offset", "position", "content_type", "value")
            .writeStream.format(NAME)
            .queryName(self.name)
            .option("url", surroundings.postgres)
            .option(PLAN, msgspec.json.encode(filling).decode())
            .option("checkpointLocation", surroundings.checkpoint(self.name))
            .trigger(processingTime="0 seconds")
            .start()
        )
