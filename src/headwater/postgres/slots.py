"""Read changes from a replication slot: create, inspect, plan, read, advance, drop.

Reading does not move a slot; only `advance` does, and only to where everything was delivered. Three traps: after a
crash a slot may be further back than it was advanced to, so reads drop what ends at or before their start; only what
is flushed can be decoded, so plans end at the flushed end of the log at most; and a read may return one transaction
beyond its limit, so what ends after the end is dropped. Invariant: a read of (start, end] returns the same transactions
every time, until the slot is advanced.
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
"""The release from which a session may have the running transactions logged, which lets a slot's restart point move."""


_PUBLISHES_GENERATED: Final = 180000
"""The release from which stored generated columns can be published, and from which Postgres refuses UPDATE and DELETE
on a published table with REPLICA IDENTITY FULL if it has generated columns that are not published."""


class SlotLostError(PostgresSetupError):
    """Changes were removed from the log before they were read; only a new first copy can help."""


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
    """How much more log may be written before the slot is lost; None without a ceiling."""

    @property
    def lag_bytes(self) -> int:
        """How much of its log Postgres keeps for this slot."""
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
    """Drop the slot, after waiting for a reader that is ending; whether there was one."""
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
    """Have changes of these tables decoded from now on, without a gap.

    A partitioned table is published under its own name. A table whose old rows would not name `key`, or that has no
    replica identity at all, gets REPLICA IDENTITY FULL: Postgres refuses UPDATE and DELETE on a published table
    without a replica identity, also those of the application. Stored generated columns are published, where Postgres
    can, if `generated` asks for them, and always with REPLICA IDENTITY FULL, for the same reason.
    """
    for table in tables:
        if not exists(connection, table):
            raise PostgresSetupError(f"There is no table {table.text} to read changes of.")
    name = sql.Identifier(publication)
    if not connection.execute("SELECT 1 FROM pg_publication WHERE pubname = %s", [publication]).fetchone():
        with contextlib.suppress(psycopg.errors.DuplicateObject):  # Another reader was quicker.
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
                    # A transaction that wrote before the table was published and commits afterwards would be missed,
                    # by the snapshot and by the slot. The lock lets those end first.
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
    """Without this setting the changes of a partitioned table have the names of its partitions."""
    if not is_partitioned(connection, table):
        return
    setting = connection.execute("SELECT pubviaroot FROM pg_publication WHERE pubname = %s", [publication]).fetchone()
    if setting == (False,):
        statement = sql.SQL("ALTER PUBLICATION {} SET (publish_via_partition_root = true)")
        connection.execute(statement.format(sql.Identifier(publication)))


def _publish_generated(connection: Connection, publication: str, table: TableName, *, is_full: bool) -> None:
    """Have stored generated columns published, where Postgres can."""
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
    """Set REPLICA IDENTITY FULL, unless Postgres would refuse the application's changes afterwards."""
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
        " that has one and REPLICA IDENTITY FULL. Make the column STORED, or use the table without what needs old rows."
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
    """The end of the log up to which changes can be decoded."""
    row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return lsn_from_text(row[0])


def last_commit(connection: Connection, slot: str, publication: str, end: int, changes_max: int) -> tuple[int, int]:
    """Where the last transaction ends that begins within so many changes, and how many messages lead there.

    (0, 0) when there is none. Decoded and counted by Postgres: nothing is sent.
    """
    row = _busy(
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
    """What the slot holds up to `end`, as the plugin writes it, or the first `messages_max` messages of it.

    Postgres decodes whole transactions, whatever their size, so the limit is on what is sent to us.
    """
    cursor = _busy(
        connection,
        "SELECT data FROM pg_logical_slot_peek_binary_changes"
        "(%s, %s, %s, 'proto_version', '1', 'publication_names', %s) LIMIT %s",
        [slot, lsn_to_text(end), messages_max, publication, messages_max],
        binary=True,
    )
    return [row[0] for row in cursor]


def stream_messages(connection: Connection, slot: str, publication: str, end: int) -> Iterator[bytes]:
    """The same, one after the other and without holding them in memory. Ends with a closed connection if broken off."""
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


def transactions(connection: Connection, said: Sequence[bytes], start: int, end: int) -> Iterator[Transaction]:
    """Those that end in (start, end]."""
    decoder = Decoder(user_types(connection))
    for message in said:
        done = decoder.feed(message)
        if done is not None and start < done.end_lsn <= end:
            yield done


def advance(connection: Connection, slot: str, lsn: int) -> None:
    """Record that everything up to here was delivered. A slot never moves back."""
    now = state(connection, slot)
    if now is None or now.confirmed_lsn >= lsn:
        return
    _busy(connection, "SELECT pg_replication_slot_advance(%s, %s)", [slot, lsn_to_text(lsn)])


def let_restart_move(connection: Connection) -> None:
    """Every read decodes again from the slot's restart point; have it move, where the release and our role allow it."""
    if connection.info.server_version >= _LISTS_RUNNING_TRANSACTIONS:
        # Without the privilege it moves in Postgres's own rhythm, every 15 s.
        with contextlib.suppress(psycopg.errors.InsufficientPrivilege):
            connection.execute("SELECT pg_log_standby_snapshot()")


def check(found: SlotState | None, name: str, start: int) -> SlotState:
    """Check that the slot still has everything after `start`."""
    again = f" Drop it and its checkpoint to begin with a new snapshot: headwater sync slots drop {name}."
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
            f"The slot {name} stands at {lsn_to_text(found.confirmed_lsn)}, but only changes up to"
            f" {lsn_to_text(start)} were delivered: another client advanced it or created it again.{again}"
        )
    return found


def _busy(
    connection: Connection, query: str, parameters: Sequence[object], *, binary: bool = False
) -> psycopg.Cursor[tuple[Any, ...]]:
    """Retry while another reader has the slot: that of an abandoned task may need a moment to end."""
    deadline = time.monotonic() + _BUSY_WAIT_S
    while True:
        try:
            cursor = connection.cursor(binary=binary)
            return cursor.execute(query, parameters)
        except psycopg.errors.ObjectInUse:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.02)
