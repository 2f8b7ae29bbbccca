"""The first copy of a table: the rows that exist before its changes are followed, copied once within the database.

A copy is a separate table, created in one transaction with a record of the transactions that it saw. It can be read in
pieces, by any node, and again after any crash, always with the same result. Invariant: a transaction's changes of a
table are in its copy or in the change feed, never in both: those that the copy saw are dropped from the feed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from headwater.postgres.catalog import (
    TableColumn,
    TableName,
    columns,
    create_once,
    primary_key,
    table_oid,
    user_types,
)
from headwater.postgres.connections import Connection
from headwater.postgres.lsn import lsn_from_text, lsn_to_text
from headwater.postgres.pgoutput import Relation, RelationColumn, Row
from headwater.postgres.values import converter

SCHEMA: Final = "headwater"
_ROW_NUMBER: Final = "headwater_row"
_XIDS_PER_EPOCH: Final = 1 << 32
_TABLES: Final = """
CREATE SCHEMA IF NOT EXISTS headwater;
CREATE TABLE IF NOT EXISTS headwater.snapshots (
    slot text,
    relation text,
    copy text,
    rows bigint NOT NULL,
    snapshot text NOT NULL,
    lsn pg_lsn NOT NULL,
    columns jsonb NOT NULL,
    taken_at timestamptz NOT NULL DEFAULT now(),
    oid bigint,
    generation int NOT NULL DEFAULT 0,
    PRIMARY KEY (slot, relation)
);
ALTER TABLE headwater.snapshots
    ADD COLUMN IF NOT EXISTS oid bigint, ADD COLUMN IF NOT EXISTS generation int NOT NULL DEFAULT 0;
CREATE TABLE IF NOT EXISTS headwater.beginnings (slot text PRIMARY KEY, lsn pg_lsn NOT NULL)"""


@dataclass(frozen=True, slots=True)
class VisibleTransactions:
    """The transactions that a transaction saw."""

    xmin: int
    xmax: int
    running: frozenset[int]
    lsn: int
    """The end of the WAL shortly after: a transaction that commits later was not seen."""

    def has(self, xid: int, end_lsn: int) -> bool:
        """Whether the changes of this transaction were seen; `xid` as in the WAL, without its epoch."""
        if end_lsn > self.lsn:
            return False
        # Every transaction that commits at or before `lsn` ran within one epoch of ours.
        full = (self.xmax & ~(_XIDS_PER_EPOCH - 1)) | xid
        if full > self.xmax + (_XIDS_PER_EPOCH >> 1):
            full -= _XIDS_PER_EPOCH
        return full < self.xmin or (full < self.xmax and full not in self.running)


@dataclass(frozen=True, slots=True)
class TableCopy:
    """The rows of a table when its changes began to be followed."""

    table: TableName
    copy: TableName
    rows: int
    seen: VisibleTransactions
    columns: tuple[RelationColumn, ...]
    oid: int
    """The id of the copied table; a table of the same name that was created later has another."""
    key: tuple[str, ...] = ()
    """The primary key at the time of the copy, for changes that are read after the table was dropped."""
    generation: int = 0
    """How often the table was dropped and created again."""

    @property
    def name(self) -> str:
        """The name of the copy in Spark's offsets."""
        return f"{self.table.text}#{self.generation}" if self.generation else self.table.text


def prepare(connection: Connection) -> None:
    """Create the schema for copies and the tables that describe them."""
    create_once(connection, sql.SQL(_TABLES))


def record_start(connection: Connection, slot: str, lsn: int) -> None:
    """Record where a query starts: its first batch must start there again if it is planned again after a crash."""
    connection.execute(
        f"INSERT INTO {SCHEMA}.beginnings (slot, lsn) VALUES (%s, %s)"
        " ON CONFLICT (slot) DO UPDATE SET lsn = excluded.lsn",
        [slot, lsn_to_text(lsn)],
    )


def recorded_start(connection: Connection, slot: str) -> int | None:
    """Where the query of this slot started, if everything that its first batch needs still exists."""
    row = connection.execute(f"SELECT lsn::text FROM {SCHEMA}.beginnings WHERE slot = %s", [slot]).fetchone()
    if row is None:
        return None
    missing = connection.execute(
        f"SELECT 1 FROM {SCHEMA}.snapshots WHERE slot = %s AND rows > 0"
        f" AND to_regclass(format('%%I.%%I', '{SCHEMA}', copy)) IS NULL",
        [slot],
    ).fetchone()
    return lsn_from_text(row[0]) if missing is None else None


