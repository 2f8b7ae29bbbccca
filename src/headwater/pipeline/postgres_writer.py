"""The Spark sink for Postgres: each task writes the events of its partition.

Invariant: only the database decides whether an event was already written, so a task may be repeated, run twice at the
same time, or run after any crash.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from headwater.pipeline.loading import BatchPart, LoadResult, LoadStatements, load
from headwater.pipeline.upserting import upsert
from headwater.postgres.connections import Connection, RetryingConnection
from headwater.postgres.upserts import UpsertStatements

log = logging.getLogger("headwater.pipeline")

QUERY_ID_PROPERTY = "sql.streaming.queryId"
BATCH_ID_PROPERTY = "streaming.sql.batchId"


class WriterPlan(msgspec.Struct, frozen=True):
    """What a task needs to write to a table."""

    job: str
    table: str
    statements: LoadStatements | UpsertStatements
    event_bytes_max: int
    wait_max_s: float
    otel_endpoint: str = ""
    """Where spans of batches are sent; if empty, they are not sent."""
    otel_sample_ratio: float = 1.0


@dataclass
class WriteResult(WriterCommitMessage):
    events: int
    dead: int


@functools.lru_cache(maxsize=8)
def waiting(url: str, wait_max_s: float) -> RetryingConnection:
    """The connection of this process; Python workers keep it between tasks."""
    return RetryingConnection(url, wait_max_s)


class PostgresWriter(DataSourceStreamArrowWriter):
    """Rows with the columns stream, offset, position, content_type and value."""

    def __init__(self, url: str, filling: WriterPlan) -> None:
        self._url = url
        self._filling = filling

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteResult:
        batches = list(iterator)
        events = pa.Table.from_batches(batches) if batches else None
        if events is None or not events.num_rows:
            return WriteResult(0, 0)
        task = TaskContext.get()
        assert task is not None, "rows are written in tasks"
        filling = self._filling
        part = BatchPart(
            filling.job,
            task.getLocalProperty(QUERY_ID_PROPERTY) or "",
            int(task.getLocalProperty(BATCH_ID_PROPERTY) or -1),
            task.partitionId(),
        )

        loaded = write_events(self._url, filling, part, events)
        return WriteResult(loaded.events, loaded.dead)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        done = [one for one in messages if isinstance(one, WriteResult)]
        dead = sum(one.dead for one in done)
        if dead:
            log.warning(
                "%s: batch %d has %d events that could not be loaded; see headwater.dead_letters",
                self._filling.job,
                batchId,
                dead,
            )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Undo nothing: events that tasks have written are recognised when the batch is repeated."""
        log.warning("%s: batch %d failed and will be repeated", self._filling.job, batchId)


def write_events(url: str, filling: WriterPlan, part: BatchPart, events: pa.Table) -> LoadResult:
    """Write the events of one task to the database, and report them to OpenTelemetry if that is enabled."""

    def write(connection: Connection) -> LoadResult:
        if isinstance(filling.statements, UpsertStatements):
            return upsert(connection, filling.statements, part, events, filling.event_bytes_max)
        return load(connection, filling.statements, part, events, filling.event_bytes_max)

    began_ns = time.time_ns()
    loaded = waiting(url, filling.wait_max_s).run(write)
    if filling.otel_endpoint:
        _record_spans(filling, part, events, loaded, began_ns)
    return loaded


def _record_spans(filling: WriterPlan, part: BatchPart, events: pa.Table, loaded: LoadResult, began_ns: int) -> None:
    """A span for the batch, and one in the trace of each event that has a `traceparent`."""
    from headwater.otel.batches import batch_spans  # noqa: PLC0415  (needs an extra)

    values = events["value"]
    traced = values.filter(pc.match_substring(values, '"traceparent"'))
    attributes: dict[str, str | int] = {
        "db.system.name": "postgresql",
        "db.collection.name": filling.table,
        "headwater.job": part.job,
        "headwater.batch": part.batch,
        "headwater.partition": part.partition,
        "messaging.batch.message_count": events.num_rows,
        "headwater.dead_letters": loaded.dead,
    }
    spans = batch_spans(filling.otel_endpoint, filling.otel_sample_ratio)
    spans.record(f"load {filling.table}", (value.as_py() for value in traced), began_ns, attributes)
