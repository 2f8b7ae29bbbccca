"""Read changes from a replication slot: create, inspect, plan, read, advance, drop.

Reading does not move a slot; only `advance` does, and only to a position before which everything was delivered. Three
pitfalls: after a crash a slot may be before the position that it was advanced to, so reads drop transactions that end
at or before their start; only flushed WAL can be decoded, so plans end at the flushed end at the latest; and a read may
return one transaction beyond its limit, so transactions after the end are dropped. Invariant: a read of (start, end]
returns the same transactions every time, until the slot is advanced.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from headwater.postgres.catalog import (
    TableName,
    exists,
    generated_kinds,
    identity_columns,
    is_partitioned,
    user_types,
    with_partitions,
)
from headwater.postgres.connections import Connection, PostgresSetupError
from headwater.postgres.lsn import lsn_from_text, lsn_to_text
from headwater.postgres.pgoutput import Decoder, Transaction

log = logging.getLogger("headwater.postgres")

PLUGIN: Final = "pgoutput"
_COMMIT: Final = ord("C")
_BUSY_WAIT_S: Final = 15.0
_LISTS_RUNNING_TRANSACTIONS: Final = 160000
"""The first release in which a session can log the running transactions, which advances a slot's restart point."""


_PUBLISHES_GENERATED: Final = 180000
"""The first release that can publish stored generated columns, and that rejects UPDATE and DELETE on a published table
with REPLICA IDENTITY FULL if it has generated columns that are not published."""


class SlotLostError(PostgresSetupError):
    """Changes were removed from the WAL before they were read; only a new first copy can help."""


@dataclass(frozen=True, slots=True)
class SlotState:
    name: str
    database: str
    active: bool
    confirmed_lsn: int
    restart_lsn: int
    current_lsn: int
    wal_status: str
    kept_bytes_left: int | None
    """How much more WAL may be written before the slot is lost; None if there is no limit."""

    @property
    def lag_bytes(self) -> int:
        """How much WAL Postgres keeps for this slot."""
        return max(0, self.current_lsn - self.restart_lsn)

    @property
    def is_lost(self) -> bool:
        return self.wal_status == "lost"


def states(connection: Connection, name: str | None = None) -> list[SlotState]:
    """The logical slots of this database, or the one of this name."""
    rows = connection.execute(
        "SELECT slot_name, database, active, coalesce(confirmed_flush_lsn, '0/0')::text,"
        " coalesce(restart_lsn, confirmed_flush_lsn, '0/0')::text, pg_current_wal_flush_lsn()::text,"
        " coalesce(wal_status, 'lost'), safe_wal_size"
        " FROM pg_replication_slots WHERE slot_type = 'logical' AND database = current_database()"
        " AND (%s::text IS NULL OR slot_name = %s) ORDER BY slot_name",
        [name, name],
    ).fetchall()
    return [
        SlotState(
            name=row[0],
            database=row[1],
            active=row[2],
            confirmed_lsn=lsn_from_text(row[3]),
            restart_lsn=lsn_from_text(row[4]),
            current_lsn=lsn_from_text(row[5]),
            wal_status=row[6],
            kept_bytes_left=row[7],
        )
        for row in rows
    ]


def state(connection: Connection, name: str) -> SlotState | None:
    found = states(connection, name)
    return found[0] if found else None


def create(connection: Connection, name: str) -> SlotState:
    """The slot of this name, created if it does not exist."""
    found = state(connection, name)
    if found is not None:
        return found
    level = connection.execute("SELECT current_setting('wal_level')").fetchone()
    if level is None or level[0] != "logical":
        raise PostgresSetupError(
            f"Postgres has wal_level={level and level[0]}; reading changes needs wal_level=logical and a restart."
        )
    try:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, %s)", [name, PLUGIN])
    except psycopg.errors.DuplicateObject:
        raise PostgresSetupError(f"A slot {name} exists for another database; choose another name.") from None
    except psycopg.errors.InsufficientPrivilege as error:
        raise PostgresSetupError(f"Reading changes needs a role with REPLICATION: {error}") from None
    made = state(connection, name)
    assert made is not None
    return made


