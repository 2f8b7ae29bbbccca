"""The source side of Postgres: micro-batches of changes, whose Spark offsets are places in Postgres's log.

An offset is `{"lsn": …, "copied": {table: rows}}`: everything that was committed up to there, and so many rows of each
table's first copy, which come before the changes of the table. Invariant: the slot never stands further than what Spark
has noted as done, so a batch can always be read again; one that does was moved by somebody else, which is an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from headwater.pipeline.postgres_writer import waiting
from headwater.postgres import slots, snapshots
from headwater.postgres.catalog import TableName, made_types, primary_key, table_name
from headwater.postgres.connecting import Connection
from headwater.postgres.formats import Format, Origin, TableFormat, snapshot_row, told
from headwater.postgres.lsn import lsn_from_text, lsn_to_text
from headwater.postgres.pgoutput import Decoder, Operation, Transaction
from headwater.postgres.snapshots import Copy, Seen
from headwater.postgres.values import MadeType

log = logging.getLogger("headwater.pipeline")

Result = TypeVar("Result")

_SCHEMA: Final = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("value", pa.string(), nullable=False),
    ]
)
_POLL_S: Final = 0.01
_INLINE_MESSAGES: Final = 2000
_INLINE_BYTES: Final = 1 << 20
_ROWS_PER_ARROW_BATCH: Final = 10_000
_FOREIGN_WAL_BYTES: Final = 1 << 20
"""Log without changes of ours after which an empty batch moves the slot: each read decodes all of it again."""
_FOREIGN_WAL_S: Final = 1.0
_CATALOG_FOR_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class FollowedTable:
    """A table whose changes are read, and how they are published. A section of the settings has these names."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    table: str
    stream: str
    """The name of the stream; with `{key}` in it, one stream for each key."""
    format: Format = "rows"
    key: tuple[str, ...] = ()
    """The columns of the key; if empty, those of the primary key."""
    operations: tuple[Operation, ...] = ()
    """The operations that are published; if empty, all of them, except for `rows`, where it is inserts alone."""
    snapshot: bool = True
    """Publish first what the table holds already."""
    full_rows: bool = False
    """Set REPLICA IDENTITY FULL: old rows are complete and no value is missing."""

    @property
    def published(self) -> frozenset[str]:
        everything: tuple[Operation, ...] = ("insert", "update", "delete", "truncate")
        return frozenset(self.operations or (("insert",) if self.format == "rows" else everything))


class ReaderPlan(msgspec.Struct, frozen=True):
    """Which tables are followed by which slot."""

    slot: str
    publication: str
    tables: tuple[FollowedTable, ...]
    changes_per_batch_max: int
    idle_wait_s: float
    wait_max_s: float


class _Piece(msgspec.Struct, frozen=True):
    """Rows of a first copy: numbers first to last."""

    copy: Copy
    first: int
    last: int


class ChangesTask(InputPartition):
    """All of a batch: a slot has one reader, and streams want the order of commits."""

    def __init__(
        self,
        start: int,
        end: int,
        pieces: tuple[_Piece, ...],
        said: list[bytes] | None,
        made: dict[int, MadeType],
        formats: dict[str, TableFormat],
        seen: dict[str, Seen],
    ) -> None:
        super().__init__(None)
        self.start = start
        self.end = end
        self.pieces = pieces
        self.said = said
        """The changes themselves, where the driver had to read them anyway and they are small."""
        self.made = made
        self.formats = formats
        self.seen = seen

    def __repr__(self) -> str:
        return f"ChangesTask({lsn_to_text(self.start)}, {lsn_to_text(self.end)}, {len(self.pieces)} pieces)"


class PostgresReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query, in a Python process beside the driver; tasks get a copy that only reads."""

    def __init__(self, url: str, following: ReaderPlan) -> None:
        self._url = url
        self._following = following
        self._tables = {table_name(one.table): one for one in following.tables}
        self._copies: dict[TableName, Copy] = {}
        self._begun: dict[str, Any] | None = None
        self._looked_to = 0
        self._moved_at = 0.0
        self._until: int | None = None
        self._found: tuple[int, int, list[bytes]] | None = None
        self._catalog: tuple[float, dict[int, MadeType], dict[str, TableFormat]] | None = None

    # -- the driver's side ---------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks more than once before its first batch is done.
        if self._begun is None:
            self._begun = self._run(self._begin)
        return self._begun

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._run(slots.flushed_lsn)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        deadline = time.monotonic() + self._following.idle_wait_s
        begun = lsn_from_text(start["lsn"])

        def look(connection: Connection) -> dict[str, Any]:
            slot = slots.check(slots.state(connection, self._following.slot), self._following.slot, begun)
            if slot.confirmed_lsn < begun:
                # Spark asks for more only when everything before was committed.
                slots.advance(connection, self._following.slot, begun)
            while True:
                end = self._plan(connection, start, begun)
                if end != start or self._until is not None or time.monotonic() > deadline:
                    return end
                time.sleep(_POLL_S)

        return self._run(look)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begun, ended = lsn_from_text(start["lsn"]), lsn_from_text(end["lsn"])

        def plan(connection: Connection) -> list[InputPartition]:
            pieces = tuple(self._pieces(connection, start, end))
            if begun == ended and not pieces:
                return []
            slots.check(slots.state(connection, self._following.slot), self._following.slot, begun)
            said = None
            if self._found is not None and self._found[:2] == (begun, ended):
                said = self._found[2]
            made, formats = self._described(connection)
            seen = {table.text: self._copy(connection, table).seen for table in self._tables}
            return [ChangesTask(begun, ended, pieces, said, made, formats, seen)]

        return self._run(plan)

    def commit(self, end: dict[str, Any]) -> None:
        lsn = lsn_from_text(end["lsn"])

        def advance(connection: Connection) -> None:
            before = slots.state(connection, self._following.slot)
            slots.advance(connection, self._following.slot, lsn)
            if before is not None and lsn - before.restart_lsn > _FOREIGN_WAL_BYTES:
                slots.let_restart_move(connection)
            for table, rows in end["copied"].items():
                copy = self._copies.get(table_name(table))
                if copy is not None and rows >= copy.rows > 0:
                    snapshots.discard_rows(connection, copy)

        self._run(advance)

    def stop(self) -> None:
        waiting(self._url, self._following.wait_max_s).close()

    def _run(self, work: Callable[[Connection], Result]) -> Result:
        return waiting(self._url, self._following.wait_max_s).run(work)

    def _begin(self, connection: Connection) -> dict[str, Any]:
        """A new query: a slot of its own, and a first copy of each table.

        Or one whose first batch was planned and not committed: Spark asks for its beginning again, and it must be the
        same. As long as nothing was committed, what was begun is also right for a query that knows nothing of it.
        """
        following = self._following
        snapshots.prepare(connection)
        for table, followed in self._tables.items():
            slots.publish(connection, following.publication, [table], full_rows=followed.full_rows)
        there = slots.state(connection, following.slot)
        if there is not None:
            if snapshots.beginning(connection, following.slot) == there.confirmed_lsn:
                return {"lsn": lsn_to_text(there.confirmed_lsn), "copied": {}}
            log.warning("slot %s is there without a checkpoint: beginning with a new snapshot", following.slot)
        snapshots.forget(connection, following.slot)
        made = slots.create(connection, following.slot)
        snapshots.note_beginning(connection, following.slot, made.confirmed_lsn)
        return {"lsn": lsn_to_text(made.confirmed_lsn), "copied": {}}

    def _copy(self, connection: Connection, table: TableName) -> Copy:
        if table not in self._copies:
            followed = self._tables[table]
            if snapshots.load(connection, self._following.slot, table) is None:
                # A table that joined later, or the first batch: published first, then copied, so nothing is missed.
                slots.publish(connection, self._following.publication, [table], full_rows=followed.full_rows)
            self._copies[table] = snapshots.take(connection, self._following.slot, table, with_rows=followed.snapshot)
        return self._copies[table]

    def _plan(self, connection: Connection, start: dict[str, Any], begun: int) -> dict[str, Any]:
        copied = dict(start["copied"])
        left = self._following.changes_per_batch_max
        for table in self._tables:
            copy = self._copy(connection, table)
            waiting_rows = copy.rows - copied.get(table.text, 0)
            if waiting_rows > 0 and left > 0:
                taken = min(waiting_rows, left)
                copied[table.text] = copied.get(table.text, 0) + taken
                left -= taken
        if copied != start["copied"]:
            return {"lsn": start["lsn"], "copied": copied}
        return {"lsn": lsn_to_text(self._end_of_changes(connection, begun)), "copied": copied}

    def _end_of_changes(self, connection: Connection, begun: int) -> int:
        following = self._following
        flushed = slots.flushed_lsn(connection)
        if self._until is not None:
            flushed = min(flushed, self._until)
        if flushed <= max(begun, self._looked_to):
            return begun
        said = slots.messages(connection, following.slot, following.publication, flushed, _INLINE_MESSAGES)
        if len(said) >= _INLINE_MESSAGES:
            self._found = None
            end, _ = slots.last_commit(
                connection, following.slot, following.publication, flushed, following.changes_per_batch_max
            )
            return max(begun, min(end, flushed))
        ends = [done.end_lsn for done in slots.transactions(connection, said, begun, flushed) if done.changes]
        if ends:
            small = sum(map(len, said)) <= _INLINE_BYTES
            self._found = (begun, ends[-1], said) if small else None
            return ends[-1]
        self._looked_to = flushed
        now = time.monotonic()
        if flushed - begun > _FOREIGN_WAL_BYTES and now - self._moved_at > _FOREIGN_WAL_S and self._until is None:
            self._moved_at = now
            return flushed
        return begun

    def _pieces(self, connection: Connection, start: dict[str, Any], end: dict[str, Any]) -> Iterator[_Piece]:
        for table, last in end["copied"].items():
            first = start["copied"].get(table, 0) + 1
            if first <= last and table_name(table) in self._tables:
                yield _Piece(self._copy(connection, table_name(table)), first, last)

    def _described(self, connection: Connection) -> tuple[dict[int, MadeType], dict[str, TableFormat]]:
        now = time.monotonic()
        if self._catalog is None or now - self._catalog[0] > _CATALOG_FOR_S:
            formats = {
                table.text: TableFormat(
                    one.stream,
                    one.format,
                    one.key or primary_key(connection, table),
                    one.published,
                )
                for table, one in self._tables.items()
            }
            self._catalog = now, made_types(connection), formats
        return self._catalog[1:]

    # -- the tasks' side -----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangesTask)
        rows = _Rows()
        for piece in partition.pieces:
            how = partition.formats[piece.copy.table.text]
            relation = snapshots.relation_of(piece.copy, how.key)

            def copied(connection: Connection, piece: _Piece = piece) -> list[dict[str, Any]]:
                return list(snapshots.read(connection, piece.copy, piece.first, piece.last))

            for row in self._run(copied):
                rows.add(told(snapshot_row(relation, row), None, how))
            yield from rows.full()
        if partition.end > partition.start:
            for transaction in self._transactions(partition):
                rows.take(transaction, partition)
                yield from rows.full()
        yield from rows.rest()

    def _transactions(self, task: ChangesTask) -> Iterator[Transaction]:
        said = task.said
        if said is None:
            following = self._following
            said = self._run(
                lambda connection: slots.messages(connection, following.slot, following.publication, task.end)
            )
        decoder = Decoder(task.made)
        for message in said:
            done = decoder.feed(message)
            if done is not None and task.start < done.end_lsn <= task.end:
                yield done


class _Rows:
    """Messages on their way to Arrow, numbered through the batch."""

    def __init__(self) -> None:
        self._streams: list[str] = []
        self._values: list[bytes] = []
        self._first = 0

    def take(self, transaction: Transaction, task: ChangesTask) -> None:
        origin = Origin(transaction.xid, transaction.end_lsn, transaction.committed_at)
        for change in transaction.changes:
            name = change.relation.name
            how = task.formats.get(name)
            if how is not None and not task.seen[name].has(transaction.xid, transaction.end_lsn):
                self.add(told(change, origin, how))

    def add(self, messages: Iterator[tuple[str, bytes]]) -> None:
        for stream, value in messages:
            self._streams.append(stream)
            self._values.append(value)

    def full(self) -> Iterator[pa.RecordBatch]:
        if len(self._values) >= _ROWS_PER_ARROW_BATCH:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        count = len(self._values)
        if count:
            positions = pa.array(range(self._first, self._first + count), pa.int64())
            values = pa.array(self._values, pa.binary()).cast(pa.string())
            yield pa.RecordBatch.from_arrays([pa.array(self._streams), positions, values], schema=_SCHEMA)
            self._first += count
            self._streams, self._values = [], []
