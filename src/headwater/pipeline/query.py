"""Spark SQL over streams, archives, snapshots and states, with table functions.

SELECT count(*) FROM stream('chat/1')
SELECT * FROM stream('orders', 'id long, total double') WHERE total > 100
SELECT stream, max(position) FROM streams('/ds/sessions/') GROUP BY stream
SELECT date, count(*) FROM archive('/lake') GROUP BY date
SELECT value FROM state('/ds/sessions/chat-1') WHERE type = 'message'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from headwater.pipeline.archive.reading import read_archive
from headwater.pipeline.fold.snapshot_client import SnapshotClient, latest_snapshot, snapshot_client, state_at
from headwater.pipeline.table_calls import TableCall, rewritten
from headwater.spark.errors import StreamMissingError
from headwater.spark.options import ConnectionOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.pipeline.job import JobEnvironment

_PLAIN: Final = "stream string, offset string, position long, value binary, content_type string"
_BUCKETS: Final = "/ds/"
STATE: Final = "stream string, type string, key string, value string, offset string"


class QueryError(Exception):
    """A table function was called incorrectly; the message shows the correct form."""


class QueryViews:
    """Create a view for each call in a query."""

    def __init__(self, spark: SparkSession, environment: JobEnvironment) -> None:
        self._spark = spark
        self._surroundings = environment
        self._views: dict[TableCall, str] = {}

    def sql(self, text: str) -> DataFrame:
        return self._spark.sql(rewritten(text, self._view))

    def _view(self, call: TableCall) -> str:
        if call not in self._views:
            make, most = self._functions()[call.function]
            if len(call.arguments) > most:
                raise QueryError(f"{call.function}() takes {'one string' if most == 1 else 'one or two strings'}.")
            name = f"_headwater_{len(self._views)}"
            make(*call.arguments).createOrReplaceTempView(name)
            self._views[call] = name
        return self._views[call]

    def _functions(self) -> dict[str, tuple[Callable[..., DataFrame], int]]:
        return {
            "stream": (self.stream, 2),
            "streams": (self.streams, 2),
            "archive": (self.archive, 2),
            "snapshot": (self.snapshot, 1),
            "state": (self.state, 1),
            "states": (self.states, 1),
        }

    def stream(self, name: str, schema: str = "") -> DataFrame:
        """The current messages of a stream."""
        connection, local = self._locate(name)
        with _client(connection) as client:
            client.head(local)
        return self._read(connection, schema, streams=local)

    def streams(self, prefix: str, schema: str = "") -> DataFrame:
        """The current messages of all streams with this prefix; /ds/BUCKET/ selects a whole bucket."""
        connection, local = self._locate(prefix)
        return self._read(connection, schema, **({"prefix": local} if local else {}))

    def archive(self, lake: str, stream: str = "") -> DataFrame:
        """The rows of an archive, or of one of its streams."""
        rows = read_archive(self._spark, Path(lake), stream)
        return rows.withColumn("value", rows["value"].cast("string"))

    def snapshot(self, name: str) -> DataFrame:
        """The latest snapshot of a stream as it was published: one row, or none."""
        connection, local = self._locate(name)
        rows = []
        with _client(connection) as client:
            offset = client.head(local).snapshot
            if offset is not None:
                found = client.snapshot(local, offset)
                rows = [(local, offset, found.content_type, found.body.decode("utf-8", "replace"))]
        return self._spark.createDataFrame(rows, "stream string, offset string, content_type string, value string")

    def state(self, name: str) -> DataFrame:
        """The current fold of a change stream: a row for each type and key."""
        connection, local = self._locate(name)
        with _client(connection) as client:
            client.head(local)
        return self._states(connection, [local])

    def states(self, prefix: str) -> DataFrame:
        """The current folds of all streams of a bucket with this prefix."""
        connection, local = self._locate(prefix)
        if not connection.bucket:
            raise QueryError("states() needs a bucket: /ds/BUCKET/, or /ds/BUCKET/PREFIX.")
        with _client(connection) as client:
            return self._states(connection, client.listing(local))

    def _states(self, connection: ConnectionOptions, names: list[str]) -> DataFrame:
        frame = self._spark.createDataFrame([(name,) for name in names], "stream string")
        spread = frame.repartition(min(len(names), 8), "stream") if len(names) > 1 else frame.coalesce(1)
        return spread.mapInArrow(StateTask(connection), STATE)

    def _read(self, connection: ConnectionOptions, schema: str, **which: str) -> DataFrame:
        options: dict[str, str] = {**self._surroundings.options, "onGone": "skip", **which}
        if connection.bucket:
            options["bucket"] = connection.bucket
        rows = self._spark.read.format("headwater").schema(schema or _PLAIN).options(**options).load()
        # As text, without an error if it is not valid UTF-8.
        return rows if schema else rows.withColumn("value", rows["value"].cast("string"))

    def _locate(self, name: str) -> tuple[ConnectionOptions, str]:
        if not name.startswith(_BUCKETS):
            return self._surroundings.connection(), name
        bucket, _, local = name.removeprefix(_BUCKETS).partition("/")
        return self._surroundings.connection(bucket), local


class _client:
    """A client for the driver, closed at the end of the block."""

    def __init__(self, connection: ConnectionOptions) -> None:
        self._client = SnapshotClient(connection)

    def __enter__(self) -> SnapshotClient:
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.disconnect()


class StateTask:
    """Fold streams up to their current ends, in Spark tasks."""

    def __init__(self, connection: ConnectionOptions) -> None:
        self._connection = connection

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        client = snapshot_client(self._connection)
        for batch in batches:
            for stream in batch.column("stream").to_pylist():
                rows = self._rows(client, stream)
                if rows:
                    names = [column.split()[0] for column in STATE.split(", ")]
                    columns = [pa.array(column, pa.string()) for column in zip(*rows, strict=True)]
                    yield pa.RecordBatch.from_arrays(columns, names)

    def _rows(self, client: SnapshotClient, stream: str) -> list[tuple[Any, ...]]:
        try:
            end = client.head(stream).offset
            state = state_at(client, stream, end) or latest_snapshot(client, stream).state
        except StreamMissingError:
            return []
        entries = state.entries
        return [(stream, *key, entries[key].value.decode(), end) for key in sorted(entries)]