def drop(connection: Connection, name: str) -> bool:
    """Drop the slot, after waiting for its reader to end; return whether there was one."""
    deadline = time.monotonic() + _BUSY_WAIT_S
    while True:
        try:
            dropped = connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s AND database = current_database()",
                [name],
            ).fetchall()
            return bool(dropped)
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def publish(
    connection: Connection,
    publication: str,
    tables: Sequence[TableName],
    *,
    full_rows: bool,
    key: Sequence[str] = (),
    generated: bool = False,
) -> None:
    """Publish changes of these tables from now on, without a gap.

    A partitioned table is published under its own name. A table whose old rows would not include `key`, or that has no
    replica identity at all, gets REPLICA IDENTITY FULL: Postgres rejects UPDATE and DELETE on a published table
    without a replica identity, including those of the application. Stored generated columns are published, if Postgres
    supports it, if `generated` is set, and always with REPLICA IDENTITY FULL, for the same reason.
    """
    for table in tables:
        if not exists(connection, table):
            raise PostgresSetupError(f"There is no table {table.text} to read changes from.")
    name = sql.Identifier(publication)
    if not connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [publication]).fetchone():
        with contextlib.suppress(psycopg.errors.DuplicateObject):  # Another reader created it first.
            connection.execute(sql.SQL("CREATE PUBLICATION {} WITH (publish_via_partition_root = true)").format(name))
    for table in tables:
        try:
            with connection.transaction():
                _publish_by_root(connection, publication, table)
                identities = {part: identity_columns(connection, part) for part in with_partitions(connection, table)}
                lacking = [
                    part
                    for part, (kind, identified) in identities.items()
                    if kind != "f" and (full_rows or not identified or not identified >= set(key))
                ]
                is_full = any(kind == "f" for kind, _ in identities.values())
                if generated or lacking or is_full:
                    _publish_generated(connection, publication, table, is_full=is_full)
                if not is_published(connection, publication, table):
                    # Neither the snapshot nor the slot would include a transaction that wrote before the table was
                    # published and commits afterwards. The lock waits for such transactions.
                    connection.execute(sql.SQL("LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE").format(table.quoted))
                    connection.execute(sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(name, table.quoted))
                for part in lacking:
                    if not full_rows:
                        reason = "its old rows would not have a key otherwise"
                        log.warning("table %s gets REPLICA IDENTITY FULL: %s", part.text, reason)
                    set_full_identity(connection, part)
        except psycopg.errors.InsufficientPrivilege as error:
            role = sql.Identifier(connection.info.user).as_string(connection)
            raise PostgresSetupError(
                f"Only the owner of table {table.text} can publish its changes ({error.diag.message_primary}). As its"
                f" owner or a superuser, run: ALTER TABLE {table.quoted.as_string(connection)} OWNER TO {role};"
            ) from None


def is_published(connection: Connection, publication: str, table: TableName) -> bool:
    found = connection.execute(
        "SELECT 1 FROM pg_publication_tables WHERE pubname = %s AND schemaname = %s AND tablename = %s",
        [publication, table.schema, table.table],
    ).fetchone()
    return found is not None


def _publish_by_root(connection: Connection, publication: str, table: TableName) -> None:
    """Publish the changes of a partitioned table under its own name, not under those of its partitions."""
    if not is_partitioned(connection, table):
        return
    setting = connection.execute("SELECT pubviaroot FROM pg_publication WHERE pubname = %s", [publication]).fetchone()
    if setting == (False,):
        statement = sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = true)")
        connection.execute(statement.format(sql.Identifier(publication)))


def _publish_generated(connection: Connection, publication: str, table: TableName, *, is_full: bool) -> None:
    """Publish stored generated columns, if Postgres supports it."""
    if connection.info.server_version < _PUBLISHES_GENERATED:
        return
    kinds = generated_kinds(connection, table)
    if "v" in kinds and is_full:
        raise _virtual_columns(table)
    if "s" in kinds:
        setting = connection.execute("SELECT pubgencols::text FROM pg_publication WHERE pubname = %s", [publication])
        if setting.fetchone() != ("s",):
            statement = sql.SQL("ALTER PUBLICATION {} SET (publish_generated_columns = stored)")
            connection.execute(statement.format(sql.Identifier(publication)))


def set_full_identity(connection: Connection, table: TableName) -> None:
    """Set REPLICA IDENTITY FULL, unless Postgres would then reject the application's changes."""
    if connection.info.server_version >= _PUBLISHES_GENERATED:
        kinds = generated_kinds(connection, table)
        if "v" in kinds:
            raise _virtual_columns(table)
        if "s" in kinds:
            _check_other_publications(connection, table)
    connection.execute(sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(table.quoted))


def _virtual_columns(table: TableName) -> PostgresSetupError:
    return PostgresSetupError(
        f"Table {table.text} has a virtual generated column: Postgres refuses UPDATE and DELETE on a published table"
        " that has one and REPLICA IDENTITY FULL. Make the column STORED, or disable the options that need old rows."
    )


def _check_other_publications(connection: Connection, table: TableName) -> None:
    found = connection.execute(
        "SELECT pubname::text FROM pg_publication_tables JOIN pg_publication USING (pubname)"
        " WHERE schemaname = %s AND tablename = %s AND pubgencols <> 's' ORDER BY pubname",
        [table.schema, table.table],
    ).fetchone()
    if found is not None:
        statement = sql.SQL("ALTER PUBLICATION {} SET (publish_generated_columns = stored);")
        raise PostgresSetupError(
            f"Table {table.text} has a generated column that publication {found[0]!r} does not publish: with REPLICA"
            " IDENTITY FULL, Postgres would refuse UPDATE and DELETE on the table. Run:"
            f" {statement.format(sql.Identifier(found[0])).as_string(connection)}"
        )


