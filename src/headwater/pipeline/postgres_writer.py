"""The Spark sink of Postgres: a task writes the events of its partition.

Invariant: only the database decides whether an event was written already, so a task may be repeated, run twice at
once, or run after any crash.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pyarrow as pa
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
    statements: LoadStatements | UpsertStatements
    event_bytes_max: int
    wait_max_s: float


@dataclass
class WriteResult(WriterCommitMessage):
    events: int
    dead: int


@functools.lru_cache(maxsize=8)
def waiting(url: str, wait_max_s: float) -> RetryingConnection:
    """The connection of this process, which Python workers keep between tasks."""
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

        def write(connection: Connection) -> LoadResult:
            if isinstance(filling.statements, UpsertStatements):
                return upsert(connection, filling.statements, part, events, filling.event_bytes_max)
            return load(connection, filling.statements, part, events, filling.event_bytes_max)

        loaded = waiting(self._url, filling.wait_max_s).run(write)
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
        """Nothing is undone: what tasks have written is recognised when the batch is repeated."""
        log.warning("%s: batch %d failed and will be repeated", self._filling.job, batchId)
