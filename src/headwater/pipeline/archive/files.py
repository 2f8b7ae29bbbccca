"""Writing Parquet files of a lake, in tasks: sorted rows in, one file per shard out, and what is in each.

Invariant: a file is complete and on the disk before its task tells of it; its name is its own, so that no attempt ever
writes over another's.
"""

from __future__ import annotations

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

from headwater.pipeline.archive.manifest import DATA, Archived, File, sync_file
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
"""The columns of every file; `date` and `shard` are in its path."""

COLUMNS: Final = "stream string, position long, offset string, value binary, content_type string, snapshot boolean"
RESULT: Final = "file string, streams string"
ROW_GROUP_ROWS: Final = 128 * 1024


def shard_of(stream: str, shards: int) -> int:
    """Which shard a stream is in: CRC-32 of its name in UTF-8, modulo their number. Spark's `crc32` is the same."""
    return zlib.crc32(stream.encode()) % shards


class ShardWriter:
    """One Parquet file, written as rows come."""

    def __init__(self, lake: Path, root: str, date: str, shard: int, stem: str) -> None:
        self._place = f"{root}/date={date}/shard={shard}/{stem}-{secrets.token_hex(4)}.parquet".lstrip("/")
        self._path = lake / self._place
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._date = date
        self._shard = shard
        self._rows = 0
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._writer = pq.ParquetWriter(
            self._path, SCHEMA, compression="zstd", use_dictionary=["stream", "content_type"], write_page_index=True
        )

    def write(self, rows: pa.RecordBatch) -> None:
        self._waiting.append(rows)
        self._waiting_rows += rows.num_rows
        if self._waiting_rows >= ROW_GROUP_ROWS:
            self._flush()

    def close(self) -> File:
        self._flush()
        self._writer.close()
        sync_file(self._path)
        return File(self._place, self._date, self._shard, self._rows, self._path.stat().st_size)

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, SCHEMA), ROW_GROUP_ROWS)
            self._rows += self._waiting_rows
            self._waiting, self._waiting_rows = [], 0


@dataclass(frozen=True, slots=True)
class ArchiveTask:
    """Sent to every executor. Rows must come sorted by shard, stream and position, all of a shard in one task."""

    lake: str
    root: str
    date: str
    shards: int
    stem: str
    archived: Mapping[str, Archived] = field(default_factory=dict)
    """How far the lake has each stream: a query that lost its checkpoint brings that again."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        places: dict[str, Archived] = {}
        files: list[File] = []
        writer: ShardWriter | None = None
        current = -1
        for rows in self._new(batches):
            for shard, part in _runs(rows, "shard"):
                if shard != current:
                    if writer is not None:
                        files.append(writer.close())
                    writer = ShardWriter(Path(self.lake), self.root, self.date, shard, self.stem)
                    current = shard
                assert writer is not None
                writer.write(part.select(SCHEMA.names).cast(SCHEMA))
                for stream, mine in _runs(part, "stream"):
                    # Rows come in order, so the last one that is seen is the end.
                    places[stream] = Archived(mine.column("offset")[-1].as_py(), _end(mine))
        if writer is not None:
            files.append(writer.close())
        told = [msgspec.json.encode(file).decode() for file in files]
        ends = msgspec.json.encode(places).decode()
        yield pa.RecordBatch.from_pydict({"file": [*told, None], "streams": [*([None] * len(told)), ends]})

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
            # A snapshot at a place stands for what lies before it.
            before = pc.subtract(rows.column("position"), rows.column("snapshot").cast(pa.int64()))
            kept = rows.filter(pc.greater_equal(before, known))
            if kept.num_rows:
                yield kept

    def _messages(self, stream: str, offset: str | None) -> int:
        """How many messages of this incarnation of a stream the lake has."""
        place = self.archived.get(stream)
        return 0 if place is None or are_of_two_streams(place.offset, offset or "") else place.position


def _end(rows: pa.RecordBatch) -> int:
    """Messages before the end of these; a snapshot stands for what lies before it and is no message."""
    position: int = rows.column("position")[-1].as_py()
    return position if rows.column("snapshot")[-1].as_py() else position + 1


def _runs(rows: pa.RecordBatch, column: str) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """Slices of equal values in a column; sorted rows give one each."""
    encoded = pc.run_end_encode(rows.column(column))
    start = 0
    for end, value in zip(encoded.run_ends.to_pylist(), encoded.values.to_pylist(), strict=True):
        yield value, rows.slice(start, end - start)
        start = end


def data_root(is_delta: bool) -> str:
    """Below which directory of the lake the files lie."""
    return "" if is_delta else DATA
