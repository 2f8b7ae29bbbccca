"""Tables that take the events of streams: which column is filled from what, and the statement that does it.

Invariant: every such table has a unique key of the stream's name and the event's offset, so that an event that is
brought again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from headwater.postgres.catalog import TableName, columns, exists
from headwater.postgres.connecting import Connection, SetUpWrong

STREAM: Final = "@stream"
OFFSET: Final = "@offset"
POSITION: Final = "@position"
PAYLOAD: Final = "@payload"
_WHOLE: Final = {STREAM: "text", OFFSET: "text", POSITION: "bigint", PAYLOAD: "jsonb"}

SESSION_EVENTS: Final[Mapping[str, str]] = {
    "stream_name": STREAM,
    "event_key": "key",
    "event_type": "type",
    "operation": "operation",
    "payload": PAYLOAD,
    "ds_offset": OFFSET,
}
"""The columns of the reference's `session_events`, and what fills them."""

_ITEMS: Final = """
CREATE TABLE IF NOT EXISTS {} (
    id SERIAL PRIMARY KEY,
    title TEXT NOT NULL,
    body TEXT,
    created_at TIMESTAMPTZ DEFAULT NOW()
)"""

_BOOKS: Final = """
CREATE SCHEMA IF NOT EXISTS headwater;
CREATE TABLE IF NOT EXISTS headwater.dead_letters (
    id BIGSERIAL PRIMARY KEY,
    job TEXT NOT NULL,
    stream_name TEXT NOT NULL,
    ds_offset TEXT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    content_type TEXT NOT NULL,
    value BYTEA NOT NULL,
    received_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    UNIQUE (job, stream_name, ds_offset)
);
CREATE TABLE IF NOT EXISTS headwater.batches (
    job TEXT NOT NULL,
    query TEXT NOT NULL,
    partition INTEGER NOT NULL,
    batch BIGINT NOT NULL,
    events BIGINT NOT NULL,
    dead BIGINT NOT NULL,
    done_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    PRIMARY KEY (job, query, partition)
)"""

STAGED_FIRST: Final = "/*first*/0"
STAGED_LAST: Final = "/*last*/0"


@dataclass(frozen=True, slots=True)
class Mapped:
    """A table, and for each of its columns what fills it: `@stream`, `@offset`, `@position`, `@payload`, or the path of
    a field of the event, such as `value.status`."""

    table: TableName
    columns: Mapping[str, str]
    types: Mapping[str, str]
    """Types of columns, for a table that is yet to be made; else text, or what suits the whole values."""

    @property
    def key(self) -> tuple[str, str]:
        """The columns of the stream and of the offset."""
        by_source = {source: name for name, source in self.columns.items()}
        try:
            return by_source[STREAM], by_source[OFFSET]
        except KeyError as missing:
            raise SetUpWrong(
                f"The mapping of table {self.table.text} has no column for {missing}: events are known by their stream"
                " and offset, so both must be written."
            ) from None


def prepare(connection: Connection, mapped: Mapped) -> None:
    """Make what is missing: the table, its key, the dead letters and the book of batches."""
    _once(connection, sql.SQL(_BOOKS))
    if not exists(connection, mapped.table):
        _once(connection, _creation(mapped))
    there = {column.name for column in columns(connection, mapped.table)}
    for name in mapped.columns:
        if name not in there:
            raise SetUpWrong(f"Table {mapped.table.text} has no column {name}; it has {', '.join(sorted(there))}.")
    if not _has_key(connection, mapped):
        index = sql.Identifier(f"{mapped.table.table[:40]}_stream_offset_key")
        key = sql.SQL(", ").join(map(sql.Identifier, mapped.key))
        statement = sql.SQL("CREATE UNIQUE INDEX IF NOT EXISTS {} ON {} ({})")
        try:
            _once(connection, statement.format(index, mapped.table.quoted, key))
        except psycopg.errors.UniqueViolation as error:
            raise SetUpWrong(
                f"Table {mapped.table.text} holds some events twice, so it cannot get its key:"
                f" {error.diag.message_detail} Keep one row of each event with: {_deletion(connection, mapped)}"
            ) from None


