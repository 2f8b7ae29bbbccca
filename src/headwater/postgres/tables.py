"""Tables with one row per event: the source of each column, and the statement that inserts the rows.

Invariant: every such table has a unique key of the stream's name, the event's offset and the incarnation of the stream,
so writing an event again has no effect, and the events of a recreated stream are new rows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from headwater.postgres.catalog import TableName, columns, create_once, exists, regclass
from headwater.postgres.connections import Connection, PostgresSetupError

log = logging.getLogger("headwater.pipeline")

STREAM: Final = "@stream"
OFFSET: Final = "@offset"
POSITION: Final = "@position"
PAYLOAD: Final = "@payload"
INCARNATION: Final = "@incarnation"
COLUMN_TYPES: Final = {STREAM: "text", OFFSET: "text", POSITION: "bigint", PAYLOAD: "jsonb", INCARNATION: "text"}

INCARNATION_COLUMN: Final = "ds_incarnation"
"""The column that is added if a mapping does not name one. Empty in rows from before offsets had an incarnation."""

SESSION_EVENTS: Final[Mapping[str, str]] = {
    "stream_name": STREAM,
    "event_key": "key",
    "event_type": "type",
    "operation": "operation",
    "payload": PAYLOAD,
    "ds_offset": OFFSET,
}
"""The columns of the reference's `session_events`, and their sources."""

_ITEMS: Final = """
CREATE TABLE IF NOT EXISTS {} (
    id SERIAL PRIMARY KEY,
    title TEXT NOT NULL,
    body TEXT,
    created_at TIMESTAMPTZ DEFAULT NOW()
)"""

JOB_TABLES: Final = """
CREATE SCHEMA IF NOT EXISTS headwater;
CREATE TABLE IF NOT EXISTS headwater.dead_letters (
    id BIGSERIAL PRIMARY KEY,
    job TEXT NOT NULL,
    stream_name TEXT NOT NULL,
    ds_offset TEXT NOT NULL,
    ds_incarnation TEXT NOT NULL DEFAULT '',
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    content_type TEXT NOT NULL,
    value BYTEA NOT NULL,
    received_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    CONSTRAINT dead_letters_event_key UNIQUE (job, stream_name, ds_offset, ds_incarnation)
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
);
CREATE TABLE IF NOT EXISTS headwater.earlier_rows (
    table_name TEXT NOT NULL,
    stream_name TEXT NOT NULL,
    ds_incarnation TEXT NOT NULL,
    PRIMARY KEY (table_name, stream_name)
)"""

_LETTERS_MIGRATION: Final = """
ALTER TABLE headwater.dead_letters ADD COLUMN ds_incarnation TEXT NOT NULL DEFAULT '';
ALTER TABLE headwater.dead_letters
    ADD CONSTRAINT dead_letters_event_key UNIQUE (job, stream_name, ds_offset, ds_incarnation);
ALTER TABLE headwater.dead_letters DROP CONSTRAINT IF EXISTS dead_letters_job_stream_name_ds_offset_key"""

STAGED_FIRST: Final = "/*first*/0"
STAGED_LAST: Final = "/*last*/0"
ONLY_NEW: Final = "/*only new*/true"

_JSON_TYPES: Final = frozenset(("json", "jsonb"))
_TEXT_TYPES: Final = frozenset(("text", "character varying", "smallint", "integer", "bigint", "boolean"))


@dataclass(frozen=True, slots=True)
class EventMapping:
    """A table and the source of each of its columns: `@stream`, `@offset`, `@incarnation`, `@position`, `@payload`, or
    the path of a field of the event, such as `value.status`."""

    table: TableName
    columns: Mapping[str, str]
    types: Mapping[str, str]
    """Types of columns, for a table that does not exist yet; by default text, or the natural type of an `@` source."""

    @property
    def filled(self) -> Mapping[str, str]:
        """The columns, including that of the incarnation, which a mapping may omit."""
        if INCARNATION in self.columns.values():
            return self.columns
        return {**self.columns, INCARNATION_COLUMN: INCARNATION}

    @property
    def key(self) -> tuple[str, str, str]:
        """The columns of the stream, the offset and the incarnation."""
        by_source = {source: name for name, source in self.filled.items()}
        try:
            return by_source[STREAM], by_source[OFFSET], by_source[INCARNATION]
        except KeyError as missing:
            raise PostgresSetupError(
                f"The mapping of table {self.table.text} has no column for {missing}: events are identified by their"
                " stream and offset, so both must be written."
            ) from None


