"""The sink: tasks stage or append their rows, and the driver commits when all tasks of a batch have succeeded.

PySpark ends the input of a writer normally when the task that produces the rows fails, so a task cannot know whether
it has seen all of its rows; only the driver's commit can. By default, therefore, tasks stage their rows and the driver
appends them. With `commitMode=task`, tasks append, and a retry appends the rows that a truncated attempt missed.
Invariant: only the target streams and the staged files decide whether a row has been appended.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from headwater.spark.bodies import grouped, rows_table, with_reset
from headwater.spark.delivery import Delivered, RowOrigin, deliver
from headwater.spark.errors import HeadwaterError, OptionError, StreamMissingError
from headwater.spark.options import SinkOptions
from headwater.spark.protocol import connect
from headwater.spark.staging import StagedBatch, StagedPart, StagedRows, staging_root

log = logging.getLogger("headwater.spark")

BATCH_ID_PROPERTY = "streaming.sql.batchId"
QUERY_ID_PROPERTY = "sql.streaming.queryId"


@dataclass
class TaskResult(WriterCommitMessage):
    """The report of a task to the driver."""

    query: str
    batch: int
    partition: int
    delivered: tuple[Delivered, ...] = ()
    """With `commitMode=task`: the appends of the task."""
    staged: StagedRows | None = None


class _Sink:
    """The common part of both kinds of writers."""

    def __init__(self, options: SinkOptions, schema: StructType, *, complete: bool = False) -> None:
        self._options = options
        self._complete = complete
        """Whether each batch replaces the rows of the batches before it."""
        self._staging_root = staging_root(options.staging_path, options.checkpoint)
        needed = [*(options.key_columns or (options.value_column,)), *options.order_by]
        needed += [name for name in (options.operation_column, "" if options.stream else options.stream_column) if name]
        for name in needed:
            if name not in schema.fieldNames():
                raise OptionError(
                    f"The sink needs a column {name}; the query has {', '.join(schema.fieldNames())}. Choose columns"
                    " and targets with stream, streamColumn, valueColumn, keyColumns, operationColumn and orderBy."
                )

    def write(self, query: str, batch: int, partition: int, batches: Iterator[pa.RecordBatch]) -> TaskResult:
        """Append or stage the rows of a task."""
        options = self._options
        rows = rows_table(options, batches)
        if rows is None:
            return TaskResult(query, batch, partition)
        if options.commit_mode != "task":
            staged = self.staged(query, batch).put(partition, rows)
            return TaskResult(query, batch, partition, staged=staged)
        delivered = deliver(
            connect(options.connection),
            options,
            RowOrigin(query, batch, str(partition)),
            grouped(options, rows),
            fixed_rows=False,
        )
        return TaskResult(query, batch, partition, tuple(delivered))

    def commit(self, query: str, batch: int, messages: Sequence[WriterCommitMessage | None]) -> list[Delivered]:
        """Append the staged rows after all tasks have succeeded; return everything that was appended."""
        results = sorted((one for one in messages if isinstance(one, TaskResult)), key=lambda one: one.partition)
        if self._options.commit_mode == "task":
            delivered = [one for result in results for one in result.delivered]
            self._warn_of_sharing(batch, results)
        else:
            staged = self.staged(query, batch)
            delivered = self._append(query, batch, staged.fix([one.staged for one in results if one.staged]))
            staged.remove_earlier()
        rows = sum(one.rows for one in delivered)
        repeats = sum(one.duplicates for one in delivered)
        log.info("batch %d: %d rows to %d targets, %d appends were duplicates", batch, rows, len(delivered), repeats)
        return delivered

    def staged(self, query: str, batch: int) -> StagedBatch:
        return StagedBatch(self._staging_root, query, batch)

    def _append(self, query: str, batch: int, parts: Iterator[StagedPart]) -> list[Delivered]:
        options = self._options
        if options.commit_mode == "driver":
            parts = self._joined(batch, list(parts))
        client = connect(options.connection)
        delivered: list[Delivered] = []
        for number, part in enumerate(parts):
            origin = RowOrigin(query, batch, part.producer_part)
            rows = with_reset(options, part.rows) if self._complete and number == 0 else part.rows
            delivered += deliver(client, options, origin, grouped(options, rows), fixed_rows=True)
        return delivered

    def _joined(self, batch: int, parts: list[StagedPart]) -> Iterator[StagedPart]:
        """All rows of a batch as one part, which must fit into one append."""
        if not parts:
            return
        rows = pa.concat_tables([part.rows for part in parts])
        size = sum(target.bytes for target in grouped(self._options, rows))
        if size > self._options.request_bytes_max:
            raise HeadwaterError(
                f"Batch {batch} has {size} bytes; commitMode=driver makes one append of at most"
                f" {self._options.request_bytes_max} (maxRequestBytes). Make batches smaller, or use commitMode=staged."
            )
        yield StagedPart("driver", rows)

    def _warn_of_sharing(self, batch: int, results: list[TaskResult]) -> None:
        writers: dict[str, int] = {}
        for result in results:
            for one in result.delivered:
                writers[one.stream] = writers.get(one.stream, 0) + 1
        shared = [stream for stream, count in writers.items() if count > 1]
        if shared and self._options.order_by:
            log.warning(
                "batch %d: %d targets (%s, …) were written by several tasks, and orderBy sorts within each task only."
                " For one order over all rows of a target use headwater.spark.by_target(df, …) or coalesce(1).",
                batch,
                len(shared),
                shared[0],
            )


class MicroBatchWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches. The task's properties name the query and the batch, the same for every attempt."""

    def __init__(self, options: SinkOptions, schema: StructType, *, complete: bool) -> None:
        if options.close_streams:
            raise OptionError("closeStreams is only for batch writes: a streaming query does not end.")
        if options.has_batch_id:
            raise OptionError("batchId is for writes in foreachBatch; a streaming write knows its batch.")
        if complete:
            _check_complete(options)
        self._options = options
        self._sink = _Sink(options, schema, complete=complete)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        task = _task()
        query, batch = task.getLocalProperty(QUERY_ID_PROPERTY), task.getLocalProperty(BATCH_ID_PROPERTY)
        if query is None or batch is None:
            raise HeadwaterError(
                "This PySpark does not pass the batch id to tasks; use the version that headwater[spark] requires."
            )
        return self._sink.write(self._options.producer_id or query, int(batch), task.partitionId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        query = next((one.query for one in messages if isinstance(one, TaskResult)), None)
        if query is not None:
            self._sink.commit(query, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Undo nothing: the next attempt of the batch uses the same producer names, or the staged rows."""
        log.warning("batch %d failed; its next attempt continues where this one ended", batchId)


class BatchWriter(DataSourceArrowWriter):
    """Writes one batch. Its id is generated once on the driver, or given by `producerId`."""

    def __init__(self, options: SinkOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError('A stream cannot be overwritten: use mode("append"), or delete the stream first.')
        self._options = options
        self._sink = _Sink(options, schema)
        self._query = options.producer_id or f"batch-{uuid.uuid4()}"
        self._batch = options.batch_id

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return self._sink.write(self._query, self._batch, _task().partitionId(), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        delivered = self._sink.commit(self._query, self._batch, messages)
        if not self._options.has_batch_id:
            # Another run under the same producerId may have other rows, which must not be mistaken for these.
            self._sink.staged(self._query, self._batch).remove()
        if self._options.close_streams:
            client = connect(self._options.connection)
            targets = {one.stream for one in delivered} | ({self._options.stream} - {""})
            for stream in sorted(targets):
                try:
                    client.close(stream)
                except StreamMissingError:
                    if not self._options.create_missing:
                        raise

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        log.warning(
            "the write failed; rows that were appended stay. To complete it, run it again under the same producerId."
        )


def _check_complete(options: SinkOptions) -> None:
    if not options.key_columns or not options.stream:
        raise OptionError(
            "The output mode complete replaces all rows at each batch: set keyColumns, so that rows are state-protocol"
            " messages, and stream, which is the one target."
        )
    if options.commit_mode == "task" or options.order_by:
        raise OptionError("The output mode complete works without orderBy, and with commitMode=staged or driver.")


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None, "rows are written in tasks"
    return task
