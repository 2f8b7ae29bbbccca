"""The registry of shapes: created on demand, updated by every transaction, dropped when stale, idle or too large.

A shape is followed from before its snapshot is taken, and its log omits the transactions that the snapshot saw.
Invariant: for every shape, snapshot and log together have each committed change exactly once, in commit order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from headwater.postgres.catalog import TableName
from headwater.postgres.connections import Connection
from headwater.postgres.pgoutput import Transaction
from headwater.postgres.snapshots import VisibleTransactions
from headwater.shapes.catalog import COMPLETE, ShapeCatalog, StoredShape
from headwater.shapes.database import Database
from headwater.shapes.definition import Definition, ShapeDescription, define
from headwater.shapes.errors import InvalidShapeError, ShapeError, ShapeGoneError, UnavailableError
from headwater.shapes.messages import ChangeWriter, Entry, RowWriter, StaleRowError, snapshot_end
from headwater.shapes.replication import ChangeBatch
from headwater.shapes.shape_log import ShapeLog
from headwater.shapes.snapshot import consistent_snapshot, read_rows
from headwater.shapes.streams import Streams
from headwater.shapes.table import describe, prepare

log = logging.getLogger("headwater.shapes")

Result = TypeVar("Result")

DEFINITIONS_MAX: Final = 5_000
_RECENT_MAX: Final = 100_000
_RECENT_S: Final = 300.0
_LARGE_TRANSACTION: Final = 500
_CLEAN_UP_RETRY_S: Final = 2.0
_INVISIBLE_WAIT_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the number and the size of shapes."""

    tables: frozenset[TableName]
    """The tables that may be served."""
    shapes_max: int = 500
    idle_s: float = 86_400.0
    """A shape that is not read for this long is dropped."""
    evict_after_s: float = 60.0
    """When the limit of shapes is reached, a shape that was not read for this long is evicted."""
    log_bytes_max: int = 256 << 20
    """A shape whose log grows beyond this is dropped; its readers fetch a new snapshot."""
    tail_bytes: int = 256 << 10
    chunk_bytes: int = 1 << 20


class Shape:
    def __init__(self, handle: str, definition: Definition, shape_log: ShapeLog) -> None:
        self.handle = handle
        self.definition = definition
        self.identity = definition.identity
        self.log = shape_log
        self.writer = ChangeWriter(definition)
        self.schema_header = definition.schema_header
        self.seen: VisibleTransactions | None = None
        self.is_dropped = False
        self.failure: ShapeError | None = None
        """Why it could not be created."""
        self.followed_after = 0
        """How many transactions were applied before it was followed."""
        self._readers = 0
        self._used_at = time.monotonic()
        self._seen_known = asyncio.Event()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Mark the shape as in use by a request."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._used_at = time.monotonic()

    @property
    def idle_s(self) -> float:
        return 0.0 if self._readers else time.monotonic() - self._used_at

    def set_seen(self, seen: VisibleTransactions | None) -> None:
        """Set the transactions that the snapshot saw; None if unknown (not yet, or no longer)."""
        self.seen = seen
        self._seen_known.set()
        if seen is None:
            self._seen_known = asyncio.Event()

    async def wait_for_seen(self) -> None:
        await self._seen_known.wait()

    async def wait_until_followed(self) -> None:
        """Wait until every further change reaches the log. Raises `ShapeGoneError` if the shape was dropped."""
        while self.seen is None:
            if self.is_dropped:
                raise ShapeGoneError("the shape was dropped")
            await self._seen_known.wait()


class _Applied(NamedTuple):
    number: int
    at: float
    xid: int
    end_lsn: int