def take(connection: Connection, slot: str, table: TableName, *, with_rows: bool) -> TableCopy:
    """The copy for this slot, created if there is none. Without rows, only changes from now on are followed.

    A table that was dropped and created again is copied again.
    """
    oid = table_oid(connection, table)
    found = load(connection, slot, table)
    if found is not None and (oid is None or found.oid == oid):
        return found
    generation = 0 if found is None else found.generation + 1
    copy = TableName(SCHEMA, _copy_name(connection, slot, table))
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        seen = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
        assert seen is not None
        described = [column for column in columns(connection, table) if not column.generated]
        if found is not None:
            connection.execute(f"DELETE FROM {SCHEMA}.snapshots WHERE slot = %s AND relation = %s", [slot, table.text])
            discard_rows(connection, found)
        rows = _fill(connection, table, copy) if with_rows else 0
        connection.execute(
            f"INSERT INTO {SCHEMA}.snapshots (slot, relation, copy, rows, snapshot, lsn, columns, oid, generation)"
            " VALUES (%s, %s, %s, %s, %s, pg_current_wal_insert_lsn(), %s, %s, %s)",
            [
                *(slot, table.text, copy.table, rows, seen[0]),
                *(json.dumps(_described(described, primary_key(connection, table))), oid, generation),
            ],
        )
    taken = load(connection, slot, table)
    assert taken is not None
    return taken


def load(connection: Connection, slot: str, table: TableName) -> TableCopy | None:
    row = connection.execute(
        "SELECT copy, rows, snapshot, lsn::text, columns, oid, generation"
        f" FROM {SCHEMA}.snapshots WHERE slot = %s AND relation = %s",
        [slot, table.text],
    ).fetchone()
    if row is None:
        return None
    name, rows, snapshot, lsn, described, oid, generation = row
    if oid is None:  # Recorded by an earlier release.
        oid = table_oid(connection, table) or 0
        connection.execute(
            f"UPDATE {SCHEMA}.snapshots SET oid = %s WHERE slot = %s AND relation = %s", [oid, slot, table.text]
        )
    xmin, xmax, running = snapshot.split(":")
    seen = VisibleTransactions(
        int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))), lsn_from_text(lsn)
    )
    known = tuple(RelationColumn(one["name"], one["type_oid"], in_key=False) for one in described)
    keyed = sorted((one["key"], one["name"]) for one in described if one.get("key") is not None)
    key = tuple(column for _, column in keyed)
    return TableCopy(table, TableName(SCHEMA, name), rows, seen, known, oid, key, generation)


def read(connection: Connection, copy: TableCopy, first: int, last: int) -> Iterator[Row]:
    """The rows numbered first to last, inclusive, with values as in the change feed."""
    made = user_types(connection)
    converters = [converter(column.type_oid, made) for column in copy.columns]
    names = [column.name for column in copy.columns]
    query = sql.SQL("COPY (SELECT {} FROM {} WHERE {} BETWEEN {} AND {} ORDER BY {}) TO STDOUT").format(
        sql.SQL(", ").join(map(sql.Identifier, names)),
        copy.copy.quoted,
        sql.Identifier(_ROW_NUMBER),
        first,
        last,
        sql.Identifier(_ROW_NUMBER),
    )
    # Through COPY, because it writes values with the types' output functions, as the plugin does.
    with connection.cursor().copy(query) as out:
        for row in out.rows():
            yield {
                name: None if text is None else convert(text)
                for name, convert, text in zip(names, converters, row, strict=True)
            }


def relation_of(copy: TableCopy, key: tuple[str, ...]) -> Relation:
    """The copied table as the change feed describes it."""
    known = tuple(RelationColumn(column.name, column.type_oid, column.name in key) for column in copy.columns)
    return Relation(copy.oid, copy.table.schema, copy.table.table, "d", known, ())


def discard_rows(connection: Connection, copy: TableCopy) -> None:
    """Delete the rows after their delivery; keep the record of the transactions that the copy saw."""
    connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(copy.copy.quoted))


def forget(connection: Connection, slot: str) -> None:
    """Delete everything of this slot, rows included."""
    if connection.execute("SELECT to_regclass(%s)", [f"{SCHEMA}.snapshots"]).fetchone() == (None,):
        return
    with connection.transaction():
        if connection.execute("SELECT to_regclass(%s)", [f"{SCHEMA}.beginnings"]).fetchone() != (None,):
            connection.execute(f"DELETE FROM {SCHEMA}.beginnings WHERE slot = %s", [slot])
        for (name,) in connection.execute(
            f"DELETE FROM {SCHEMA}.snapshots WHERE slot = %s RETURNING copy", [slot]
        ).fetchall():
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(SCHEMA, name)))


def _fill(connection: Connection, table: TableName, copy: TableName) -> int:
    connection.execute(
        sql.SQL("CREATE TABLE {} AS SELECT row_number() OVER () AS {}, t.* FROM {} AS t").format(
            copy.quoted, sql.Identifier(_ROW_NUMBER), table.quoted
        )
    )
    connection.execute(sql.SQL("ALTER TABLE {} ADD PRIMARY KEY ({})").format(copy.quoted, sql.Identifier(_ROW_NUMBER)))
    row = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(copy.quoted)).fetchone()
    assert row is not None
    return int(row[0])


def _copy_name(connection: Connection, slot: str, table: TableName) -> str:
    """A name that is short enough for Postgres, however long the other names are."""
    row = connection.execute("SELECT md5(%s)", [f"{slot} {table.text}"]).fetchone()
    assert row is not None
    return f"copy_{row[0]}"


def _described(table: list[TableColumn], key: tuple[str, ...]) -> list[dict[str, object]]:
    return [
        {
            "name": column.name,
            "type_oid": column.type_oid,
            "key": key.index(column.name) if column.name in key else None,
        }
        for column in table
    ]
