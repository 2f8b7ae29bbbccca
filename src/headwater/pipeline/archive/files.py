"""Write the Parquet files of an archive in Spark tasks: from sorted rows, one file per shard and a list of its streams.

Invariant: a file is complete and synced before its task reports it. File names are unique, so no attempt ever
overwrites the file of another.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.spark.offsets import are_of_two_streams

SCHEMA: Final = pa.schema(
    [
        ("stream", pa.string()),
        ("position", pa.int64()),
        ("offset", pa.string()),
        ("value", pa.binary()),
        ("content_type", pa.string()),
        ("snapshot", pa.bool_()),
    ]
)
"""The columns of every file. The partition columns `date` and `shard` are in the Delta log and in the path."""

COLUMNS: Final = "stream string, position long, offset string, value binary, content_type string, snapshot boolean"
RESULT: Final = "file string, streams string"
ROW_GROUP_ROWS: Final = 128 * 1024


class ArchiveFile(msgspec.Struct, frozen=True):
    """One Parquet file, by its path within the archive."""

    path: str
    date: str
    shard: int
    rows: int
    bytes: int
    first_stream: str = ""
    last_stream: str = ""
    """Smallest and largest stream name by UTF-8 bytes, so that a reader of one stream can skip the file. Empty if
    unknown."""


class ArchivedPosition(msgspec.Struct, frozen=True):
    """The end of the archived part of a stream."""

    offset: str
    position: int
    """Messages of the current incarnation before the offset."""


def shard_of(stream: str, shards: int) -> int:
    """The shard of a stream: CRC-32 of its name in UTF-8, modulo the number of shards. Spark's `crc32` is the same."""
    return zlib.crc32(stream.encode()) % shards


class ShardWriter:
    """One Parquet file, written as rows arrive."""

    def __init__(self, lake: Path, date: str, shard: int, stem: str) -> None:
        self._place = f"date={date}/shard={shard}/{stem}-{secrets.token_hex(4)}.parquet"
        self._path = lake / self._place
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._date = date
        self._shard = shard
        self._rows = 0
        self._first = self._last = ""
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._writer = pq.ParquetWriter(
            self._path, SCHEMA, compression="zstd", use_dictionary=["stream", "content_type"], write_page_index=True
        )

    def write(self, rows: pa.RecordBatch) -> None:
        """`rows` continue the order by stream."""
        self._first = self._first or rows.column("stream")[0].as_py()
        self._last = rows.column("stream")[-1].as_py()
        self._pending.append(rows)
        self._pending_rows += rows.num_rows
        if self._pending_rows >= ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> ArchiveFile:
        self._flush()
        self._writer.close()
        _sync(self._path)
        size = self._path.stat().st_size
        return ArchiveFile(self._place, self._date, self._shard, self._rows, size, self._first, self._last)

    def _flush(self) -> None:
        if self._pending:
            self._writer.write_table(pa.Table.from_batches(self._pending, SCHEMA), ROW_GROUP_ROWS)
            self._rows += self._pending_rows
            self._pending, self._pending_rows = [], 0


@dataclass(frozen=True, slots=True)
class ArchiveTask:
    """Sent to every executor. Rows must be sorted by shard, stream and position, with all of a shard in one task."""

    lake: str
    date: str
    stem: str
    archived: Mapping[str, ArchivedPosition] = field(default_factory=dict)
    """The archived part of each stream. A query that lost its checkpoint reads it again, and the task drops it."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        ends: dict[str, ArchivedPosition] = {}
        files: list[ArchiveFile] = []
        writer: ShardWriter | None = None
        current = -1
        for rows in self._new(batches):
            for shard, part in _runs(rows, "shard"):
                if shard != current:
                    if writer is not None:
                        files.append(writer.close())
                    writer = ShardWriter(Path(self.lake), self.date, shard, self.stem)
                    current = shard
                assert writer is not None
                writer.write(part.select(SCHEMA.names).cast(SCHEMA))
                for stream, mine in _runs(part, "stream"):
                    # Rows are in order, so the last one seen is the end.
                    ends[stream] = ArchivedPosition(mine.column("offset")[-1].as_py(), _end(mine))
        if writer is not None:
            files.append(writer.close())
        written = [msgspec.json.encode(file).decode() for file in files]
        streams = msgspec.json.encode(ends).decode()
        yield pa.RecordBatch.from_pydict({"file": [*written, None], "streams": [*([None] * len(written)), streams]})

    def _new(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in batches:
            if not rows.num_rows:
                continue
            names = pc.unique(rows.column("stream")).to_pylist()
            if self.archived.keys().isdisjoint(names):
                yield rows
                continue
            known = pa.concat_arrays(
                [
                    pa.repeat(
                        pa.scalar(self._messages(stream, mine.column("offset")[0].as_py()), pa.int64()), len(mine)
                    )
                    for stream, mine in _runs(rows, "stream")
                ]
            )
            # A snapshot at a position replaces the messages before it.
            before = pc.subtract(rows.column("position"), rows.column("snapshot").cast(pa.int64()))
            kept = rows.filter(pc.greater_equal(before, known))
            if kept.num_rows:
                yield kept

    def _messages(self, stream: str, offset: str | None) -> int:
        """How many messages of this incarnation of a stream are archived."""
        known = self.archived.get(stream)
        return 0 if known is None or are_of_two_streams(known.offset, offset or "") else known.position


def _end(rows: pa.RecordBatch) -> int:
    """Messages up to the end of these rows. A snapshot replaces the messages before it and does not count as one."""
    position: int = rows.column("position")[-1].as_py()
    return position if rows.column("snapshot")[-1].as_py() else position + 1


def _runs(rows: pa.RecordBatch, column: str) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """Slices of equal values in a column; sorted rows give one slice per value."""
    encoded = pc.run_end_encode(rows.column(column))
    start = 0
    for end, value in zip(encoded.run_ends.to_pylist(), encoded.values.to_pylist(), strict=True):
        yield value, rows.slice(start, end - start)
        start = end


def _sync(path: Path) -> None:
    """Sync a file and its directory entry."""
    for target in (path, path.parent):
        handle = os.open(target, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError) if target is not path else contextlib.nullcontext():
                os.fsync(handle)
        finally:
            os.close(handle)