class Registry:
    def __init__(
        self,
        database: Database,
        snapshots: Database,
        streams: Streams,
        catalog: ShapeCatalog,
        publication: str,
        limits: Limits,
    ) -> None:
        self._database = database
        self._snapshots = snapshots
        self._streams = streams
        self._catalog = catalog
        self._publication = publication
        self.limits = limits
        self._by_handle: dict[str, Shape] = {}
        self._by_identity: dict[str, Shape] = {}
        self._followed: dict[int, dict[str, Shape]] = {}
        self._definitions: OrderedDict[ShapeDescription, Definition] = OrderedDict()
        self._recent: deque[_Applied] = deque()
        """Recent transactions. Postgres may send a transaction before it is visible to other sessions."""
        self._applied = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.lsn = 0
        """Everything that was committed up to this position is in the logs."""

    # -- finding and creating shapes -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._by_handle)

    def with_handle(self, handle: str) -> Shape | None:
        return self._by_handle.get(handle)

    async def define(self, wanted: ShapeDescription) -> Definition:
        """The definition for a request, cached."""
        if wanted.name not in self.limits.tables:
            listed = "does not exist or is not in the list of tables that are served (shapes.tables)"
            raise InvalidShapeError("table", f'Table "{wanted.schema}"."{wanted.table}" {listed}')
        known = self._definitions.get(wanted)
        if known is None:
            known = await self._database.run(lambda connection: define(connection, wanted))
            self._definitions[wanted] = known
            while len(self._definitions) > DEFINITIONS_MAX:
                self._definitions.popitem(last=False)
        else:
            self._definitions.move_to_end(wanted)
        for whole in known.table.ancestors & self.limits.tables:
            # Postgres sends the changes of a partition under one name only.
            raise InvalidShapeError(
                "table",
                f'"{wanted.schema}"."{wanted.table}" is a partition of {whole.text}, which is served as a whole; use'
                f" table={whole.text} with a condition",
            )
        return known

    async def get(self, wanted: ShapeDescription) -> Shape:
        """The shape for a request, created if there is none."""
        definition = await self.define(wanted)
        shape = self._by_identity.get(definition.identity)
        if shape is None:
            self._evict_idle()
            shape = self._new(_new_handle(definition), definition)
            self._spawn(self._begin(shape))
        return shape

    def _new(self, handle: str, definition: Definition) -> Shape:
        limits = self.limits
        made = ShapeLog(self._streams, handle, tail_bytes=limits.tail_bytes, chunk_bytes=limits.chunk_bytes)
        shape = Shape(handle, definition, made)
        self._by_handle[handle] = shape
        self._by_identity[shape.identity] = shape
        return shape

    def _evict_idle(self) -> None:
        if len(self._by_handle) < self.limits.shapes_max:
            return
        longest = max(self._by_handle.values(), key=lambda shape: shape.idle_s)
        if longest.idle_s < self.limits.evict_after_s:
            raise UnavailableError(
                f"The limit of {self.limits.shapes_max} shapes (shapes.max_shapes) is reached, and all are in use",
                retry_after_s=10,
            )
        self.drop(longest, "evicted to make room")

    async def _begin(self, shape: Shape) -> None:
        """Create a shape: publish the table, create the streams, take the snapshot."""
        definition = shape.definition

        def register(connection: Connection) -> None:
            needs_old_rows = definition.needs_old_rows
            prepare(connection, self._publication, definition.table, needs_old_rows=needs_old_rows)
            self._catalog.add(connection, shape.handle, definition.wanted, shape.identity)

        loop = asyncio.get_running_loop()
        try:
            await self._database.run(register)
            await shape.log.create()
            await self._snapshots.run(lambda connection: self._take_snapshot(connection, shape, loop))
            seen, chunks = shape.seen, tuple(shape.log.chunks)
            assert seen is not None
            await self._database.run(lambda connection: self._catalog.complete(connection, shape.handle, seen, chunks))
        except ShapeError as error:
            shape.failure = error
            self.drop(shape, str(error))
        except Exception as error:
            log.exception("creating shape %s failed", shape.handle)
            shape.failure = UnavailableError(f"The shape could not be created: {error}")
            self.drop(shape, str(error))
        else:
            shape.log.complete_snapshot()

    def _take_snapshot(self, connection: Connection, shape: Shape, loop: asyncio.AbstractEventLoop) -> None:
        """Runs on a thread: record what the snapshot sees, then write its rows, a chunk at a time."""

        def call(work: Coroutine[Any, Any, Result]) -> Result:
            return asyncio.run_coroutine_threadsafe(work, loop).result()

        if shape.log.chunks:
            raise UnavailableError("The connection to Postgres was lost while the snapshot was read")
        while True:
            call(self._follow(shape))
            with consistent_snapshot(connection) as seen:
                if call(self._accept(shape, seen)):
                    self._write_rows(connection, shape, seen, call)
                    return
            time.sleep(_INVISIBLE_WAIT_S)

    def _write_rows(self, connection: Connection, shape: Shape, seen: VisibleTransactions, call: Any) -> None:
        definition = shape.definition
        pieces: list[bytes] = []
        size = 0
        if definition.wanted.log == "full":
            writer = RowWriter(definition)
            conditions = [definition.filter.rendered] if definition.filter is not None else []
            for row in read_rows(connection, definition.table.name, definition.columns, conditions):
                message = writer.message(row)
                pieces.append(message)
                size += len(message)
                if size >= self.limits.chunk_bytes:
                    call(shape.log.add_chunk(b",".join(pieces), is_last=False))
                    pieces, size = [], 0
            pieces.append(snapshot_end(seen.xmin, seen.xmax, seen.running))
            call(shape.log.add_chunk(b",".join(pieces), is_last=True))

    async def _follow(self, shape: Shape) -> None:
        """Start following: from now on, changes of the table wait until it is known what the snapshot sees."""
        if shape.is_dropped:
            raise ShapeGoneError("the shape was dropped")
        shape.set_seen(None)
        shape.followed_after = self._applied
        self._followed.setdefault(shape.definition.table.oid, {})[shape.handle] = shape

    async def _accept(self, shape: Shape, seen: VisibleTransactions) -> bool:
        """Whether the snapshot has everything that was applied before the shape was followed."""
        earlier = (one for one in self._recent if one.number <= shape.followed_after)
        if any(not seen.has(one.xid, one.end_lsn) for one in earlier):
            self._unfollow(shape)
            shape.set_seen(None)
            return False
        shape.set_seen(seen)
        return True

    def _unfollow(self, shape: Shape) -> None:
        oid = shape.definition.table.oid
        followed = self._followed.get(oid, {})
        followed.pop(shape.handle, None)
        if not followed:
            self._followed.pop(oid, None)

    # -- applying changes ----------------------------------------------------------------------------------------

    async def apply(self, batch: ChangeBatch) -> None:
        """Append the changes of a batch to each shape. When it returns, they are durable."""
        pending: dict[Shape, list[Entry]] = {}
        for transaction in batch.transactions:
            for shape in self._shapes_of(transaction):
                entries = await self._entries(shape, transaction)
                if entries:
                    pending.setdefault(shape, []).extend(entries)
        await asyncio.gather(*(self._append(shape, entries, batch.end_lsn) for shape, entries in pending.items()))
        self.lsn = max(self.lsn, batch.end_lsn)

    def _shapes_of(self, transaction: Transaction) -> list[Shape]:
        """The shapes that a transaction may affect. A shape that is followed later must have it in its snapshot."""
        now = time.monotonic()
        self._applied += 1
        self._recent.append(_Applied(self._applied, now, transaction.xid, transaction.end_lsn))
        while len(self._recent) > _RECENT_MAX or now - self._recent[0].at > _RECENT_S:
            self._recent.popleft()
        tables = {change.relation.oid for change in transaction.changes}
        return [shape for oid in tables for shape in self._followed.get(oid, {}).values()]

    async def _entries(self, shape: Shape, transaction: Transaction) -> list[Entry]:
        handle, oid = shape.handle, shape.definition.table.oid
        while shape.seen is None:
            await shape.wait_for_seen()
            if handle not in self._followed.get(oid, {}):
                # The shape was dropped, or its snapshot will be taken again.
                return []
        if shape.seen.has(transaction.xid, transaction.end_lsn):
            return []
        try:
            if len(transaction.changes) > _LARGE_TRANSACTION:
                return await asyncio.to_thread(shape.writer.entries, transaction)
            return shape.writer.entries(transaction)
        except StaleRowError as reason:
            self.forget(shape.definition.table.name)
            self.drop(shape, str(reason))
            return []

    async def _append(self, shape: Shape, entries: list[Entry], end_lsn: int) -> None:
        if shape.is_dropped:
            return
        try:
            await shape.log.append(entries, end_lsn)
        except ShapeError as error:
            self.drop(shape, str(error))
            return
        if shape.log.changes_bytes > self.limits.log_bytes_max:
            self.drop(shape, f"its log is larger than {self.limits.log_bytes_max} bytes")

    # -- ending shapes -------------------------------------------------------------------------------------------

    def forget(self, table: TableName) -> None:
        """Forget the definitions on a table that may have changed, so that they are checked again."""
        for wanted in [one for one in self._definitions if one.name == table]:
            del self._definitions[wanted]

    def drop(self, shape: Shape, reason: str) -> None:
        """Drop a shape. Its readers get a new one."""
        if shape.is_dropped:
            return
        log.info("dropping shape %s of %s: %s", shape.handle, shape.definition.table.name.text, reason)
        shape.is_dropped = True
        self._by_handle.pop(shape.handle, None)
        if self._by_identity.get(shape.identity) is shape:
            del self._by_identity[shape.identity]
        self._unfollow(shape)
        shape.set_seen(None)
        shape.log.drop()
        self._spawn(self._clean_up(shape.handle, shape.log))

    async def _clean_up(self, handle: str, old: ShapeLog) -> None:
        """Delete everything of a shape; its row in the catalog last."""
        while True:
            try:
                await self._database.run(lambda connection: self._catalog.mark_dropped(connection, handle))
                await old.delete()
                await self._database.run(lambda connection: self._catalog.remove(connection, handle))
            except UnavailableError:
                await asyncio.sleep(_CLEAN_UP_RETRY_S)
            else:
                return

    def drop_all(self, reason: str) -> None:
        for shape in list(self._by_handle.values()):
            self.drop(shape, reason)

    # -- across restarts -----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Load the shapes of earlier runs, and delete those that are no longer valid."""
        for shape in list(self._by_handle.values()):
            # The state of this process may be older than the catalog.
            shape.is_dropped = True
            shape.log.drop()
            shape.set_seen(None)
        self._by_handle.clear()
        self._by_identity.clear()
        self._followed.clear()
        self._definitions.clear()
        stored = await self._database.run(self._catalog.load)
        for one in stored:
            definition = await self._if_unchanged(one)
            if definition is None:
                old = ShapeLog(self._streams, one.handle, tail_bytes=1, chunk_bytes=1)
                self._spawn(self._clean_up(one.handle, old))
                continue
            shape = self._new(one.handle, definition)
            shape.log.chunks = list(one.chunks)
            shape.log.complete_snapshot()
            await self._follow(shape)
            shape.set_seen(one.seen)
        log.info("loaded %d shapes of %d in the catalog", len(self._by_handle), len(stored))

    async def _if_unchanged(self, stored: StoredShape) -> Definition | None:
        """The current definition of a stored shape, or None if it has changed."""
        if stored.state != COMPLETE or stored.seen is None:
            return None
        try:
            definition = await self.define(stored.wanted)
        except InvalidShapeError:
            return None
        if definition.identity != stored.identity or definition.identity in self._by_identity:
            return None
        return definition

    async def maintain(self) -> None:
        """Drop idle shapes, and those of tables that were altered without a change of a row."""
        for shape in [one for one in self._by_handle.values() if one.idle_s > self.limits.idle_s]:
            self.drop(shape, "idle")
        for name in {one.definition.table.name for one in self._by_handle.values()}:
            try:
                now = await self._database.run(lambda connection, name=name: describe(connection, name))  # type: ignore[misc]  # mypy does not infer lambdas with defaults
            except InvalidShapeError:
                now = None
            for shape in [one for one in self._by_handle.values() if one.definition.table.name == name]:
                was = shape.definition.table
                if now is None or (now.oid, now.fingerprint()) != (was.oid, was.fingerprint()):
                    self.forget(name)
                    self.drop(shape, "the table was altered or dropped")

    # -- tasks ---------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _new_handle(definition: Definition) -> str:
    """A unique handle, so that caches cannot confuse two shapes."""
    return f"{int(definition.identity[:12], 16)}-{time.time_ns() // 1000}{secrets.randbelow(1000):03d}"