def prepare(connection: Connection, mapped: EventMapping) -> None:
    """Create what is missing: the table, its key, and the tables of dead letters and batches."""
    create_once(connection, sql.SQL(JOB_TABLES))
    if INCARNATION_COLUMN not in _column_names(connection, TableName("headwater", "dead_letters")):
        create_once(connection, sql.SQL(_LETTERS_MIGRATION))
    if not exists(connection, mapped.table):
        create_once(connection, _creation(mapped))
    there = _column_names(connection, mapped.table)
    for name in mapped.columns:
        if name not in there:
            raise PostgresSetupError(
                f"Table {mapped.table.text} has no column {name}; it has {', '.join(sorted(there))}."
            )
    steps = [*_column_migration(mapped, there), *_key_migration(connection, mapped)]
    if not steps:
        return
    try:
        create_once(connection, sql.SQL("; ").join(steps))
    except psycopg.errors.UniqueViolation as error:
        key = mapped.key if mapped.key[2] in there else mapped.key[:2]
        raise PostgresSetupError(
            f"Table {mapped.table.text} contains some events twice, so its key cannot be created:"
            f" {error.diag.message_detail} Keep one row of each event with: {_deletion(connection, mapped, key)}"
        ) from None
    except psycopg.errors.InsufficientPrivilege:
        spelled = sql.SQL("; ").join(steps).as_string(connection)
        raise PostgresSetupError(
            f"Table {mapped.table.text} needs a key with the incarnation of the stream, and the pipeline's role is not"
            f" allowed to change the table. As its owner, run: {spelled};"
        ) from None
    log.info("table %s: added the incarnation of the stream to its key", mapped.table.text)


def _column_migration(mapped: EventMapping, there: set[str]) -> list[sql.Composed]:
    """Add the column. Existing rows have an empty incarnation; a constant default rewrites no row on disk."""
    column = mapped.key[2]
    if column in there:
        return []
    statement = sql.SQL("ALTER TABLE {} ADD COLUMN {} TEXT NOT NULL DEFAULT ''")
    return [statement.format(mapped.table.quoted, sql.Identifier(column))]


def _key_migration(connection: Connection, mapped: EventMapping) -> list[sql.Composed]:
    """Replace a key of only stream and offset, which would reject the events of a recreated stream."""
    key = sql.SQL(", ").join(map(sql.Identifier, mapped.key))
    steps: list[sql.Composed] = []
    for index, constraint, is_primary in unique_indexes(connection, mapped.table, mapped.key[:2]):
        if constraint is None:
            steps.append(sql.SQL("DROP INDEX {}").format(sql.Identifier(mapped.table.schema, index)))
            continue
        kind = sql.SQL("PRIMARY KEY" if is_primary else "UNIQUE")
        name = sql.Identifier(constraint)
        change = sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}, ADD CONSTRAINT {} {} ({})")
        steps.append(change.format(mapped.table.quoted, name, name, kind, key))
    if not unique_indexes(connection, mapped.table, mapped.key):
        index_name = sql.Identifier(f"{mapped.table.table[:40]}_event_key")
        creation = sql.SQL("CREATE UNIQUE INDEX IF NOT EXISTS {} ON {} ({})")
        steps.append(creation.format(index_name, mapped.table.quoted, key))
    return steps


def prepare_items(connection: Connection, table: TableName) -> None:
    """Create the reference's source table if it is missing."""
    create_once(connection, sql.SQL(_ITEMS).format(table.quoted))


