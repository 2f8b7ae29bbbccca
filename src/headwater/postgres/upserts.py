"""Tables that hold the current rows of change streams: the statements that upsert and delete rows by key.

Invariant: rows and the position of their stream change in one transaction, under a lock on the position, so applying a
change again has no effect, and an older change never replaces a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import psycopg
from psycopg import sql

from headwater.postgres.catalog import TableName, columns, create_once, exists
from headwater.postgres.connections import Connection, PostgresSetupError
from headwater.postgres.tables import (
    COLUMN_TYPES,
    JOB_TABLES,
    STAGED_FIRST,
    STAGED_LAST,
    STREAM,
    EventMapping,
    unique_indexes,
    value_of,
)

_POSITIONS: Final = """
CREATE TABLE IF NOT EXISTS headwater.positions (
    job TEXT NOT NULL,
    stream_name TEXT NOT NULL,
    ds_incarnation TEXT NOT NULL,
    position BIGINT NOT NULL,
    PRIMARY KEY (job, stream_name)
)"""
_LOCK: Final = (
    "INSERT INTO headwater.positions SELECT %s, name, '', 0 FROM unnest(%s::text[]) AS name ON CONFLICT DO NOTHING"
)
_LOCKED: Final = (
    "SELECT stream_name, ds_incarnation, position FROM headwater.positions WHERE job = %s AND stream_name = ANY(%s)"
    " ORDER BY stream_name FOR UPDATE"
)
_MOVE: Final = "UPDATE headwater.positions SET ds_incarnation = %s, position = %s WHERE job = %s AND stream_name = %s"
_VALUE: Final = "value."
_DELETES: Final = "('delete', 'remove')"


@dataclass(frozen=True, slots=True)
class UpsertMapping:
    """A table, the source of each of its columns, and the columns that identify a row."""

    table: TableName
    columns: Mapping[str, str]
    """As in `EventMapping`; `key` and `type` are those of the message, `value.…` the fields of its value."""
    types: Mapping[str, str]
    key: tuple[str, ...]


class UpsertStatements(msgspec.Struct, frozen=True, tag=True):
    """The statements that apply changes to one table; staged rows are selected as in `tables.insertion`."""

    upsert: str
    """Apply a range of changes; the last change of each key wins."""
    patch: str
    """Apply one change that omits columns, which keep their values."""
    reset: str
    """Delete all rows of the stream of one staged row."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    incarnation: str
    position: int


def prepare(connection: Connection, mapping: UpsertMapping) -> UpsertStatements:
    """Create the table and its key if they are missing, and compose the statements."""
    create_once(connection, sql.SQL(JOB_TABLES))
    create_once(connection, sql.SQL(_POSITIONS))
    if not exists(connection, mapping.table):
        create_once(connection, _creation(mapping))
    types = {column.name: column.type_name for column in columns(connection, mapping.table)}
    for name in mapping.columns:
        if name not in types:
            raise PostgresSetupError(
                f"Table {mapping.table.text} has no column {name}; it has {', '.join(sorted(types))}."
            )
    if not unique_indexes(connection, mapping.table, mapping.key):
        key = sql.SQL(", ").join(map(sql.Identifier, mapping.key))
        index = sql.Identifier(f"{mapping.table.table[:40]}_upsert_key")
        statement = sql.SQL("CREATE UNIQUE INDEX IF NOT EXISTS {} ON {} ({})").format(index, mapping.table.quoted, key)
        try:
            create_once(connection, statement)
        except (psycopg.errors.UniqueViolation, psycopg.errors.InsufficientPrivilege) as error:
            raise PostgresSetupError(
                f"Table {mapping.table.text} needs a unique index over {', '.join(mapping.key)}, which cannot be"
                f" created ({error.diag.message_primary}). Create it with: {statement.as_string(connection)};"
            ) from None
    return UpsertStatements(
        _upsert(mapping, types).as_string(connection),
        _patch(mapping, types).as_string(connection),
        _reset(mapping).as_string(connection),
    )


def lock_positions(connection: Connection, job: str, streams: Iterable[str]) -> dict[str, StreamPosition]:
    """The position of each stream, locked until the transaction ends. Locked in order to avoid deadlocks of jobs."""
    names = sorted(streams)
    connection.execute(_LOCK, [job, names])
    rows = connection.execute(_LOCKED, [job, names]).fetchall()
    return {stream: StreamPosition(incarnation, position) for stream, incarnation, position in rows}


def move_position(connection: Connection, job: str, stream: str, to: StreamPosition) -> None:
    connection.execute(_MOVE, [to.incarnation, to.position, job, stream])


def _creation(mapping: UpsertMapping) -> sql.Composed:
    described = [
        sql.SQL("{} {}").format(
            sql.Identifier(name), sql.SQL(mapping.types.get(name) or COLUMN_TYPES.get(source, "text"))
        )
        for name, source in mapping.columns.items()
    ]
    key = sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, mapping.key)))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(
        mapping.table.quoted, sql.SQL(", ").join([*described, key])
    )


