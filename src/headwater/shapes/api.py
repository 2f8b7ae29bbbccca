"""Handle requests: the snapshot and the log in chunks, long-polls, server-sent events, and subsets.

A handler finds the shape, reads its log, and renders. Invariant: a client that continues where the last response ended
misses nothing and gets nothing twice; a client whose shape was dropped is redirected to the new one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import psycopg

from headwater.postgres.connections import Connection
from headwater.shapes import responses
from headwater.shapes.database import Database
from headwater.shapes.definition import Definition, filter_of
from headwater.shapes.errors import InvalidShapeError, ShapeError, ShapeGoneError, UnavailableError
from headwater.shapes.follower import SlotFollower
from headwater.shapes.messages import RowWriter, up_to_date
from headwater.shapes.offsets import AFTER_SNAPSHOT, BEFORE_ALL, LogOffset
from headwater.shapes.registry import Registry, Shape
from headwater.shapes.request import ShapeRequest, Subset, parse_request
from headwater.shapes.responses import ShapeResponse
from headwater.shapes.shape_log import LogChunk
from headwater.shapes.snapshot import consistent_snapshot, read_rows
from headwater.shapes.where import Rendered, UnsupportedError, parse_order, render_order, resolve_order

_MARK_MAX: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Times:
    long_poll_s: float = 20.0
    sse_s: float = 60.0
    keep_alive_s: float = 21.0
    ready_s: float = 5.0
    """How long a request waits for Postgres before it is rejected."""


@dataclass(frozen=True, slots=True)
class EventStream:
    """A response that is written as events arrive."""

    headers: responses.Headers
    pieces: AsyncGenerator[bytes]


class Api:
    def __init__(
        self, registry: Registry, follower: SlotFollower, database: Database, times: Times, *, subset_bytes_max: int
    ) -> None:
        self._registry = registry
        self._follower = follower
        self._database = database
        self._times = times
        self._subset_bytes_max = subset_bytes_max

    def health(self) -> ShapeResponse:
        """Whether shapes can be served, in Electric's format."""
        if self._follower.is_connected:
            return ShapeResponse(200, [responses.JSON, ("cache-control", "no-cache, no-store")], b'{"status":"active"}')
        body = {"status": "starting" if self._follower.problem == "starting" else "waiting"}
        headers = [responses.JSON, ("cache-control", "no-cache, no-store")]
        return ShapeResponse(202, headers, msgspec.json.encode(body))

    async def shape(
        self, query: Mapping[str, str], body: bytes | None, if_none_match: str
    ) -> ShapeResponse | EventStream:
        """Respond to a request for a shape."""
        request = None
        try:
            request = parse_request(query, body)
            await self._ready()
            return await self._answer(request, if_none_match)
        except ShapeGoneError:
            assert request is not None
            return await self._must_refetch(request)
        except ShapeError as error:
            return responses.failure(error)

    async def delete(self, query: Mapping[str, str]) -> ShapeResponse:
        """Drop a shape, by its handle or by its definition."""
        try:
            await self._ready()
            shape = self._registry.with_handle(query.get("handle", ""))
            if shape is None and query.get("table"):
                shape = await self._registry.get(parse_request({**query, "offset": "-1"}, None).wanted)
        except ShapeError as error:
            return responses.failure(error)
        if shape is None:
            return responses.refusal(404, "Shape not found")
        self._registry.drop(shape, "deleted by a request")
        return ShapeResponse(202)

    async def _ready(self) -> None:
        if not self._follower.is_connected and not await self._follower.wait_until_connected(self._times.ready_s):
            raise UnavailableError(f"Not connected to Postgres: {self._follower.problem}")

    async def _must_refetch(self, request: ShapeRequest) -> ShapeResponse:
        """Respond that the shape was dropped, with the handle of its replacement."""
        try:
            shape = await self._registry.get(request.wanted)
        except ShapeError as error:
            return responses.failure(error)
        return responses.must_refetch(shape.handle)

    async def _answer(self, request: ShapeRequest, if_none_match: str) -> ShapeResponse | EventStream:
        shape = await self._registry.get(request.wanted)
        if request.handle is not None and shape.handle != request.handle:
            return responses.must_refetch(shape.handle)
        with shape.used():
            try:
                # A reader that does not get a snapshot relies on every change after this response.
                await shape.wait_until_followed()
                if request.subset is not None:
                    return await self._subset(shape, request.subset)
                if request.is_now:
                    return self._now(shape, request)
                if request.live:
                    return await self._live(shape, request)
                return await self._catch_up(shape, request, if_none_match)
            except ShapeGoneError:
                if shape.failure is not None:
                    raise shape.failure from None
                raise

    # -- reading the log -----------------------------------------------------------------------------------------

    async def _catch_up(self, shape: Shape, request: ShapeRequest, if_none_match: str) -> ShapeResponse:
        chunk = await shape.log.read(self._place(shape, request.offset))
        is_start = request.offset == BEFORE_ALL
        # Caches keep the first response for a long time, so it never claims to be up to date.
        is_current = chunk.at_end and not is_start
        headers = self._headers(shape, request, chunk, is_current=is_current)
        headers.append(responses.from_start() if is_start else responses.catch_up())
        headers.append(("electric-schema", shape.schema_header))
        etag = dict(headers)["etag"]
        if etag in (one.strip() for one in if_none_match.split(",")):
            return ShapeResponse(304, headers)
        return ShapeResponse(200, [responses.JSON, *headers], self._array(shape, chunk, is_current=is_current))

    def _now(self, shape: Shape, request: ShapeRequest) -> ShapeResponse:
        chunk = LogChunk(b"", shape.log.last, at_end=True)
        headers = self._headers(shape, request, chunk, is_current=True)
        headers += [responses.catch_up(), ("electric-schema", shape.schema_header)]
        return ShapeResponse(200, [responses.JSON, *headers], self._array(shape, chunk, is_current=True))

    async def _live(self, shape: Shape, request: ShapeRequest) -> ShapeResponse | EventStream:
        cursor = ("electric-cursor", responses.next_cursor(request.cursor, self._times.long_poll_s))
        place = self._place(shape, request.offset)
        if request.sse:
            headers = [
                ("content-type", "text/event-stream"),
                responses.sse(self._times.sse_s),
                cursor,
                ("electric-handle", shape.handle),
                ("electric-offset", request.offset_text),
                ("x-accel-buffering", "no"),
            ]
            return EventStream(headers, self._events(shape, place))
        chunk = await self._next(shape, place, time.monotonic() + self._times.long_poll_s)
        if not chunk.body and not self._follower.is_connected:
            raise UnavailableError(f"Not connected to Postgres: {self._follower.problem}")
        headers = self._headers(shape, request, chunk, is_current=chunk.at_end)
        headers += [responses.long_poll(), cursor]
        return ShapeResponse(200, [responses.JSON, *headers], self._array(shape, chunk, is_current=chunk.at_end))

    async def _next(self, shape: Shape, place: LogOffset, deadline: float) -> LogChunk:
        """Wait for the next chunk with content, or return an empty one after the timeout."""
        while True:
            chunk = await shape.log.read(place)
            left_s = deadline - time.monotonic()
            if chunk.body or left_s <= 0:
                return chunk
            await shape.log.wait(left_s)

    async def _events(self, shape: Shape, place: LogOffset) -> AsyncGenerator[bytes]:
        deadline = time.monotonic() + self._times.sse_s
        with shape.used():
            is_announced = False
            while (left_s := deadline - time.monotonic()) > 0:
                chunk = await shape.log.read(place)
                if chunk.body:
                    yield shape.log.events(chunk)
                    place, is_announced = chunk.end, False
                if chunk.at_end and not is_announced:
                    is_announced = True
                    yield b"data: " + up_to_date(self._lsn(shape)) + b"\n\n"
                elif not chunk.body:
                    try:
                        if not await shape.log.wait(min(left_s, self._times.keep_alive_s)):
                            yield b": keep-alive\n\n"
                    except ShapeGoneError:
                        # The next request of the client gets the new handle.
                        return

    def _place(self, shape: Shape, offset: LogOffset) -> LogOffset:
        if shape.definition.wanted.log == "changes_only":
            return max(offset, AFTER_SNAPSHOT)
        return offset

    def _lsn(self, shape: Shape) -> int:
        """The position up to which a reader at the end has everything of the shape."""
        return max(self._registry.lsn, shape.log.complete_lsn)

    def _headers(self, shape: Shape, request: ShapeRequest, chunk: LogChunk, *, is_current: bool) -> responses.Headers:
        has_data = bool(chunk.body)
        tag = f"{shape.handle}:{request.offset_text}:{chunk.end}"
        headers = [
            ("electric-handle", shape.handle),
            ("electric-offset", str(chunk.end)),
            # An empty response differs from the next one only by its time.
            ("etag", f'"{tag}"' if has_data else f'"{tag}:{time.monotonic_ns()}"'),
            ("electric-has-data", "true" if has_data else "false"),
        ]
        if is_current:
            headers.append(("electric-up-to-date", ""))
        return headers

    def _array(self, shape: Shape, chunk: LogChunk, *, is_current: bool) -> bytes:
        pieces = [chunk.body] if chunk.body else []
        if is_current:
            pieces.append(up_to_date(self._lsn(shape)))
        return b"[" + b",".join(pieces) + b"]"

    # -- subsets -------------------------------------------------------------------------------------------------

    async def _subset(self, shape: Shape, subset: Subset) -> ShapeResponse:
        mark = secrets.randbelow(_MARK_MAX)
        definition = shape.definition
        # Changes that the query sees before the log has them arrive later; the metadata identifies their transactions.
        offset = shape.log.last
        try:
            body = await self._database.run(lambda connection: self._query(connection, definition, subset, mark))
        except psycopg.errors.QueryCanceled:
            raise UnavailableError("The query was cancelled") from None
        except psycopg.errors.DataError as error:
            raise InvalidShapeError("subset", error.diag.message_primary or "invalid value") from None
        headers = [
            responses.JSON,
            ("cache-control", "no-cache"),
            ("electric-snapshot", "true"),
            ("electric-handle", shape.handle),
            ("electric-offset", str(offset)),
            ("electric-schema", shape.schema_header),
        ]
        return ShapeResponse(200, headers, body)

    def _query(self, connection: Connection, definition: Definition, subset: Subset, mark: int) -> bytes:
        table = definition.table
        conditions: list[Rendered] = [definition.filter.rendered] if definition.filter is not None else []
        if subset.where:
            found = filter_of(connection, table, subset.where, dict(subset.params), "subset")
            conditions.append(found.rendered)
        writer = RowWriter(definition, {"snapshot_mark": mark})
        messages: list[bytes] = []
        size = 0
        with consistent_snapshot(connection) as seen:
            for row in read_rows(connection, table.name, definition.columns, conditions, _ending(definition, subset)):
                message = writer.message(row)
                messages.append(message)
                size += len(message)
                if size > self._subset_bytes_max:
                    raise InvalidShapeError(
                        "subset", f"more than {self._subset_bytes_max} bytes; use limit and order_by"
                    )
        metadata: dict[str, Any] = {
            "snapshot_mark": mark,
            "database_lsn": str(seen.lsn),
            "xmin": str(seen.xmin),
            "xmax": str(seen.xmax),
            "xip_list": [str(one) for one in sorted(seen.running)],
        }
        return b'{"metadata":' + msgspec.json.encode(metadata) + b',"data":[' + b",".join(messages) + b"]}"


def _ending(definition: Definition, subset: Subset) -> str:
    """ORDER BY with column names from the catalog, LIMIT and OFFSET with numbers."""
    ending = ""
    if subset.order_by:
        known = {one.name for one in definition.table.columns}
        try:
            order = resolve_order(parse_order(subset.order_by, definition.table.name.table), known.__contains__)
        except UnsupportedError as error:
            raise InvalidShapeError("subset", str(error)) from None
        ending += f" ORDER BY {render_order(order)}"
    if subset.limit is not None:
        ending += f" LIMIT {subset.limit:d}"
    if subset.offset is not None:
        ending += f" OFFSET {subset.offset:d}"
    return ending
