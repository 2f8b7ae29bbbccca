"""The catalog of a database: tables, columns, keys and user-defined types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from headwater.postgres.connections import Connection, PostgresSetupError
from headwater.postgres.values import UserType

_CREATION_ATTEMPTS: Final = 10
"""At least as many as objects are created together: each may be in conflict with another session once."""


@dataclass(frozen=True, slots=True)
class TableName:
    schema: str
    table: str

    @property
    def text(self) -> str:
        return f"{self.schema}.{self.table}"

    @property
    def quoted(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class TableColumn:
    name: str
    type_oid: int
    type_name: str
    """Without modifiers: a cast to varchar(5) silently truncates values that an assignment would reject."""
    generated: bool
    """Computed by Postgres from other columns, and not in the change feed (see `slots.publish`)."""


def table_name(text: str) -> TableName:
    """Parse `items` or `shop.items`; the default schema is `public`."""
    schema, dot, table = text.partition(".")
    return TableName(schema, table) if dot else TableName("public", schema)


def user_types(connection: Connection) -> dict[int, UserType]:
    """The user-defined domains and arrays of this database."""
    rows = connection.execute(
        "SELECT oid, typbasetype, CASE WHEN typcategory = 'A' THEN typelem ELSE 0 END, typdelim FROM pg_type"
        " WHERE oid >= 16384 AND (typtype = 'd' OR (typcategory = 'A' AND typelem <> 0))"
    ).fetchall()
    delimiters: dict[int, str] = dict(
        connection.execute("SELECT oid, typdelim FROM pg_type WHERE typdelim <> ','").fetchall()
    )
    return {oid: UserType(base, element, delimiters.get(element, ",")) for oid, base, element, _ in rows}


def exists(connection: Connection, table: TableName) -> bool:
    found = connection.execute("SELECT to_regclass(%s) IS NOT NULL", [regclass(table)]).fetchone()
    return bool(found and found[0])


def table_oid(connection: Connection, table: TableName) -> int | None:
    """The id of the table, which changes when it is dropped and created again; None if it does not exist."""
    found = connection.execute("SELECT to_regclass(%s)::oid::bigint", [regclass(table)]).fetchone()
    return None if found is None else found[0]


def identity_columns(connection: Connection, table: TableName) -> tuple[str, frozenset[str]]:
    """The replica identity: its kind (`d`efault, `i`ndex, `f`ull, `n`othing) and the columns of its index."""
    row = connection.execute(
        "SELECT relreplident::text, array(SELECT attname::text FROM pg_index JOIN pg_attribute ON attrelid = indrelid"
        " AND attnum = ANY (indkey::int2[]) WHERE indrelid = pg_class.oid AND (relreplident = 'd' AND indisprimary OR"
        " relreplident = 'i' AND indisreplident)) FROM pg_class WHERE oid = to_regclass(%s)",
        [regclass(table)],
    ).fetchone()
    if row is None:
        raise PostgresSetupError(f"There is no table {table.text} in the database.")
    return row[0], frozenset(row[1])


def with_partitions(connection: Connection, table: TableName) -> list[TableName]:
    """The table and all of its partitions; the table alone if it has none."""
    rows = connection.execute(
        "SELECT nspname::text, relname::text FROM pg_partition_tree(to_regclass(%s)) AS part"
        " JOIN pg_class ON pg_class.oid = part.relid JOIN pg_namespace ON pg_namespace.oid = relnamespace",
        [regclass(table)],
    ).fetchall()
    return [TableName(*row) for row in rows] or [table]


def is_partitioned(connection: Connection, table: TableName) -> bool:
    query = "SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(%s)"
    found = connection.execute(query, [regclass(table)]).fetchone()
    return bool(found and found[0])


def generated_kinds(connection: Connection, table: TableName) -> frozenset[str]:
    """The kinds of generated columns that a table has: `s` for stored, `v` for virtual."""
    rows = connection.execute(
        "SELECT DISTINCT attgenerated::text FROM pg_attribute"
        " WHERE attrelid = to_regclass(%s) AND attgenerated <> '' AND NOT attisdropped",
        [regclass(table)],
    ).fetchall()
    return frozenset(row[0] for row in rows)


def columns(connection: Connection, table: TableName) -> list[TableColumn]:
    rows = connection.execute(
        "SELECT attname, atttypid, format_type(atttypid, NULL), attgenerated <> '' AND NOT (attgenerated = 's'"
        " AND current_setting('server_version_num')::int >= 180000"
        " AND (SELECT relreplident = 'f' FROM pg_class WHERE oid = attrelid))"
        " FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [regclass(table)],
    ).fetchall()
    if not rows:
        raise PostgresSetupError(f"There is no table {table.text} in the database, or it has no columns.")
    return [TableColumn(*row) for row in rows]


def primary_key(connection: Connection, table: TableName) -> tuple[str, ...]:
    """The columns of the primary key, in key order; empty if there is none."""
    rows = connection.execute(
        "SELECT attname FROM pg_index, unnest(indkey) WITH ORDINALITY AS keyed(attnum, place), pg_attribute"
        " WHERE indrelid = to_regclass(%s) AND indisprimary AND attrelid = indrelid"
        " AND pg_attribute.attnum = keyed.attnum ORDER BY place",
        [regclass(table)],
    ).fetchall()
    return tuple(str(row[0]) for row in rows)


def regclass(table: TableName) -> str:
    """The name as to_regclass reads it: quoted, so that capitals and dots are taken literally."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (table.schema, table.table))


def create_once(connection: Connection, statement: sql.SQL | sql.Composed) -> None:
    """Run CREATE … IF NOT EXISTS statements, which fail if another session creates the same object at the same time.

    Then all of them are rolled back, so they are run again: the object of the other session exists.
    """
    for _ in range(_CREATION_ATTEMPTS):
        try:
            with connection.transaction():
                connection.execute(statement)
            return
        except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateSchema, psycopg.errors.DuplicateObject):
            continue
        except psycopg.errors.UniqueViolation as error:
            if error.diag.schema_name != "pg_catalog":
                raise