def insertion(connection: Connection, mapped: EventMapping) -> str:
    """The statement that moves staged rows, numbered from STAGED_FIRST to STAGED_LAST, into the table, in order.

    If ONLY_NEW is replaced by `only_new`, rows whose event is in the table under another key are skipped.
    """
    types = {column.name: column.type_name for column in columns(connection, mapped.table)}
    names = list(mapped.filled)
    values = sql.SQL(", ").join(value_of(mapped, name, types[name]) for name in names)
    # OFFSET 0 keeps the inner query separate, so that each payload is parsed once, not once per column.
    statement = sql.SQL(
        "INSERT INTO {table} ({names}) SELECT {values} FROM (SELECT n, stream, ds_offset, incarnation, position,"
        " payload::jsonb AS payload FROM pg_temp.headwater_staged AS event WHERE n BETWEEN " + STAGED_FIRST + " AND "
        "" + STAGED_LAST + " AND " + ONLY_NEW + " ORDER BY n OFFSET 0) AS staged ORDER BY n"
        " ON CONFLICT ({key}) DO NOTHING"
    )
    return statement.format(
        table=mapped.table.quoted,
        names=sql.SQL(", ").join(map(sql.Identifier, names)),
        values=values,
        key=sql.SQL(", ").join(map(sql.Identifier, mapped.key)),
    ).as_string(connection)


def only_new(connection: Connection, mapped: EventMapping) -> str:
    """The condition that an event is not in the table under another key, from before offsets had an incarnation.

    Rows without an incarnation belong to the one that `earlier_rows` names. An event without one (of a batch that was
    planned before the upgrade, or of another server) is identified by only its stream and offset.
    """
    stream, offset, incarnation = map(sql.Identifier, mapped.key)
    condition = sql.SQL(
        "NOT EXISTS (SELECT 1 FROM {table} AS there WHERE there.{stream} = event.stream AND there.{offset} ="
        " event.ds_offset AND (event.incarnation = '' OR (there.{incarnation} = '' AND EXISTS (SELECT 1 FROM"
        " headwater.earlier_rows AS earlier WHERE earlier.table_name = {name} AND earlier.stream_name = event.stream"
        " AND earlier.ds_incarnation = event.incarnation))))"
    )
    return condition.format(
        table=mapped.table.quoted,
        name=sql.Literal(mapped.table.text),
        stream=stream,
        offset=offset,
        incarnation=incarnation,
    ).as_string(connection)


def adoption(connection: Connection, mapped: EventMapping) -> str:
    """The statement that decides, once for each stream, which incarnation the rows without one belong to.

    It takes the streams and their incarnations as two arrays. Rows belong to the incarnation of the staged events if
    those continue after them, or repeat some of them and contradict none. If a stream has no such rows, or they are
    from a stream that was deleted before the upgrade, the result is the empty incarnation, which matches no event.
    """
    stream, offset, incarnation = map(sql.Identifier, mapped.key)
    statement = sql.SQL(
        "INSERT INTO headwater.earlier_rows (table_name, stream_name, ds_incarnation)"
        " SELECT {name}, found.stream, CASE WHEN found.last < found.first OR found.same THEN found.incarnation"
        " ELSE '' END FROM (SELECT asked.stream, asked.incarnation,"
        " (SELECT max(left(there.{offset}, 16)) FROM {table} AS there WHERE there.{stream} = asked.stream"
        " AND there.{incarnation} = '') AS last,"
        " (SELECT min(left(event.ds_offset, 16)) FROM pg_temp.headwater_staged AS event"
        " WHERE event.stream = asked.stream) AS first,"
        " (SELECT bool_and({same}) FROM pg_temp.headwater_staged AS event JOIN {table} AS there"
        " ON there.{stream} = event.stream AND there.{offset} = event.ds_offset AND there.{incarnation} = ''"
        " WHERE event.stream = asked.stream) AS same"
        " FROM unnest(/*asked*/) AS asked (stream, incarnation)) AS found ON CONFLICT DO NOTHING"
    )
    spelled = statement.format(
        table=mapped.table.quoted,
        name=sql.Literal(mapped.table.text),
        stream=stream,
        offset=offset,
        incarnation=incarnation,
        same=_same_event(connection, mapped),
    ).as_string(connection)
    return spelled.replace("%", "%%").replace("/*asked*/", "%s::text[], %s::text[]")


