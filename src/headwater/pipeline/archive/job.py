"""The archive job: which streams to archive, into which table, and what the server may delete afterwards.

Invariant: a message is in the archive once. A repeated batch is recognised by its number; a query that lost its
checkpoint, by the offsets of the archive. A stream that was deleted and recreated has offsets of another incarnation,
so its messages are not mistaken for those of the old one.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import msgspec
from pydantic import Field, model_validator

from headwater.pipeline.archive.errors import ArchiveError
from headwater.pipeline.archive.files import COLUMNS, RESULT, ArchivedPosition, ArchiveFile, ArchiveTask
from headwater.pipeline.archive.maintenance import ArchiveMaintenance
from headwater.pipeline.archive.table import ArchiveTable
from headwater.pipeline.archive.trimming import TrimMethod, trim
from headwater.pipeline.stream_job import JobName, StreamJob

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater.pipeline.job import JobEnvironment

log = logging.getLogger("headwater.pipeline")

_decode_positions = msgspec.json.Decoder(dict[str, ArchivedPosition]).decode
_decode_file = msgspec.json.Decoder(ArchiveFile).decode


class Archive(StreamJob):
    """A configured archive."""

    name: JobName = "archive"
    lake: Path = Field(description="The directory of the archive; on a cluster, one that every node reaches.")
    format: Literal["delta", "parquet"] = Field(
        "delta", description="Accepted and ignored: an archive is always a Delta table of Parquet files."
    )
    shards: int = Field(8, ge=1, le=10_000, description="Number of directories that a day's streams are spread over.")
    tasks: int = Field(2, ge=1, description="Spark tasks that write a batch.")
    batch_bytes: int = Field(256 * 1024 * 1024, ge=1, description="Most bytes of messages in one batch.")
    on_gone: Literal["fail", "restart", "bootstrap", "skip"] = Field(
        "fail", description="What to do when messages were deleted before they were archived: the source's onGone."
    )
    trim: Literal["never", "pointer", "fold"] = Field(
        "never",
        description="After each batch, let the server delete what is archived by publishing a snapshot: one that says"
        " where the archive is, or the fold of the stream.",
    )
    trim_after_s: float = Field(0.0, ge=0, description="Trim only what was archived at least this many seconds ago.")
    compact_every_s: float = Field(
        3600.0, ge=0, description="Seconds between two compactions, each followed by a vacuum; 0 disables them."
    )
    keep_s: float = Field(
        7 * 86400.0, ge=0, description="Seconds for which a vacuum keeps files that a compaction has replaced."
    )
    once: bool = Field(False, description="End when everything that was there at the start is archived.")

    @model_validator(mode="after")
    def _can_be_trimmed(self) -> Self:
        if self.trim != "never" and not self.bucket:
            raise ValueError(
                "only streams of a bucket (/ds/BUCKET/…) can be trimmed: a snapshot lets the server delete messages,"
                " and streams of /v1/stream/ have no snapshots. Use their retention (Stream-Retention-Age, -Bytes)"
            )
        return self

    @property
    def target(self) -> str:
        return str(self.lake)

    def start(self, spark: SparkSession, environment: JobEnvironment) -> StreamingQuery:
        table = self.table()
        maintenance = ArchiveMaintenance(self.lake, 0 if self.once else self.compact_every_s, self.keep_s)
        trimmed: dict[str, ArchivedPosition] = {}

        def archive_batch(batch: DataFrame, batch_id: int) -> None:
            query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
            assert query, "a batch belongs to a query"
            rows = self.run(table, batch, query, batch_id)
            log.info("archive %s: batch %d: %d rows", self.name, batch_id, rows)
            self.trim_streams(table, environment, trimmed)
            maintenance.run_if_due()

        options = {"onGone": self.on_gone, "maxBytesPerBatch": self.batch_bytes, **self._starting_offsets(table)}
        return self.start_batches(spark, environment, COLUMNS, options, archive_batch, once=self.once)

    def table(self) -> ArchiveTable:
        table = ArchiveTable(self.lake)
        table.require_migrated()
        return table

    def run(self, table: ArchiveTable, batch: DataFrame, query: str, batch_id: int) -> int:
        """Archive a batch unless it is archived already; return the number of rows."""
        if table.has_batch(query, batch_id):
            return 0
        shards = table.shards()
        if shards not in (0, self.shards):
            raise ArchiveError(f"{self.lake} has {shards} shards, which cannot change: set shards={shards}.")
        known = table.positions()
        files, streams = self._write(batch, f"{query[:8]}-{batch_id:08d}", known)
        table.commit({query: batch_id}, files, streams, self.shards, known)
        return sum(file.rows for file in files)

    def _write(
        self, batch: DataFrame, stem: str, known: Mapping[str, ArchivedPosition]
    ) -> tuple[list[ArchiveFile], dict[str, ArchivedPosition]]:
        from pyspark.sql import functions as F  # noqa: PLC0415 - loaded where Spark is

        task = ArchiveTask(str(self.lake), datetime.now(UTC).date().isoformat(), stem, known)
        sharded = batch.withColumn("shard", (F.crc32(F.encode("stream", "UTF-8")) % self.shards).cast("int"))
        sorted_rows = sharded.repartition(self.tasks, "shard").sortWithinPartitions(
            "shard", "stream", "position", F.desc("snapshot")
        )
        rows = sorted_rows.mapInArrow(task, RESULT).collect()
        files = [_decode_file(row["file"]) for row in rows if row["file"] is not None]
        streams: dict[str, ArchivedPosition] = {}
        for row in rows:
            if row["streams"] is not None:
                streams.update(_decode_positions(row["streams"]))
        return files, streams

    def trim_streams(
        self, table: ArchiveTable, environment: JobEnvironment, trimmed: dict[str, ArchivedPosition]
    ) -> int:
        """Let the server delete what is archived, as configured; return the number of trimmed streams.

        `trimmed` remembers what was done before, so that unchanged streams cost no request.
        """
        if self.trim == "never":
            return 0
        before_ms = (datetime.now(UTC).timestamp() - self.trim_after_s) * 1000 if self.trim_after_s else None
        positions = self._selected(table.positions(before_ms))
        safe = [(stream, end) for stream, end in positions.items() if trimmed.get(stream) != end]
        count = trim(self.connection(environment), TrimMethod(self.trim), self.lake, safe)
        trimmed.update(safe)
        return count

    def _selected(self, positions: Mapping[str, ArchivedPosition]) -> dict[str, ArchivedPosition]:
        """The positions of this job's streams; another job may archive other streams into the same table."""
        names = set(self.streams)
        return {
            stream: end
            for stream, end in positions.items()
            if (stream in names if names else stream.startswith(self.prefix))
        }

    def _starting_offsets(self, table: ArchiveTable) -> dict[str, str]:
        """The start offsets of a query without a checkpoint. It skips archived messages, which may be deleted."""
        offsets = {stream: end.offset for stream, end in self._selected(table.positions()).items()}
        return {"startingOffsets": msgspec.json.encode(offsets).decode()} if offsets else {}
