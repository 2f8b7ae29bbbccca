"""The Spark source of Postgres changes: micro-batches whose offsets are positions in Postgres's WAL.

An offset is `{"lsn": …, "copied": {table: rows}}`: everything that was committed up to that position, and the number of
rows of each table's first copy, which precedes the changes of the table. Invariant: the slot is never ahead of what
Spark has recorded as done, so a batch can always be read again. A slot that is ahead was moved by another client, which
is an error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from headwater.pipeline.postgres_writer import waiting
from headwater.postgres import slots, snapshots
from headwater.postgres.catalog import TableName, primary_key, table_name, table_oid, user_types
from headwater.postgres.connections import Connection, PostgresSetupError
from headwater.postgres.formats import ChangeOrigin, Format, TableFormat, messages_of, snapshot_row
from headwater.postgres.lsn import lsn_from_text, lsn_to_text
from headwater.postgres.pgoutput import Decoder, Operation, Relation, RowChange, StreamedTransaction
from headwater.postgres.snapshots import TableCopy
from headwater.postgres.values import UserType

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
_BYTES_PER_ARROW_BATCH: Final = 8 << 20
_FOREIGN_WAL_BYTES: Final = 1 << 20
"""After this much WAL without changes of our tables, an empty batch advances the slot: each read decodes all of it."""
_FOREIGN_WAL_S: Final = 1.0
_CHECK_INTERVAL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class FollowedTable:
    """A table whose changes are read, and how they are published. The settings use the same names."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    table: str
    stream: str
    """The name of the stream; with `{key}` in it, one stream for each key."""
    format: Format = "rows"
    key: tuple[str, ...] = ()
    """The columns of the key; if empty, those of the primary key."""
    operations: tuple[Operation, ...] = ()
    """The operations that are published; if empty, all of them, or only inserts in the format `rows`."""
    snapshot: bool = True
    """Publish the existing rows of the table first."""
    full_rows: bool = False
    """Set REPLICA IDENTITY FULL, so that old rows are complete."""
    cdc: Literal["slot", "electric"] = "slot"
    """Where changes are read from: the replication slot, or the Shape API of Electric or `headwater shapes`."""
    electric_url: str = ""
    """With `cdc = "electric"`: the address, if it differs from the pipeline's (`ELECTRIC_URL`)."""

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

    copy: TableCopy
    first: int
    last: int
    begins: bool
    """The first piece of a table that was dropped and created again: its earlier rows are no longer valid."""


class ChangesTask(InputPartition):
    """A whole batch: a slot has one reader, and streams need the order of commits."""

    def __init__(
        self,
        start: int,
        end: int,
        pieces: tuple[_Piece, ...],
        inline: list[bytes] | None,
        made: dict[int, UserType],
        formats: dict[str, TableFormat],
        copies: dict[str, TableCopy],
    ) -> None:
        super().__init__(None)
        self.start = start
        self.end = end
        self.pieces = pieces
        self.inline = inline
        """The messages of the slot, if the driver had to read them anyway and they are small."""
        self.made = made
        self.formats = formats
        self.copies = copies

    def __repr__(self) -> str:
        return f"ChangesTask({lsn_to_text(self.start)}, {lsn_to_text(self.end)}, {len(self.pieces)} pieces)"

    def has_copied(self, relation: Relation, xid: int, end_lsn: int) -> bool:
        """Whether a change of this transaction is in the first copy, or of a table that was dropped before the copy."""
        copy = self.copies[relation.name]
        return copy.seen.has(xid, end_lsn) or (copy.generation > 0 and relation.oid != copy.oid)


class PostgresReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One per query, in a Python process beside the driver; tasks get a copy that only reads."""

    def __init__(self, url: str, plan: ReaderPlan) -> None:
        self._url = url
        self._settings = plan
        self._tables = {table_name(one.table): one for one in plan.tables}
        self._copies: dict[TableName, TableCopy] = {}
        self._first_offset: dict[str, Any] | None = None
        self._looked_to = 0
        self._moved_at = 0.0
        self._until: int | None = None
        self._found: tuple[int, int, list[bytes]] | None = None
        self._checked_at = float("-inf")
        self._missing: set[TableName] = set()
        self._catalog: tuple[dict[int, UserType], dict[str, TableFormat]] = {}, {}

    # -- the driver's side ---------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks more than once before its first batch is done.
        if self._first_offset is None:
            self._first_offset = self._run(self._begin)
        return self._first_offset

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._run(slots.flushed_lsn)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        deadline = time.monotonic() + self._settings.idle_wait_s
        begun = lsn_from_text(start["lsn"])

        def look(connection: Connection) -> dict[str, Any]:
            slot = slots.check(slots.state(connection, self._settings.slot), self._settings.slot, begun)
            if slot.confirmed_lsn < begun:
                # Spark asks for more only after everything before was committed.
                slots.advance(connection, self._settings.slot, begun)
            while True:
                self._check_tables(connection)
                end = self._plan(connection, start, begun)
                if end != start or self._until is not None or time.monotonic() > deadline:
                    return end
                time.sleep(_POLL_S)

        return self._run(look)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        begun, ended = lsn_from_text(start["lsn"]), lsn_from_text(end["lsn"])

        def plan(connection: Connection) -> list[InputPartition]:
            if not self._copies:
                self._load_copies(connection)
            pieces = tuple(self._pieces(connection, start, end))
            if begun == ended and not pieces:
                return []
            slots.check(slots.state(connection, self._settings.slot), self._settings.slot, begun)
            inline = None
            if self._found is not None and self._found[:2] == (begun, ended):
                inline = self._found[2]
            made, formats = self._catalog
            copies = {table.text: copy for table, copy in self._copies.items()}
            return [ChangesTask(begun, ended, pieces, inline, made, formats, copies)]

        return self._run(plan)

    def commit(self, end: dict[str, Any]) -> None:
        lsn = lsn_from_text(end["lsn"])

        def advance(connection: Connection) -> None:
            before = slots.state(connection, self._settings.slot)
            slots.advance(connection, self._settings.slot, lsn)
            if before is not None and lsn - before.restart_lsn > _FOREIGN_WAL_BYTES:
                slots.advance_restart_point(connection)
            for copy in self._copies.values():
                if end["copied"].get(copy.name, 0) >= copy.rows > 0:
                    snapshots.discard_rows(connection, copy)

        self._run(advance)

    def stop(self) -> None:
        waiting(self._url, self._settings.wait_max_s).close()

    def _run(self, work: Callable[[Connection], Result]) -> Result:
        return waiting(self._url, self._settings.wait_max_s).run(work)

    def _begin(self, connection: Connection) -> dict[str, Any]:
        """The offset of a new query, after creating its slot and the first copy of each table.

        Spark asks for it again if the first batch was planned and not committed; the offset must then be the same.
        As long as nothing was committed, that offset is also valid for a new query.
        """
        settings = self._settings
        snapshots.prepare(connection)
        for table, followed in self._tables.items():
            self._publish(connection, table, followed)
        existing = slots.state(connection, settings.slot)
        if existing is not None:
            if snapshots.recorded_start(connection, settings.slot) == existing.confirmed_lsn:
                return {"lsn": lsn_to_text(existing.confirmed_lsn), "copied": {}}
            log.warning("slot %s exists without a checkpoint: starting with a new first copy", settings.slot)
        snapshots.forget(connection, settings.slot)
        made = slots.create(connection, settings.slot)
        snapshots.record_start(connection, settings.slot, made.confirmed_lsn)
        return {"lsn": lsn_to_text(made.confirmed_lsn), "copied": {}}

    def _publish(self, connection: Connection, table: TableName, followed: FollowedTable) -> None:
        settings = self._settings
        slots.publish(connection, settings.publication, [table], full_rows=followed.full_rows, key=followed.key)

    def _check_tables(self, connection: Connection) -> None:
        """Publish and copy tables that are new or were recreated. Called at the start and every few seconds.

        A table is published first and then copied, so that nothing is missed.
        """
        now = time.monotonic()
        if now - self._checked_at < _CHECK_INTERVAL_S:
            return
        is_first = self._checked_at == float("-inf")
        if is_first:
            snapshots.prepare(connection)
        for table, followed in self._tables.items():
            oid = table_oid(connection, table)
            known = self._copies.get(table)
            if oid is None and (known or snapshots.load(connection, self._settings.slot, table)):
                if table not in self._missing:
                    log.warning("table %s no longer exists; it will be read again when it is created", table.text)
                self._missing.add(table)
            elif is_first or known is None or known.oid != oid:
                self._publish(connection, table, followed)
                self._missing.discard(table)
            self._copies[table] = snapshots.take(connection, self._settings.slot, table, with_rows=followed.snapshot)
        self._catalog = self._described(connection)
        for table in self._tables:
            how = self._catalog[1][table.text]
            if how.needs_key and not how.key and table not in self._missing:
                raise PostgresSetupError(
                    f"Table {table.text} has no primary key, and its changes are published by key. Name the columns"
                    ' that identify a row in the settings, such as key = ["email"], or use the format envelopes.'
                )
        self._checked_at = now

    def _load_copies(self, connection: Connection) -> None:
        """Load the recorded copies, so that a batch that was planned before a restart is the same."""
        snapshots.prepare(connection)
        for table in self._tables:
            copy = snapshots.load(connection, self._settings.slot, table)
            if copy is not None:
                self._copies[table] = copy
        self._catalog = self._described(connection)

    def _described(self, connection: Connection) -> tuple[dict[int, UserType], dict[str, TableFormat]]:
        formats = {
            table.text: TableFormat(
                one.stream,
                one.format,
                one.key or primary_key(connection, table) or self._copies[table].key,
                one.published,
            )
            for table, one in self._tables.items()
            if table in self._copies
        }
        return user_types(connection), formats

    def _plan(self, connection: Connection, start: dict[str, Any], begun: int) -> dict[str, Any]:
        copied = dict(start["copied"])
        left = self._settings.changes_per_batch_max
        for copy in self._copies.values():
            if copy.generation and copy.name not in copied:
                copied = {name: rows for name, rows in copied.items() if name.partition("#")[0] != copy.table.text}
                copied[copy.name] = 0
            rows_left = copy.rows - copied.get(copy.name, 0)
            if rows_left > 0 and left > 0:
                taken = min(rows_left, left)
                copied[copy.name] = copied.get(copy.name, 0) + taken
                left -= taken
        if copied != start["copied"]:
            return {"lsn": start["lsn"], "copied": copied}
        return {"lsn": lsn_to_text(self._end_of_changes(connection, begun)), "copied": copied}

    def _end_of_changes(self, connection: Connection, begun: int) -> int:
        settings = self._settings
        flushed = slots.flushed_lsn(connection)
        if self._until is not None:
            flushed = min(flushed, self._until)
        if flushed <= max(begun, self._looked_to):
            return begun
        said = slots.messages(connection, settings.slot, settings.publication, flushed, _INLINE_MESSAGES)
        if len(said) >= _INLINE_MESSAGES:
            self._found = None
            end, _ = slots.last_commit(
                connection, settings.slot, settings.publication, flushed, settings.changes_per_batch_max
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
        for copy in self._copies.values():
            last = end["copied"].get(copy.name)
            if last is None:
                continue
            first = start["copied"].get(copy.name, 0) + 1
            begins = copy.generation > 0 and copy.name not in start["copied"]
            if first <= last or begins:
                yield _Piece(copy, first, last, begins)

    # -- the tasks' side -----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangesTask)
        rows = MessageRows()
        for piece in partition.pieces:
            how = partition.formats[piece.copy.table.text]
            relation = snapshots.relation_of(piece.copy, how.key)
            if piece.begins:
                rows.add(messages_of(RowChange("truncate", relation), None, how))

            def copied(connection: Connection, piece: _Piece = piece) -> list[dict[str, Any]]:
                return list(snapshots.read(connection, piece.copy, piece.first, piece.last))

            for row in self._run(copied) if piece.first <= piece.last else ():
                rows.add(messages_of(snapshot_row(relation, row), None, how))
            yield from rows.full()
        if partition.end > partition.start:
            for transaction in self._transactions(partition):
                origin = ChangeOrigin(transaction.xid, transaction.end_lsn, transaction.committed_at)
                for change in transaction.changes:
                    how_changed = partition.formats.get(change.relation.name)
                    if how_changed is not None and not partition.has_copied(change.relation, origin.xid, origin.lsn):
                        rows.add(messages_of(change, origin, how_changed))
                        yield from rows.full()
        yield from rows.rest()

    def _transactions(self, task: ChangesTask) -> Iterator[StreamedTransaction]:
        messages: Iterable[bytes]
        if task.inline is not None:
            messages = task.inline
        else:
            # Any interruption of the read fails the task; Spark then reads the same batch again.
            connection = self._run(_checked)
            settings = self._settings
            messages = slots.stream_messages(connection, settings.slot, settings.publication, task.end)
        return Decoder(task.made).stream(messages, task.start, task.end)


def _checked(connection: Connection) -> Connection:
    connection.execute("SELECT 1")
    return connection


class MessageRows:
    """Convert messages to Arrow batches, numbered within the micro-batch."""

    def __init__(self) -> None:
        self._streams: list[str] = []
        self._values: list[bytes] = []
        self._bytes = 0
        self._first = 0

    def add(self, messages: Iterator[tuple[str, bytes]]) -> None:
        for stream, value in messages:
            self._streams.append(stream)
            self._values.append(value)
            self._bytes += len(value)

    def full(self) -> Iterator[pa.RecordBatch]:
        if len(self._values) >= _ROWS_PER_ARROW_BATCH or self._bytes >= _BYTES_PER_ARROW_BATCH:
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        count = len(self._values)
        if count:
            positions = pa.array(range(self._first, self._first + count), pa.int64())
            values = pa.array(self._values, pa.binary()).cast(pa.string())
            yield pa.RecordBatch.from_arrays([pa.array(self._streams), positions, values], schema=_SCHEMA)
            self._first += count
            self._streams, self._values, self._bytes = [], [], 0