def _changes(mapping: UpsertMapping, types: Mapping[str, str]) -> sql.Composable:
    """The last change of each key in a range of staged rows, with the key in separate columns."""
    keys = [_key_value(mapping, name, types[name]) for name in mapping.key]
    aliases = [sql.Identifier(f"key_{number}") for number in range(len(keys))]
    selected = sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(value, alias) for value, alias in zip(keys, aliases, strict=True)
    )
    return sql.SQL(
        "WITH event AS MATERIALIZED (SELECT n, stream, ds_offset, incarnation, position, payload::jsonb AS payload"
        " FROM pg_temp.headwater_staged WHERE n BETWEEN " + STAGED_FIRST + " AND " + STAGED_LAST + "),"
        " keyed AS MATERIALIZED (SELECT *, coalesce(payload #>> '{{headers,operation}}', payload ->> 'operation')"
        " AS operation, {selected} FROM event),"
        " change AS MATERIALIZED (SELECT DISTINCT ON ({keys}) * FROM keyed ORDER BY {keys}, n DESC)"
    ).format(selected=selected, keys=sql.SQL(", ").join(aliases))


def _same_key(mapping: UpsertMapping) -> sql.Composable:
    return sql.SQL(" AND ").join(
        sql.SQL("target.{} = change.{}").format(sql.Identifier(name), sql.Identifier(f"key_{number}"))
        for number, name in enumerate(mapping.key)
    )


def _upsert(mapping: UpsertMapping, types: Mapping[str, str]) -> sql.Composed:
    names = list(mapping.columns)
    others = [sql.Identifier(name) for name in names if name not in mapping.key]
    assignments = [sql.SQL("{0} = excluded.{0}").format(name) for name in others]
    action = sql.SQL("DO UPDATE SET {}").format(sql.SQL(", ").join(assignments)) if others else sql.SQL("DO NOTHING")
    values = [
        sql.Identifier(f"key_{mapping.key.index(name)}") if name in mapping.key else _value(mapping, name, types[name])
        for name in names
    ]
    return sql.SQL(
        "{changes}, deleted AS (DELETE FROM {table} AS target USING change WHERE change.operation IN " + _DELETES + ""
        " AND {same}) INSERT INTO {table} ({names}) SELECT {values} FROM change WHERE operation NOT IN " + _DELETES + ""
        " ORDER BY n ON CONFLICT ({key}) {action}"
    ).format(
        changes=_changes(mapping, types),
        table=mapping.table.quoted,
        same=_same_key(mapping),
        names=sql.SQL(", ").join(map(sql.Identifier, names)),
        values=sql.SQL(", ").join(values),
        key=sql.SQL(", ").join(map(sql.Identifier, mapping.key)),
        action=action,
    )


def _patch(mapping: UpsertMapping, types: Mapping[str, str]) -> sql.Composed:
    assignments = []
    for name, source in mapping.columns.items():
        if name in mapping.key:
            continue
        value = _value(mapping, name, types[name])
        if source.startswith(_VALUE):
            value = sql.SQL("CASE WHEN payload #> '{{headers,unchanged}}' ? {} THEN target.{} ELSE {} END").format(
                sql.Literal(source.removeprefix(_VALUE)), sql.Identifier(name), value
            )
        assignments.append(sql.SQL("{} = {}").format(sql.Identifier(name), value))
    return sql.SQL("{changes} UPDATE {table} AS target SET {assignments} FROM change WHERE {same}").format(
        changes=_changes(mapping, types),
        table=mapping.table.quoted,
        assignments=sql.SQL(", ").join(assignments),
        same=_same_key(mapping),
    )


def _reset(mapping: UpsertMapping) -> sql.Composed:
    by_stream = [name for name, source in mapping.columns.items() if source == STREAM]
    if not by_stream:
        return sql.SQL("DELETE FROM {}").format(mapping.table.quoted)
    return sql.SQL(
        "DELETE FROM {} AS target USING pg_temp.headwater_staged AS event WHERE event.n = " + STAGED_FIRST + ""
        " AND target.{} = event.stream"
    ).format(mapping.table.quoted, sql.Identifier(by_stream[0]))


def _value(mapping: UpsertMapping, name: str, type_name: str) -> sql.Composable:
    return value_of(EventMapping(mapping.table, mapping.columns, mapping.types), name, type_name)


def _key_value(mapping: UpsertMapping, name: str, type_name: str) -> sql.Composable:
    """A column of the key. A delete has no value, but often an old value, or the message's key for a single column."""
    source = mapping.columns[name]
    if not source.startswith(_VALUE):
        return _value(mapping, name, type_name)
    path = source.split(".")
    found: list[sql.Composable] = [
        sql.SQL("payload #>> {}::text[]").format(sql.Literal(path)),
        sql.SQL("payload #>> {}::text[]").format(sql.Literal(["old_value", *path[1:]])),
    ]
    if len(mapping.key) == 1:
        found.append(sql.SQL("payload ->> 'key'"))
    return sql.SQL("coalesce({})::{}").format(sql.SQL(", ").join(found), sql.SQL(type_name))
