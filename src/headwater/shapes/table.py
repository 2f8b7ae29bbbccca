"""The description of a table for shapes: its columns in Electric's format, its key, and its replication settings.

Invariant: only names from the catalog are used in SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from headwater.postgres import slots
from headwater.postgres.catalog import TableName, with_partitions
from headwater.postgres.connections import Connection, PostgresSetupError
from headwater.postgres.pgoutput import Relation
from headwater.shapes.errors import InvalidShapeError
from headwater.shapes.where import WhereColumn
from headwater.shapes.where.values import ENUM, KINDS

LOCK_TIMEOUT: Final = "5s"
_MODIFIER_OFFSET: Final = 4
"""Postgres adds this to the length or precision that it stores with a column."""
_INTERVAL_FIELDS: Final = {
    0x0004: "YEAR",
    0x0002: "MONTH",
    0x0008: "DAY",
    0x0400: "HOUR",
    0x0800: "MINUTE",
    0x1000: "SECOND",
    0x0006: "YEAR TO MONTH",
    0x0408: "DAY TO HOUR",
    0x0C08: "DAY TO MINUTE",
    0x1C08: "DAY TO SECOND",
    0x0C00: "HOUR TO MINUTE",
    0x1C00: "HOUR TO SECOND",
    0x1800: "MINUTE TO SECOND",
}

_TABLE: Final = """
SELECT c.oid, c.relkind::text, c.relreplident::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s
"""
_PARTITIONS: Final = """
SELECT c.oid, coalesce(pg_relation_filenode(c.oid), 0), c.relreplident::text
  FROM pg_partition_tree(%s::oid) part JOIN pg_class c ON c.oid = part.relid WHERE part.level > 0 ORDER BY c.oid
"""
_ANCESTORS: Final = """
SELECT n.nspname::text, c.relname::text
  FROM pg_partition_ancestors(%(oid)s::oid) part JOIN pg_class c ON c.oid = part.relid
  JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid <> %(oid)s
"""
_COLUMNS: Final = """
WITH RECURSIVE base AS (
  SELECT a.attnum, t.oid, t.typbasetype, a.atttypmod AS modifier, t.typndims
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
   WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
  SELECT base.attnum, t.oid, t.typbasetype, (SELECT typtypmod FROM pg_type d WHERE d.oid = base.oid), base.typndims
    FROM base JOIN pg_type t ON t.oid = base.typbasetype WHERE base.typbasetype <> 0
)
SELECT a.attname, a.atttypid, t.typname, t.typtype::text, format_type(t.oid, NULL), base.modifier,
       a.attnotnull, CASE WHEN t.typcategory = 'A' THEN greatest(a.attndims, base.typndims, 1) ELSE 0 END,
       element.typname,
       a.attgenerated <> CASE WHEN current_setting('server_version_num')::int >= 180000 AND a.attgenerated = 's'
                              THEN 's' ELSE '' END, coalesce(k.collisdeterministic, true),
       (SELECT position FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS p(attnum, position)
         WHERE p.attnum = a.attnum)
  FROM pg_attribute a
  JOIN base ON base.attnum = a.attnum AND base.typbasetype = 0
  JOIN pg_type t ON t.oid = base.oid
  LEFT JOIN pg_type element ON element.oid = t.typelem AND t.typcategory = 'A'
  LEFT JOIN pg_collation k ON k.oid = a.attcollation
  LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
 WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type_oid: int
    schema: dict[str, Any]
    """The entry of the `electric-schema` header."""
    where: WhereColumn
    key_position: int | None
    is_unpublished: bool
    """Generated, and not included in the changes that Postgres sends."""


