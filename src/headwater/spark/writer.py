"""The sink: what tasks do with their rows, and what the driver does when all of them are done.

Three ways, chosen by `commitMode`: tasks append by themselves; tasks hand their rows to the driver, which makes one
append; tasks stage files, and the driver appends them. Invariant: no state but the target streams (and, when staged,
the files) decides whether a row is there already.
"""

from __future__ import annotations

import io
import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.ipc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headwater.spark import staging
from headwater.spark.bodies import grouped, rows_table
from headwater.spark.delivery import Delivered, Source, deliver
from headwater.spark.errors import HeadwaterError, OptionError, StreamMissing
from headwater.spark.options import SinkOptions
from headwater.spark.protocol import connect

log = logging.getLogger("headwater.spark")

BATCH_ID_PROPERTY = "streaming.sql.batchId"
QUERY_ID_PROPERTY = "sql.streaming.queryId"


@dataclass
class Done(WriterCommitMessage):
    """What a task tells the driver."""

    query: str
    batch: int
    partition: int
    delivered: tuple[Delivered, ...] = ()
    rows: bytes | None = None
    """In mode `driver`: the rows themselves, as an Arrow stream."""
    staged: str | None = None
    """In mode `staged`: the file they are in."""


class _Sink:
    """What both kinds of writers share."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self._options = options
        needed = [options.value_column, *options.order_by] + ([] if options.stream else [options.stream_column])
        for name in needed:
            if name not in schema.fieldNames():
                raise OptionError(
                    f"The sink needs a column {name}; the query has {', '.join(schema.fieldNames())}. Columns and"
                    " targets are chosen by stream, streamColumn, valueColumn and orderBy."
                )

    def take(self, query: str, batch: int, partition: int, batches: Iterator[pa.RecordBatch]) -> Done:
        """A task's rows, appended or handed on."""
        options = self._options
        rows = rows_table(options, batches)
        if rows is None:
            return Done(query, batch, partition)
        if options.commit_mode == "staged":
            return Done(
                query, batch, partition, staged=staging.put(options.staging_path, query, batch, partition, rows)
            )
        if options.commit_mode == "driver":
            return Done(query, batch, partition, rows=_pack(rows))
        source = Source(query, batch, str(partition))
        delivered = deliver(
            connect(options.connection), options, source, grouped(options, rows), fixed_order=bool(options.order_by)
        )
        return Done(query, batch, partition, tuple(delivered))

    def settle(self, messages: Sequence[WriterCommitMessage | None]) -> list[Delivered]:
        """All tasks are done: append what they handed on; what was appended in all."""
        done = sorted((one for one in messages if isinstance(one, Done)), key=lambda one: one.partition)
        if not done:
            return []
        query, batch = done[0].query, done[0].batch
        if self._options.commit_mode == "driver":
            delivered = self._append_together(query, batch, done)
        elif self._options.commit_mode == "staged":
            delivered = self._append_staged(query, batch, done)
        else:
            delivered = [one for task in done for one in task.delivered]
            self._warn_of_sharing(batch, done)
        rows = sum(one.rows for one in delivered)
        repeats = sum(one.duplicates for one in delivered)
        log.info("batch %d: %d rows to %d targets, %d appends were there before", batch, rows, len(delivered), repeats)
        return delivered

    def _append_together(self, query: str, batch: int, done: list[Done]) -> list[Delivered]:
        """One append: the first attempt that gets through is the batch, whatever later ones bring."""
        options = self._options
        tables = [_unpack(one.rows) for one in done if one.rows is not None]
        if not tables:
            return []
        (target,) = grouped(options, pa.concat_tables(tables))
        if target.bytes > options.request_bytes_max:
            raise HeadwaterError(
                f"Batch {batch} has {target.bytes} bytes; commitMode=driver makes one append of at most"
                f" {options.request_bytes_max} (maxRequestBytes). Make batches smaller, or use commitMode=staged."
            )
        return deliver(
            connect(options.connection), _keeping(options), Source(query, batch, "driver"), [target], fixed_order=False
        )

    def _append_staged(self, query: str, batch: int, done: list[Done]) -> list[Delivered]:
        options = self._options
        client = connect(options.connection)
        names = staging.settle(options.staging_path, query, batch, [one.staged for one in done if one.staged])
        delivered: list[Delivered] = []
        for name, rows in zip(names, staging.take(options.staging_path, query, batch, names), strict=True):
            # The file is settled, so its order is, and so are the cuts between appends.
            source = Source(query, batch, f"staged-{name.split('-')[1]}")
            delivered += deliver(client, options, source, grouped(options, rows), fixed_order=True)
        staging.clear_before(options.staging_path, query, batch)
        return delivered

    def _warn_of_sharing(self, batch: int, done: list[Done]) -> None:
        writers: dict[str, int] = {}
        for task in done:
            for one in task.delivered:
                writers[one.stream] = writers.get(one.stream, 0) + 1
        shared = [stream for stream, count in writers.items() if count > 1]
        if shared and self._options.order_by:
            log.warning(
                "batch %d: %d targets (%s, …) were written by several tasks; orderBy holds within each task only. For"
                " one order over all rows of a target use headwater.spark.by_target(df, …) or coalesce(1).",
                batch,
                len(shared),
                shared[0],
            )


class StreamWriter(DataSourceStreamArrowWriter):
    """Micro-batches. The query and the batch are known from the task's properties, alike on every attempt."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        if options.close_streams:
            raise OptionError("closeStreams is for batch writes: a streaming query has no end to close at.")
        self._options = options
        self._sink = _Sink(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Done:
        task = _task()
        query, batch = task.getLocalProperty(QUERY_ID_PROPERTY), task.getLocalProperty(BATCH_ID_PROPERTY)
        if query is None or batch is None:
            raise HeadwaterError("Spark does not say which batch this is; use the PySpark that headwater[spark] names.")
        return self._sink.take(self._options.producer_id or query, int(batch), task.partitionId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._sink.settle(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is undone: the batch is tried again under the same names, and what is there already is recognised."""
        log.warning("batch %d failed; its next attempt goes on where this one ended", batchId)


class BatchWriter(DataSourceArrowWriter):
    """One write. Its name is made once on the driver, or given by `producerId`."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError('A stream cannot be overwritten: use mode("append"), or delete it and create it anew.')
        self._options = options
        self._sink = _Sink(options, schema)
        self._query = options.producer_id or f"batch-{uuid.uuid4()}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Done:
        return self._sink.take(self._query, 0, _task().partitionId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        delivered = self._sink.settle(messages)
        if self._options.close_streams:
            client = connect(self._options.connection)
            targets = {one.stream for one in delivered} | ({self._options.stream} - {""})
            for stream in sorted(targets):
                try:
                    client.close(stream)
                except StreamMissing:
                    if not self._options.create_missing:
                        raise

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        log.warning(
            "the write failed; what its tasks appended stays. Run it again under the same producerId to complete it."
        )


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "rows are written in tasks"
    return task


def _keeping(options: SinkOptions) -> SinkOptions:
    return replace(options, on_differing_retry="keep")


def _pack(rows: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return sink.getvalue()


def _unpack(packed: bytes) -> pa.Table:
    return pa.ipc.open_stream(packed).read_all()
