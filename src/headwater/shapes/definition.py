"""The definition of a shape: a table, a condition, columns, and how its changes are written.

A request has a `ShapeDescription`. Checked against the database's catalog, it becomes a `Definition`, whose identity is
the same for all equivalent requests. Invariant: shapes with equal identities have equal logs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import psycopg
from psycopg import sql

from headwater.postgres.catalog import TableName
from headwater.postgres.connections import Connection, is_row_error
from headwater.shapes.errors import InvalidShapeError
from headwater.shapes.table import Table, chosen_columns, describe
from headwater.shapes.where import (
    Condition,
    Predicate,
    Rendered,
    UnsupportedError,
    compile_condition,
    parse_condition,
    render_condition,
    resolve_condition,
)

Replica = Literal["default", "full"]
LogMode = Literal["full", "changes_only"]


class ShapeDescription(msgspec.Struct, frozen=True):
    """A shape as a request describes it. The catalog stores it across restarts."""

    schema: str
    table: str
    where: str | None = None
    params: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] | None = None
    replica: Replica = "default"
    log: LogMode = "full"

    @property
    def name(self) -> TableName:
        return TableName(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class Filter:
    """A condition, as SQL and as a predicate."""

    rendered: Rendered
    predicate: Predicate
    identity: str


@dataclass(frozen=True, slots=True)
class Definition:
    wanted: ShapeDescription
    table: Table
    columns: tuple[str, ...]
    filter: Filter | None

    identity: str = field(init=False)
    """Equal for equivalent shapes, even if their requests differ."""

    def __post_init__(self) -> None:
        parts = (
            self.table.name.schema,
            self.table.name.table,
            self.table.oid,
            self.table.fingerprint(),
            self.columns,
            self.filter.identity if self.filter is not None else None,
            self.wanted.replica,
            self.wanted.log,
        )
        object.__setattr__(self, "identity", hashlib.sha256(msgspec.json.encode(parts)).hexdigest())

    @property
    def needs_old_rows(self) -> bool:
        return self.filter is not None or self.wanted.replica == "full" or not self.table.has_primary_key

    @property
    def schema_header(self) -> str:
        chosen = set(self.columns)
        return msgspec.json.encode({one.name: one.schema for one in self.table.columns if one.name in chosen}).decode()


def define(connection: Connection, wanted: ShapeDescription) -> Definition:
    """Check a shape against the database. Raises `InvalidShapeError` with the reason if it is invalid."""
    table = describe(connection, wanted.name)
    columns = chosen_columns(table, wanted.columns)
    condition = None
    if wanted.where:
        condition = filter_of(connection, table, wanted.where, dict(wanted.params), "where")
    return Definition(wanted, table, columns, condition)


def filter_of(connection: Connection, table: Table, text: str, params: Mapping[str, str], parameter: str) -> Filter:
    """Parse and resolve a condition on a table."""
    known = {one.name: one.where for one in table.columns if not one.is_unpublished}
    try:
        condition = resolve_condition(parse_condition(text, table.name.table), known, params)
        values = _spelled(connection, condition)
    except UnsupportedError as error:
        raise InvalidShapeError(parameter, str(error)) from None
    rendered = render_condition(condition)
    identity = msgspec.json.encode((rendered.sql, values)).decode()
    return Filter(rendered, compile_condition(condition, values), identity)


def _spelled(connection: Connection, condition: Condition) -> list[str | None]:
    """The constants in Postgres's own notation: it parses each once, with the type that it is compared as."""
    if not condition.values:
        return []
    casts = sql.SQL(", ").join(sql.SQL("%s::" + value.type_sql) for value in condition.values)
    query = sql.SQL("SELECT ") + casts
    try:
        cursor = connection.execute(query, [value.text for value in condition.values])
    except psycopg.Error as error:
        if is_row_error(error):
            raise UnsupportedError(error.diag.message_primary or "a constant does not fit its type") from None
        raise
    result = cursor.pgresult
    assert result is not None
    found = (result.get_value(0, number) for number in range(len(condition.values)))
    return [None if value is None else value.decode() for value in found]
