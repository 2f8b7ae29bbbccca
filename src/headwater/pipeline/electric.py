"""Read tables through Electric's Shape API: micro-batches whose Spark offsets hold the handle and offset of each shape.

An offset is `{table: {"handle": …, "offset": …, "generation": …}}`. When Electric asks to fetch a shape again, the
next batch holds one reset, and the batches after it the new state. Invariant: a batch that is read again has the same
messages, or, if its shape was deleted, none; then a reset follows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from headwater.pipeline.postgres_reader import FollowedTable, MessageRows
from headwater.pipeline.postgres_source import PLAN, messages_schema
from headwater.pipeline.shape_client import (
    NOW,
    ShapeClient,
    ShapeExpiredError,
    ShapePart,
    ShapePlace,
    ShapeUnavailableError,
    TableReader,
)
from headwater.postgres.formats import TableFormat

log = logging.getLogger("headwater.pipeline")

NAME: Final = "headwater_electric"
_INLINE_MESSAGES: Final = 2_000
_RETRY_S: Final = 0.5

Messages = list[tuple[str, bytes]]


class ShapesFollowed(msgspec.Struct, frozen=True):
    """Which tables are read from which servers."""

    tables: tuple[FollowedTable, ...]
    idle_wait_s: float
    wait_max_s: float


_followed: Final = msgspec.json.Decoder(ShapesFollowed)


class _Range(msgspec.Struct, frozen=True):
    table: str
    start: ShapePlace
    end: ShapePlace
    found: Messages | None = None
    """The messages themselves, if the driver has them and they are few."""


class ShapesTask(InputPartition):
    def __init__(self, ranges: tuple[_Range, ...]) -> None:
        super().__init__(None)
        self.ranges = ranges


class ShapesReader(DataSourceStreamReader):
    """One per query, in a Python process beside the driver; tasks get a copy that only reads."""

    def __init__(self, url: str, followed: ShapesFollowed) -> None:
        self._url = url
        self._followed = followed
        self._tables = {one.table: one for one in followed.tables}
        self._clients: dict[str, ShapeClient] = {}
        self._readers: dict[tuple[str, str], TableReader] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._requests: dict[str, tuple[ShapePlace, Future[tuple[ShapePart, str]]]] = {}
        self._cursors: dict[str, str] = {}
        self._is_current: dict[str, bool] = {}
        self._planned: dict[tuple[str, ShapePlace, ShapePlace], Messages] = {}
        self._unavailable_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A task's copy makes its own requests.
        return {"url": self._url, "followed": self._followed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], state["followed"])  # type: ignore[misc]  # the state is the arguments

    # -- the driver's side ---------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        return {}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        places = {name: self._place(start, name) for name in self._tables}
        # Spark asks for more only after everything that it planned before was committed.
        self._planned = {key: found for key, found in self._planned.items() if places.get(key[0]) == key[1]}
        deadline = time.monotonic() + self._followed.idle_wait_s
        while True:
            for name, place in places.items():
                self._request_next(name, place)
            done, _ = wait(
                [future for _, future in self._requests.values()],
                timeout=max(0.0, deadline - time.monotonic()),
                return_when=FIRST_COMPLETED,
            )
            end = {name: self._available_end(name, place) for name, place in places.items()}
            if end != places:
                return {name: msgspec.to_builtins(place) for name, place in end.items()}
            if time.monotonic() >= deadline or not done:
                return start

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        ranges = []
        for name in self._tables:
            first, last = self._place(start, name), self._place(end, name)
            if first != last:
                found = self._planned.get((name, first, last))
                ranges.append(_Range(name, first, last, found))
        return [ShapesTask(tuple(ranges))] if ranges else []

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: Electric keeps a shape's log for all its readers."""

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for client in self._clients.values():
            client.close()

    def _place(self, offset: dict[str, Any], name: str) -> ShapePlace:
        found = offset.get(name)
        if found is not None:
            return msgspec.convert(found, ShapePlace)
        return ShapePlace() if self._tables[name].snapshot else ShapePlace(offset=NOW)

    def _request_next(self, name: str, place: ShapePlace) -> None:
        """Start a request for the messages after a place, unless one is in progress."""
        if name in self._requests and self._requests[name][0] == place:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self._tables) * 2, thread_name_prefix="electric")
        live = self._is_current.get(name, False)
        future = self._pool.submit(self._client(name).get, place, live=live, cursor=self._cursors.get(name, ""))
        self._requests[name] = place, future

    def _available_end(self, name: str, place: ShapePlace) -> ShapePlace:
        """The place up to which a table can be read now; `place` itself if there is nothing new."""
        _, future = self._requests[name]
        if not future.done():
            return place
        del self._requests[name]
        try:
            part, self._cursors[name] = future.result()
        except ShapeExpiredError:
            return self._start_over(name, place)
        except ShapeUnavailableError as error:
            self._wait_or_give_up(error)
            return place
        self._unavailable_since = None
        self._is_current[name] = part.up_to_date
        if place.handle and part.place.handle != place.handle:
            return self._start_over(name, place)
        if part.place == place:
            return place
        if len(part.messages) <= _INLINE_MESSAGES:
            try:
                self._planned[name, place, part.place] = list(self._rows(name, part))
            except ShapeExpiredError:
                return self._start_over(name, place)
        return part.place

    def _start_over(self, name: str, place: ShapePlace) -> ShapePlace:
        log.warning("table %s: Electric asks to fetch its shape again", name)
        self._is_current[name] = False
        self._cursors.pop(name, None)
        return ShapePlace("", self._place({}, name).offset, place.generation + 1)

    def _wait_or_give_up(self, error: ShapeUnavailableError) -> None:
        now = time.monotonic()
        if self._unavailable_since is None:
            self._unavailable_since = now
            log.warning("%s; trying again", error)
        if now - self._unavailable_since > self._followed.wait_max_s:
            raise error
        time.sleep(_RETRY_S)

    # -- both sides ----------------------------------------------------------------------------------------------

    def _client(self, name: str) -> ShapeClient:
        if name not in self._clients:
            self._clients[name] = ShapeClient(self._tables[name].electric_url or self._url, name)
        return self._clients[name]

    def _reader(self, name: str, place: ShapePlace, schema: dict[str, Any] | None) -> TableReader:
        key = name, place.handle
        if key not in self._readers:
            one = self._tables[name]
            how = TableFormat(one.stream, one.format, one.key, one.published)
            found = schema if schema is not None else self._client(name).schema(place)
            self._readers = {other: made for other, made in self._readers.items() if other[0] != name}
            self._readers[key] = TableReader(found, name, how)
        return self._readers[key]

    def _rows(self, name: str, part: ShapePart) -> Iterator[tuple[str, bytes]]:
        if part.messages:
            reader = self._reader(name, part.place, part.schema)
            for message in part.messages:
                yield from reader.messages(message)

    # -- the tasks' side -----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ShapesTask)
        rows = MessageRows()
        for one in partition.ranges:
            for found in self._messages(one):
                rows.add(iter(found))
                yield from rows.full()
        yield from rows.rest()

    def _messages(self, one: _Range) -> Iterator[Messages]:
        if one.end.generation != one.start.generation:
            # A reset can be written without the schema.
            how = self._tables[one.table]
            format_ = TableFormat(how.stream, how.format, how.key or ("key",), how.published)
            yield list(TableReader({}, one.table, format_).reset())
        elif one.found is not None:
            yield one.found
        elif one.start.offset != NOW:
            try:
                for part in self._client(one.table).between(one.start, one.end):
                    yield list(self._rows(one.table, part))
            except ShapeExpiredError:
                # Planned before a restart, and deleted since then: the next batch holds the reset.
                log.warning("table %s: the shape of a planned batch no longer exists", one.table)


class ElectricSource(DataSource):
    """`plan` holds a `ShapesFollowed` as JSON; `url`, which Spark hides, the address with its secret."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        return messages_schema()

    def streamReader(self, schema: StructType) -> ShapesReader:
        return ShapesReader(self.options["url"], _followed.decode(self.options[PLAN]))


def register(spark: SparkSession) -> None:
    spark.dataSource.register(ElectricSource)
