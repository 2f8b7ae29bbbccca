"""The job that writes the events of streams to a table, each once and in the order of its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import msgspec
from pydantic import Field, model_validator

from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.loading import LoadStatements, statements
from headwater.pipeline.postgres_source import NAME, PLAN, register
from headwater.pipeline.postgres_writer import WriterPlan
from headwater.pipeline.server import create_streams
from headwater.pipeline.stream_job import MIB, JobName, StreamJob
from headwater.postgres import tables, upserts
from headwater.postgres.catalog import table_name
from headwater.postgres.connections import Connection, RetryingConnection
from headwater.postgres.tables import OFFSET, SESSION_EVENTS, STREAM, EventMapping
from headwater.postgres.upserts import UpsertMapping, UpsertStatements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class ToPostgres(StreamJob):
    """Which streams go to which table, and which field to which column."""

    name: JobName = "session-events"
    table: str = Field("session_events", description="The table, `schema.table` or in `public`; created when missing.")
    columns: dict[str, str] = Field(
        dict(SESSION_EVENTS),
        description="Column = source of its value: `@stream`, `@offset`, `@incarnation` (`ds_incarnation` by default),"
        " `@position`, `@payload`, or the path of a field.",
    )
    mode: Literal["append", "upsert"] = Field(
        "append",
        description="`append`: a row for each event. `upsert`: events are changes with a key, and the table has the"
        " current row of each key.",
    )
    key: tuple[str, ...] = Field((), description="For `upsert`: the columns that identify a row.")
    types: dict[str, str] = Field({}, description="Types of columns, for a table that is created; otherwise text.")
    batch_bytes_max: int = Field(32 * MIB, ge=1024, description="Most bytes in one batch.")
    event_bytes_max: int = Field(16 * MIB, ge=1, description="Larger events go to the dead letters.")
    on_gone: Literal["fail", "restart", "bootstrap", "skip"] = Field(
        "restart",
        description="The source's option onGone. By default the job waits for a deleted stream and reads it from its"
        " beginning when it is created again.",
    )
    wait_max: float = Field(600.0, gt=0, description="Seconds that a batch waits for the database.")

    @model_validator(mode="after")
    def _has_a_key(self) -> Self:
        sources = list(self.columns.values())
        if self.mode == "upsert":
            if not self.key or not set(self.key) <= self.columns.keys():
                raise ValueError('the mode upsert needs a key, and its columns must be in "columns"')
            if (len(self.streams) != 1) and STREAM not in sources:
                raise ValueError('several streams in one table need a column for "@stream": a reset deletes by it')
            return self
        if self.key:
            raise ValueError("a key is only allowed in the mode upsert")
        if STREAM not in sources or OFFSET not in sources:
            raise ValueError('columns must map one column to "@stream" and one to "@offset": together they are the key')
        return self

    @property
    def target(self) -> str:
        return f"table {self.table}"

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        register(spark)
        create_streams(self.connection(environment), self.streams)
        table = table_name(self.table)
        mapped = EventMapping(table, self.columns, self.types)

        def prepare(connection: Connection) -> LoadStatements | UpsertStatements:
            if self.mode == "upsert":
                return upserts.prepare(connection, UpsertMapping(table, self.columns, self.types, self.key))
            tables.prepare(connection, mapped)
            return statements(connection, mapped)

        database = RetryingConnection(environment.postgres, self.wait_max)
        try:
            prepared = database.run(prepare)
        finally:
            database.close()
        filling = WriterPlan(
            self.name,
            self.table,
            prepared,
            self.event_bytes_max,
            self.wait_max,
            environment.otel_endpoint,
            environment.otel_sample_ratio,
        )
        events = (
            spark.readStream.format("headwater")
            .options(**self.source_options(environment))
            .option("valueType", "binary")
            .option("onGone", self.on_gone)
            .option("maxBytesPerBatch", str(self.batch_bytes_max))
            # One task per stream, so that its rows stay in order.
            .option("splitBytes", str(self.batch_bytes_max))
            .load()
        )
        return (
            events.select("stream", "offset", "position", "content_type", "value")
            .writeStream.format(NAME)
            .queryName(self.name)
            .option("url", environment.postgres)
            .option(PLAN, msgspec.json.encode(filling).decode())
            .option("checkpointLocation", environment.checkpoint(self.name))
            .trigger(processingTime="0 seconds")
            .start()
        )