def prepare_items(connection: Connection, table: TableName) -> None:
    """The reference's source table, if it is missing."""
    _once(connection, sql.SQL(_ITEMS).format(table.quoted))


def insertion(connection: Connection, mapped: Mapped) -> str:
    """The statement that moves staged rows, numbered from STAGED_FIRST to STAGED_LAST, into the table, in order."""
    types = {column.name: column.type_name for column in columns(connection, mapped.table)}
    names = list(mapped.columns)
    values = sql.SQL(", ").join(_value(mapped.columns[name], types[name]) for name in names)
    # OFFSET 0 keeps the inner query by itself, so that each payload is parsed once and not for each column.
    statement = sql.SQL(
        "INSERT INTO {table} ({names}) SELECT {values} FROM (SELECT n, stream, ds_offset, position,"
        " payload::jsonb AS payload FROM pg_temp.headwater_staged WHERE n BETWEEN " + STAGED_FIRST + " AND "
        "" + STAGED_LAST + " ORDER BY n OFFSET 0) AS staged ORDER BY n ON CONFLICT ({key}) DO NOTHING"
    )
    return statement.format(
        table=mapped.table.quoted,
        names=sql.SQL(", ").join(map(sql.Identifier, names)),
        values=values,
        key=sql.SQL(", ").join(map(sql.Identifier, mapped.key)),
    ).as_string(connection)


def _value(source: str, type_name: str) -> sql.Composable:
    cast = sql.SQL(type_name)
    match source:
        case "@stream":
            return sql.SQL("stream::{}").format(cast)
        case "@offset":
            return sql.SQL("ds_offset::{}").format(cast)
        case "@position":
            return sql.SQL("position::{}").format(cast)
        case "@payload":
            return sql.SQL("payload::{}").format(cast)
        case _:
            path = sql.Literal(source.split("."))
            arrow = sql.SQL("#>" if type_name in {"json", "jsonb"} else "#>>")
            return sql.SQL("(payload {} {}::text[])::{}").format(arrow, path, cast)


def _creation(mapped: Mapped) -> sql.Composed:
    lines = [sql.SQL("id SERIAL PRIMARY KEY")] if "id" not in mapped.columns else []
    required = {STREAM, PAYLOAD}  # As the reference has it: an application may insert rows without an offset.
    described: list[sql.Composable] = list(lines)
    for name, source in mapped.columns.items():
        type_name = mapped.types.get(name) or _WHOLE.get(source, "text")
        suffix = " NOT NULL" if source in required else ""
        described.append(sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_name + suffix)))
    if "received_at" not in mapped.columns:
        described.append(sql.SQL("received_at TIMESTAMPTZ DEFAULT NOW()"))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(mapped.table.quoted, sql.SQL(", ").join(described))


def _deletion(connection: Connection, mapped: Mapped) -> str:
    """The statement that deletes all but the first row of each event."""
    same = sql.SQL(" AND ").join(sql.SQL("a.{0} = b.{0}").format(sql.Identifier(name)) for name in mapped.key)
    statement = sql.SQL("DELETE FROM {0} a USING {0} b WHERE {1} AND a.ctid > b.ctid;")
    return statement.format(mapped.table.quoted, same).as_string(connection)


def _has_key(connection: Connection, mapped: Mapped) -> bool:
    """Whether some unique index is over just the two key columns."""
    row = connection.execute(
        "SELECT EXISTS (SELECT 1 FROM pg_index i WHERE indrelid = to_regclass(%s) AND indisunique AND indpred IS NULL"
        " AND indexprs IS NULL AND indnkeyatts = 2 AND (SELECT array_agg(attname::text ORDER BY attname)"
        " FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY (indkey::int2[])) = %s)",
        [f'"{mapped.table.schema}"."{mapped.table.table}"', sorted(mapped.key)],
    ).fetchone()
    return bool(row and row[0])


def _once(connection: Connection, statement: sql.SQL | sql.Composed) -> None:
    """Two makers at the same moment may trip over each other although both say IF NOT EXISTS; then it is there."""
    try:
        with connection.transaction():
            connection.execute(statement)
    except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateSchema, psycopg.errors.DuplicateObject):
        pass
    except psycopg.errors.UniqueViolation as error:
        if error.diag.schema_name != "pg_catalog":
            raise
