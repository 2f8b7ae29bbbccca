"""The archive as a job: which streams, into which lake, in what form, and whether the server may then let go of them.

Invariant: a batch is in the lake once. A batch that is done again is recognised by its number, one of a query that lost
its checkpoint by the offsets that the lake already has. A stream that was deleted and created again has offsets of
another incarnation, so that its messages are not taken for those of the old one.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import msgspec
from pydantic import Field, model_validator

from headwater.pipeline.archive.files import COLUMNS, RESULT, ArchiveTask, data_root
from headwater.pipeline.archive.manifest import Archived, File, LakeTrouble, Manifest, Outrun
from headwater.pipeline.archive.reading import archived, is_delta
from headwater.pipeline.archive.trimming import Trim, trim
from headwater.pipeline.fold.remote import Publisher
from headwater.pipeline.stream_job import JobName, StreamJob
from headwater.spark.options import Connection

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater.pipeline.job import Surroundings

log = logging.getLogger("headwater.pipeline")

_PLACES = msgspec.json.Decoder(dict[str, Archived])
_FILE = msgspec.json.Decoder(File)
_ATTEMPTS = 20


class Archive(StreamJob):
    """A configured archive."""

    name: JobName = "archive"
    lake: Path = Field(description="The directory of the lake; on a cluster, one that every node reaches.")
    format: Literal["parquet", "delta"] = Field("parquet", description="Parquet with a manifest, or a Delta table.")
    shards: int = Field(8, ge=1, le=10_000, description="Into how many directories a day's streams are spread.")
    tasks: int = Field(2, ge=1, description="Spark tasks that a batch is written by.")
    batch_bytes: int = Field(256 * 1024 * 1024, ge=1, description="Most bytes of messages in one batch.")
    on_gone: Literal["fail", "restart", "bootstrap", "skip"] = Field(
        "fail", description="When messages are gone before they were archived: as the source's onGone."
    )
    trim: Literal["never", "pointer", "fold"] = Field(
        "never",
        description="After each batch let the server forget what the lake has, by publishing a snapshot there: one that"
        " says where the lake is, or the fold of the stream.",
    )
    trim_after_s: float = Field(0.0, ge=0, description="Only what has been in the lake for so many seconds.")
    once: bool = Field(False, description="End when everything there was at the start is archived.")

    @model_validator(mode="after")
    def _can_be_trimmed(self) -> Self:
        if self.trim != "never" and not self.bucket:
            raise ValueError(
                "only streams of a bucket (/ds/BUCKET/…) can be trimmed: a snapshot makes the server forget, and"
                " streams of /v1/stream/ have none. They forget by age and size alone (Stream-Retention-Age, -Bytes)"
            )
        if self.trim_after_s and self.format == "delta":
            raise ValueError("trim_after_s needs the times of a manifest: use the format parquet")
        return self

    @property
    def target(self) -> str:
        return str(self.lake)

    def start(self, spark: SparkSession, surroundings: Surroundings) -> StreamingQuery:
        trimmed: dict[str, Archived] = {}

        def archive_batch(batch: DataFrame, batch_id: int) -> None:
            query = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
            assert query, "a batch belongs to a query"
            rows = self.run(batch, query, batch_id)
            log.info("archive %s: batch %d: %d rows", self.name, batch_id, rows)
            self.let_go(surroundings, trimmed)

        options = {"onGone": self.on_gone, "maxBytesPerBatch": self.batch_bytes, **self._beginning(surroundings)}
        return self.start_batches(spark, surroundings, COLUMNS, options, archive_batch, once=self.once)

    def run(self, batch: DataFrame, query: str, batch_id: int) -> int:
        """Put a batch into the lake, unless it is there; how many rows."""
        if is_delta(self.lake) if self.format == "parquet" else Manifest(self.lake).exists:
            raise LakeTrouble(f"{self.lake} is a lake of the other format than {self.format}.")
        return self._run_delta(batch, query, batch_id) if self.format == "delta" else self._run(batch, query, batch_id)

    def _run(self, batch: DataFrame, query: str, batch_id: int) -> int:
        manifest = Manifest(self.lake)
        contents = manifest.contents()
        if contents.batches.get(query, -1) >= batch_id:
            return 0
        shards = self._settled(contents.shards)
        files, streams = self._write(batch, query, batch_id, shards, contents.streams)
        for _ in range(_ATTEMPTS):
            try:
                manifest.commit(contents, query=query, batch=batch_id, add=files, streams=streams, shards=shards)
                return sum(file.rows for file in files)
            except Outrun:
                # A compaction came first. Another archive of the same streams must not.
                before = contents.streams
                contents = manifest.contents()
                if any(contents.streams.get(stream) != before.get(stream) for stream in streams):
                    raise LakeTrouble(
                        f"{self.lake}: another query archives the same streams at the same time."
                    ) from None
        raise LakeTrouble(f"{self.lake}: outrun {_ATTEMPTS} times by other writers.")

    def _run_delta(self, batch: DataFrame, query: str, batch_id: int) -> int:
        from headwater.pipeline.archive.delta import DeltaLake  # noqa: PLC0415 - only where it is wanted

        lake = DeltaLake(self.lake)
        if lake.has_batch(query, batch_id):
            return 0
        shards = self._settled(lake.shards())
        names = [row[0] for row in batch.select("stream").distinct().collect()] if lake.exists else []
        files, streams = self._write(batch, query, batch_id, shards, lake.archived(names))
        lake.commit(query, batch_id, files, streams, shards)
        return sum(file.rows for file in files)

    def _settled(self, shards: int) -> int:
        if shards not in (0, self.shards):
            raise LakeTrouble(
                f"{self.lake} has {shards} shards, and cannot have {self.shards} now: set shards={shards}."
            )
        return self.shards

    def _write(
        self, batch: DataFrame, query: str, batch_id: int, shards: int, known: Mapping[str, Archived]
    ) -> tuple[list[File], dict[str, Archived]]:
        from pyspark.sql import functions as F  # noqa: PLC0415 - loaded where Spark is

        date = datetime.now(UTC).date().isoformat()
        stem = f"{query[:8]}-{batch_id:08d}"
        task = ArchiveTask(str(self.lake), data_root(self.format == "delta"), date, shards, stem, known)
        sharded = batch.withColumn("shard", (F.crc32(F.encode("stream", "UTF-8")) % shards).cast("int"))
        shares = sharded.repartition(self.tasks, "shard").sortWithinPartitions(
            "shard", "stream", "position", F.desc("snapshot")
        )
        rows = shares.mapInArrow(task, RESULT).collect()
        files = [_FILE.decode(row["file"]) for row in rows if row["file"] is not None]
        streams: dict[str, Archived] = {}
        for row in rows:
            if row["streams"] is not None:
                streams.update(_PLACES.decode(row["streams"]))
        return files, streams

    def let_go(self, surroundings: Surroundings, trimmed: dict[str, Archived]) -> int:
        """Let the server forget what is safe in the lake, as far as that is wanted; how many streams were trimmed.

        `trimmed` remembers what was done before, so that ten thousand silent streams are not asked about each time.
        """
        if self.trim == "never":
            return 0
        connection = self.connection(surroundings)
        safe = [(stream, place) for stream, place in self._safe(connection) if trimmed.get(stream) != place]
        count = trim(connection, Trim(self.trim), self.lake, safe)
        trimmed.update(safe)
        return count

    def _safe(self, connection: Connection) -> Iterable[tuple[str, Archived]]:
        """How far each stream may be forgotten."""
        manifest = Manifest(self.lake)
        if not self.trim_after_s:
            return self._known(connection).items()
        latest_ms = (datetime.now(UTC).timestamp() - self.trim_after_s) * 1000
        safe: dict[str, Archived] = {}
        for commit in manifest.commits():
            if commit.at_ms <= latest_ms:
                safe.update(commit.streams)
        return safe.items()

    def _known(self, connection: Connection) -> dict[str, Archived]:
        """How far streams are in the lake. A Delta log must be asked by name, and only a bucket can list them."""
        if self.format != "delta" or self.streams or not self.bucket:
            return archived(self.lake, self.streams)
        client = Publisher(connection)
        try:
            return archived(self.lake, client.listing(self.prefix))
        finally:
            client.disconnect()

    def _beginning(self, surroundings: Surroundings) -> dict[str, str]:
        """For a query without a checkpoint: what the lake has need not be read, and may be gone."""
        known = self._known(self.connection(surroundings))
        if not known:
            return {}
        offsets = {stream: place.offset for stream, place in known.items()}
        return {"startingOffsets": msgspec.json.encode(offsets).decode()}