@dataclass(frozen=True, slots=True)
class Table:
    name: TableName
    oid: int
    has_full_identity: bool
    columns: tuple[Column, ...]
    partitions: tuple[tuple[int, int], ...] = ()
    """If the table is partitioned: the ids of all partitions and of their data files."""
    ancestors: frozenset[TableName] = frozenset()
    """The tables that it is a partition of."""

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row: the primary key, or all columns sorted by name."""
        keyed = sorted((one.key_position, one.name) for one in self.columns if one.key_position is not None)
        return tuple(name for _, name in keyed) or tuple(sorted(one.name for one in self.columns))

    @property
    def has_primary_key(self) -> bool:
        return any(one.key_position is not None for one in self.columns)

    def fingerprint(self) -> list[list[Any]]:
        """Everything that must stay unchanged for a log of this table to remain valid."""
        columns: list[list[Any]] = [[one.name, one.type_oid, one.key_position] for one in self.columns]
        # Attaching, detaching or truncating a partition adds or removes rows, and Postgres sends no changes.
        return [*columns, list(self.partitions)] if self.partitions else columns

    def matches(self, relation: Relation) -> bool:
        """Whether the table in a change still has this definition."""
        known = [(one.name, one.type_oid) for one in self.columns if not one.is_unpublished]
        return [(one.name, one.type_oid) for one in relation.columns] == known


def describe(connection: Connection, name: TableName) -> Table:
    """Describe the table of this name. Raises `InvalidShapeError` if it does not exist or cannot have shapes."""
    found = connection.execute(_TABLE, [name.schema, name.table]).fetchone()
    if found is None:
        raise InvalidShapeError(
            "table",
            f'Table "{name.schema}"."{name.table}" does not exist. If the table name contains capitals or special'
            " characters you must quote it.",
        )
    oid, kind, identity = found
    if kind not in ("r", "p"):
        raise InvalidShapeError("table", f'"{name.schema}"."{name.table}" is not a table; only tables can have shapes')
    rows = connection.execute(_COLUMNS, {"oid": oid}).fetchall()
    partitions = connection.execute(_PARTITIONS, [oid]).fetchall() if kind == "p" else []
    ancestors = connection.execute(_ANCESTORS, {"oid": oid}).fetchall()
    return Table(
        name,
        oid,
        all(one == "f" for one in (identity, *(row[2] for row in partitions))),
        tuple(_column(*row) for row in rows),
        tuple((row[0], row[1]) for row in partitions),
        frozenset(TableName(*row) for row in ancestors),
    )


def _column(
    name: str,
    type_oid: int,
    type_name: str,
    type_type: str,
    type_sql: str,
    modifier: int,
    not_null: bool,
    dimensions: int,
    element: str | None,
    is_unpublished: bool,
    is_deterministic: bool,
    key_position: int | None,
) -> Column:
    shown = element if element is not None else type_name
    schema: dict[str, Any] = {"type": shown, **_modifiers(shown, modifier)}
    if dimensions:
        schema["dims"] = dimensions
    if not_null:
        schema["not_null"] = True
    if key_position is not None:
        schema["pk_index"] = key_position - 1
    kind = "" if dimensions else type_name if type_name in KINDS else ENUM if type_type == "e" else ""
    where = WhereColumn(name, kind, type_sql.replace("%", "%%"), is_deterministic)
    return Column(name, type_oid, schema, where, key_position, is_unpublished)


def _modifiers(type_name: str, modifier: int) -> dict[str, Any]:
    if modifier < 0:
        return {}
    size = modifier - _MODIFIER_OFFSET
    match type_name:
        case "varchar":
            return {"max_length": size}
        case "bpchar":
            return {"length": size}
        case "bit":
            return {"length": modifier}
        case "time" | "timetz" | "timestamp" | "timestamptz":
            return {"precision": modifier}
        case "numeric":
            scale = size & 0x7FF
            return {"precision": size >> 16 & 0xFFFF, "scale": scale - 2048 if scale >= 1024 else scale}
        case "interval":
            fields, precision = _INTERVAL_FIELDS.get(modifier >> 16 & 0x7FFF), modifier & 0xFFFF
            return ({"fields": fields} if fields else {}) | ({"precision": precision} if precision != 0xFFFF else {})
        case _:
            return {}


def prepare(connection: Connection, publication: str, table: Table, *, needs_old_rows: bool) -> None:
    """Publish the changes of a table, with whole old rows if they are needed and our role can configure that."""
    connection.execute(sql.SQL("SET lock_timeout = {}").format(LOCK_TIMEOUT))
    for ancestor in table.ancestors:
        if slots.is_published(connection, publication, ancestor):
            statement = sql.SQL("ALTER PUBLICATION {} DROP TABLE {};").format(
                sql.Identifier(publication), ancestor.quoted
            )
            raise InvalidShapeError(
                "table",
                f"Changes of {statement_name(table.name)} are published as those of {statement_name(ancestor)}, which"
                f" is not served. Run: {statement.as_string(connection)}",
            )
    try:
        slots.publish(connection, publication, [table.name], full_rows=False, generated=True)
    except PostgresSetupError as error:
        raise InvalidShapeError("table", str(error)) from None
    if table.has_full_identity:
        return
    for part in with_partitions(connection, table.name):
        try:
            slots.set_full_identity(connection, part)
        except psycopg.errors.InsufficientPrivilege:
            if needs_old_rows:
                quoted = part.quoted.as_string(connection)
                raise InvalidShapeError(
                    "table",
                    f"Database table {statement_name(part)} does not have its replica identity set to FULL. As its"
                    f" owner, run: ALTER TABLE {quoted} REPLICA IDENTITY FULL;",
                ) from None
        except PostgresSetupError as error:
            if needs_old_rows:
                raise InvalidShapeError("table", str(error)) from None


def statement_name(name: TableName) -> str:
    return f'"{name.schema}"."{name.table}"'


def chosen_columns(table: Table, names: Sequence[str] | None) -> tuple[str, ...]:
    """The columns of a shape, in the table's order."""
    known = {one.name: one for one in table.columns}
    if names is None:
        wanted = set(known)
    else:
        wanted = set(names)
        missing = sorted(wanted - known.keys())
        if missing:
            raise InvalidShapeError(
                "columns", f"The following columns are not found on the table: {', '.join(missing)}"
            )
        without_key = [name for name in table.key if name not in wanted]
        if without_key:
            raise InvalidShapeError(
                "columns",
                "The list of columns must include all primary key columns, missing: " + ", ".join(without_key),
            )
    generated = [name for name in wanted if known[name].is_unpublished]
    if generated:
        raise InvalidShapeError(
            "columns",
            f"Postgres does not publish these generated columns: {', '.join(sorted(generated))}. Choose the others with"
            " columns=…",
        )
    return tuple(one.name for one in table.columns if one.name in wanted)
