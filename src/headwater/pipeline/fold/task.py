"""The Spark task of a fold: fold each stream of its partition into the table, then publish its snapshot.

The table is written first: a snapshot lets the server delete the messages before it, so the table must have them.
Invariant: every step can be repeated, or run twice at the same time, with the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from headwater.pipeline.fold.snapshot_client import SnapshotClient, StreamMessage, snapshot_client, state_at
from headwater.spark.errors import StreamMissingError
from headwater.spark.offsets import split_token
from headwater.spark.options import ConnectionOptions

log = logging.getLogger("headwater.pipeline")

CHUNK_STREAMS: Final = 500
"""Most streams in one transaction; their snapshots are published before the next streams."""
CHUNK_BYTES: Final = 32 * 1024 * 1024

TOTALS: Final = ("streams", "messages", "ignored", "entries", "published", "bytes")
SCHEMA: Final = ", ".join(f"{name} long" for name in TOTALS)


@dataclass(slots=True)
class FoldTotals:
    """Counts of a task or a batch."""

    streams: int = 0
    messages: int = 0
    ignored: int = 0
    entries: int = 0
    """Rows of the table that were written or removed."""
    published: int = 0
    bytes: int = 0
    """Total size of the published snapshots."""

    def batch(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([getattr(self, name)], pa.int64()) for name in TOTALS], TOTALS)


@dataclass(frozen=True, slots=True)
class FoldTask:
    """Sent to every executor. Rows must be sorted by stream and position, with all of a stream in one task."""

    connection: ConnectionOptions
    snapshots: bool
    every: int
    parallel: int
    table: str = ""
    postgres: str = field(default="", repr=False)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        totals = FoldTotals()
        client = snapshot_client(self.connection)
        with ThreadPoolExecutor(self.parallel, thread_name_prefix="headwater-fold") as pool:
            for chunk in _chunks(_by_stream(batches)):
                totals.streams += len(chunk)
                totals.messages += sum(len(rows) for rows in chunk.values())
                if self.table:
                    self._to_table(client, chunk, totals)
                if self.snapshots:
                    for ignored, size in pool.map(lambda one: self._publish(client, *one), chunk.items()):
                        totals.ignored += 0 if self.table else ignored
                        totals.published += size > 0
                        totals.bytes += size
        yield totals.batch()

    def _to_table(self, client: SnapshotClient, chunk: Mapping[str, list[StreamMessage]], totals: FoldTotals) -> None:
        from headwater.pipeline.fold.table import FoldTable, connect  # noqa: PLC0415 - not every node needs psycopg

        with connect(self.postgres) as connection:
            written = FoldTable(connection, self.table).apply(client, chunk)
        totals.entries += written.entries
        totals.ignored += written.ignored

    def _publish(self, client: SnapshotClient, stream: str, rows: list[StreamMessage]) -> tuple[int, int]:
        """Publish a snapshot if one is due; return the number of messages that were not changes, and its size."""
        end = rows[-1].offset
        try:
            if self.every > 1:
                last = client.head(stream).snapshot
                if split_token(end)[0] - split_token(last or "-1")[0] < self.every:
                    return 0, 0
            state = state_at(client, stream, end, rows)
        except StreamMissingError as missing:
            log.warning("%s Not folded.", missing)
            return 0, 0
        if state is None:
            return 0, 0
        body = state.encoded()
        return state.ignored, len(body) if client.publish(stream, end, body) else 0


def _by_stream(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, list[StreamMessage]]]:
    name: str | None = None
    rows: list[StreamMessage] = []
    for batch in batches:
        columns = (batch.column(column).to_pylist() for column in ("stream", "position", "offset", "value"))
        for stream, position, offset, value in zip(*columns, strict=True):
            if stream != name:
                if name is not None:
                    yield name, rows
                name, rows = stream, []
            rows.append(StreamMessage(position, offset, value))
    if name is not None:
        yield name, rows


def _chunks(streams: Iterator[tuple[str, list[StreamMessage]]]) -> Iterator[dict[str, list[StreamMessage]]]:
    chunk: dict[str, list[StreamMessage]] = {}
    size = 0
    for stream, rows in streams:
        chunk[stream] = rows
        size += sum(len(row.value) for row in rows)
        if len(chunk) >= CHUNK_STREAMS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = {}, 0
    if chunk:
        yield chunk
