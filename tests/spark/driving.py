"""Drive the source as Spark does, without a session: plan, read, store the offset as JSON, restart from it."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from headwater.spark.options import source_options
from headwater.spark.progress import lags
from headwater.spark.source import HeadwaterSource
from headwater.spark.stream_reader import MicroBatchReader
from tests import waiting
from tests.spark.streams import Streams

Row = tuple[str, str]
"""A value and the offset after it."""

queries: list[Query] = []
"""All queries that were created, for `stop_all`."""


def stop_all() -> None:
    while queries:
        queries.pop().stop()


class Query:
    """A query with its checkpoint: `batch` is one micro-batch, `restart` a new driver on the same checkpoint."""

    def __init__(self, at: Streams, /, **options: str) -> None:
        self._options = {"url": at.root, "idleWait": "50", **options}
        self.place: dict[str, Any] | None = None
        self.planned: dict[str, Any] | None = None
        self._reader = self._made()
        queries.append(self)

    def stop(self) -> None:
        self._reader.stop()

    def _made(self) -> MicroBatchReader:
        return MicroBatchReader(source_options(self._options), HeadwaterSource(self._options).schema())

    def restart(self, **options: str) -> None:
        self._reader.stop()
        self._options |= options
        self._reader = self._made()
        # Spark passes the offset that it stored, as text.
        self.place = json.loads(json.dumps(self.place))
        self.planned = json.loads(json.dumps(self.planned))

    def plan(self) -> None:
        if self.place is None:
            self.place = self._reader.initialOffset()
        self.planned = self._reader.latestOffset(self.place, self._reader.getDefaultReadLimit())

    def tables(self) -> list[pa.RecordBatch]:
        """The rows that the tasks of the planned batch read."""
        assert self.place is not None
        assert self.planned is not None
        tasks = self._reader.partitions(self.place, self.planned)
        return [batch for task in tasks for batch in self._reader.read(task)]

    def rows(self) -> list[Row]:
        batches = self.tables()
        return [
            row
            for batch in batches
            for row in zip(*(batch[name].to_pylist() for name in ("value", "offset")), strict=True)
        ]

    def batch(self) -> list[str]:
        self.plan()
        rows = self.rows()
        self._reader.commit(self.planned or {})
        self.place = self.planned
        return [value for value, _ in rows]

    def batches_until(self, count: int) -> list[str]:
        """Run batches until there are this many rows: a running query notices changes when the server reports them."""
        found: list[str] = []

        def more() -> list[str]:
            found.extend(self.batch())
            return found

        return waiting.wait_until(more, lambda rows: len(rows) >= count)

    def lag(self) -> int:
        return sum(lags(json.dumps(self.planned), json.dumps(self._reader.reportLatestOffset())).values())


def without_incarnation(places: dict[str, Any] | None) -> dict[str, Any]:
    """The places as stored by a release without incarnations."""
    return {name: {**place, "offset": place["offset"][:33]} for name, place in (places or {}).items() if name}