def flushed_lsn(connection: Connection) -> int:
    """The end of the flushed WAL, up to which changes can be decoded."""
    row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return lsn_from_text(row[0])


def last_commit(connection: Connection, slot: str, publication: str, end: int, changes_max: int) -> tuple[int, int]:
    """The end of the last transaction that begins within `changes_max` changes, and the number of messages up to it.

    (0, 0) if there is none. Postgres decodes and counts; no changes are sent.
    """
    row = _retry_while_busy(
        connection,
        "SELECT coalesce(max(lsn) FILTER (WHERE get_byte(data, 0) = %s), '0/0')::text, count(*)"
        " FROM pg_logical_slot_peek_binary_changes(%s, %s, %s, 'proto_version', '1', 'publication_names', %s)",
        [_COMMIT, slot, lsn_to_text(end), changes_max, publication],
    ).fetchone()
    assert row is not None
    return lsn_from_text(row[0]), row[1]


def messages(
    connection: Connection, slot: str, publication: str, end: int, messages_max: int | None = None
) -> list[bytes]:
    """The slot's messages up to `end`, as the plugin writes them, but at most the first `messages_max`.

    Postgres decodes whole transactions of any size, so the limit applies only to what it sends.
    """
    cursor = _retry_while_busy(
        connection,
        "SELECT data FROM pg_logical_slot_peek_binary_changes"
        "(%s, %s, %s, 'proto_version', '1', 'publication_names', %s) LIMIT %s",
        [slot, lsn_to_text(end), messages_max, publication, messages_max],
        binary=True,
    )
    return [row[0] for row in cursor]


def stream_messages(connection: Connection, slot: str, publication: str, end: int) -> Iterator[bytes]:
    """The same, one by one and without holding them in memory. If the iteration is abandoned, the connection closes."""
    query = sql.SQL(
        "COPY (SELECT data FROM pg_logical_slot_peek_binary_changes({}, {}, NULL, 'proto_version', '1',"
        " 'publication_names', {})) TO STDOUT (FORMAT binary)"
    ).format(slot, lsn_to_text(end), publication)
    deadline = time.monotonic() + _BUSY_WAIT_S
    is_complete = False
    try:
        while not is_complete:
            try:
                with connection.cursor().copy(query) as out:
                    out.set_types(["bytea"])
                    for (message,) in out.rows():
                        deadline = 0.0
                        yield message
                is_complete = True
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    finally:
        if not is_complete:
            connection.close()


def transactions(connection: Connection, messages: Sequence[bytes], start: int, end: int) -> Iterator[Transaction]:
    """The transactions that end in (start, end]."""
    decoder = Decoder(user_types(connection))
    for message in messages:
        done = decoder.feed(message)
        if done is not None and start < done.end_lsn <= end:
            yield done


def advance(connection: Connection, slot: str, lsn: int) -> None:
    """Record that everything up to here was delivered. A slot never moves back."""
    now = state(connection, slot)
    if now is None or now.confirmed_lsn >= lsn:
        return
    _retry_while_busy(connection, "SELECT pg_replication_slot_advance(%s, %s)", [slot, lsn_to_text(lsn)])


def advance_restart_point(connection: Connection) -> None:
    """Advance the slot's restart point, from which every read decodes, if the release and our role allow it."""
    if connection.info.server_version >= _LISTS_RUNNING_TRANSACTIONS:
        # Without the privilege, Postgres advances it every 15 s.
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT pg_log_standby_snapshot()")


def check(found: SlotState | None, name: str, start: int) -> SlotState:
    """Check that the slot still has everything after `start`."""
    again = f" Drop it and its checkpoint to start with a new snapshot: headwater sync slots drop {name}."
    if found is None:
        raise SlotLostError(
            f"The slot {name} does not exist: it was dropped, or the database was restored without it.{again}"
        )
    if found.is_lost:
        raise SlotLostError(
            f"The slot {name} is lost: Postgres wrote more than max_slot_wal_keep_size while it was not read.{again}"
        )
    if found.confirmed_lsn > start:
        raise SlotLostError(
            f"The slot {name} is at {lsn_to_text(found.confirmed_lsn)}, but only changes up to"
            f" {lsn_to_text(start)} were delivered: another client advanced or recreated it.{again}"
        )
    return found


def _retry_while_busy(
    connection: Connection, query: str, parameters: Sequence[object], *, binary: bool = False
) -> psycopg.Cursor[tuple[Any, ...]]:
    """Retry while another reader uses the slot: the reader of an abandoned task may need a moment to end."""
    deadline = time.monotonic() + _BUSY_WAIT_S
    while True:
        try:
            cursor = connection.cursor(binary=binary)
            return cursor.execute(query, parameters)
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)