def _same_event(connection: Connection, mapped: EventMapping) -> sql.Composable:
    """Whether a row (`there`) holds a staged event (`event`), by the columns whose values can be compared as text."""
    types = {column.name: column.type_name for column in columns(connection, mapped.table)}
    comparisons: list[sql.Composable] = []
    for name, source in mapped.columns.items():
        column = sql.Identifier(name)
        if source == PAYLOAD and types[name] in _JSON_TYPES:
            return sql.SQL("there.{}::jsonb = event.payload::jsonb").format(column)
        if not source.startswith("@") and types[name] in _TEXT_TYPES:
            field = sql.SQL("there.{}::text IS NOT DISTINCT FROM (event.payload::jsonb #>> {}::text[])")
            comparisons.append(field.format(column, sql.Literal(source.split("."))))
    return sql.SQL(" AND ").join(comparisons) if comparisons else sql.SQL("true")


def _column_names(connection: Connection, table: TableName) -> set[str]:
    return {column.name for column in columns(connection, table)}


def value_of(mapped: EventMapping, name: str, type_name: str) -> sql.Composable:
    source = mapped.filled[name]
    cast = sql.SQL(type_name)
    match source:
        case "@stream":
            return sql.SQL("stream::{}").format(cast)
        case "@offset":
            return sql.SQL("ds_offset::{}").format(cast)
        case "@incarnation":
            return sql.SQL("incarnation::{}").format(cast)
        case "@position":
            return sql.SQL("position::{}").format(cast)
        case "@payload":
            return sql.SQL("payload::{}").format(cast)
        case _ if type_name.endswith("[]"):
            # The text of a JSON list is not an array literal; this conversion also handles nested lists.
            return sql.SQL(
                "(jsonb_populate_record(NULL::{}, jsonb_build_object({}, payload #> {}::text[]))).{}"
            ).format(mapped.table.quoted, sql.Literal(name), sql.Literal(source.split(".")), sql.Identifier(name))
        case _:
            path = sql.Literal(source.split("."))
            arrow = sql.SQL("#>" if type_name in {"json", "jsonb"} else "#>>")
            return sql.SQL("(payload {} {}::text[])::{}").format(arrow, path, cast)


def _creation(mapped: EventMapping) -> sql.Composed:
    lines = [sql.SQL("id SERIAL PRIMARY KEY")] if "id" not in mapped.columns else []
    required = {STREAM, PAYLOAD}  # As in the reference: an application may insert rows without an offset.
    described: list[sql.Composable] = list(lines)
    for name, source in mapped.filled.items():
        type_name = mapped.types.get(name) or COLUMN_TYPES.get(source, "text")
        suffix = " NOT NULL DEFAULT ''" if source == INCARNATION else " NOT NULL" if source in required else ""
        described.append(sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_name + suffix)))
    if "received_at" not in mapped.columns:
        described.append(sql.SQL("received_at TIMESTAMPTZ DEFAULT NOW()"))
    return sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})").format(mapped.table.quoted, sql.SQL(", ").join(described))


def _deletion(connection: Connection, mapped: EventMapping, key: Sequence[str]) -> str:
    """The statement that deletes all but the first row of each event."""
    same = sql.SQL(" AND ").join(sql.SQL("a.{0} = b.{0}").format(sql.Identifier(name)) for name in key)
    statement = sql.SQL("DELETE FROM {0} a USING {0} b WHERE {1} AND a.ctid > b.ctid;")
    return statement.format(mapped.table.quoted, same).as_string(connection)


def unique_indexes(connection: Connection, table: TableName, key: Sequence[str]) -> list[tuple[str, str | None, bool]]:
    """The unique indexes over exactly these columns: name, constraint of each, and whether it is the primary key."""
    return connection.execute(
        "SELECT relname::text, conname::text, indisprimary FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid"
        " LEFT JOIN pg_constraint ON conindid = indexrelid AND contype IN ('p', 'u') WHERE indrelid = to_regclass(%s)"
        " AND indisunique AND indpred IS NULL AND indexprs IS NULL AND indnkeyatts = %s"
        " AND (SELECT array_agg(attname::text ORDER BY attname) FROM pg_attribute WHERE attrelid = indrelid"
        " AND attnum = ANY (indkey::int2[])) = %s",
        [regclass(table), len(key), sorted(key)],
    ).fetchall()
