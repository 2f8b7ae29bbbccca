"""The tables of a cluster in Postgres do not grow with the number of commits, and a former primary is not used."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import psycopg
import pytest

from headwater.cluster.nodes import schema
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.schema import Connection, broken_promise, connect, create_tables, required_database
from headwater.stack.database import LocalPostgres
from headwater.storage.interface import StorageError
from tests.cluster.nodes.servers import replicated_postgres
from tests.ports import free_port
from tests.postgres.databases import database
from tests.waiting import wait_until

UPDATE = "UPDATE headwater.shard SET seq = seq + 1 WHERE id = 0"


def test_table_of_shards_keeps_its_size_when_long_transactions_hold_dead_rows() -> None:
    """Each of them moves rows to other pages. Their former pages are used again only after a vacuum."""
    with (
        database(autovacuum_naptime="1s") as running,
        connect(running.url, "test") as connection,
        connect(running.url, "long") as other,
    ):
        create_tables(connection, "test", 3)
        sizes = []
        for _ in range(2):
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT seq FROM headwater.shard").fetchall()
            for _ in range(500):
                connection.execute(UPDATE)
            other.execute("COMMIT")
            connection.execute(UPDATE)
            wait_for_vacuum(connection)
            sizes.append(one(connection, "SELECT pg_relation_size('headwater.shard')"))
        assert sizes[0] > 3 * 8192, "the long transactions did not hold any rows"
        assert sizes[-1] <= sizes[0] + 8192, f"the table grows: {sizes}"


def test_node_that_starts_does_not_wait_for_readers_of_the_tables() -> None:
    """Commits would wait for it: a backup holds its locks for as long as it reads."""
    with (
        database() as running,
        connect(running.url, "test") as connection,
        psycopg.connect(running.url) as reader,
    ):
        create_tables(connection, "test", 3)
        connection.execute("SET lock_timeout = '5s'")
        for table in ("cluster", "node", "shard", "journal"):
            reader.execute(f"SELECT count(*) FROM headwater.{table}")
        assert create_tables(connection, "test", 3).shards == 3


def test_tables_of_an_earlier_version_are_changed_once_their_readers_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit waits behind the change for the time limit, and no longer."""
    monkeypatch.setattr(schema, "_CHANGE_RETRY_S", 0.1)
    with (
        database() as running,
        connect(running.url, "test") as connection,
        psycopg.connect(running.url) as reader,
    ):
        create_tables(connection, "test", 3)
        connection.execute("ALTER TABLE headwater.cluster DROP COLUMN store")
        connection.execute("ALTER TABLE headwater.shard RESET (vacuum_truncate)")
        connection.execute("ALTER TABLE headwater.journal ALTER COLUMN batch SET STORAGE EXTENDED")
        reader.execute("SELECT count(*) FROM headwater.journal")
        with ThreadPoolExecutor(1) as threads:
            started = threads.submit(create_tables, connection, "test", 3)
            journal = PostgresJournal(running.url, 0, 0, require_standby=False)
            for number in range(3):
                journal.append(number, number + 1, (b"beside it",))
            journal.close()
            assert not started.done()
            reader.rollback()
            assert started.result(60).shards == 3
        assert connection.execute(schema._HAS_TABLES).fetchone() == (True,)
        reader.execute("SELECT count(*) FROM headwater.cluster")
        connection.execute("ALTER TABLE headwater.shard RESET (vacuum_truncate)")
        monkeypatch.setattr(schema, "_CHANGE_ATTEMPTS", 1)
        with pytest.raises(StorageError, match="when no backup or other long transaction reads them"):
            create_tables(connection, "test", 3)


def wait_for_vacuum(connection: Connection) -> None:
    """A vacuum that began after now."""
    counted = "SELECT autovacuum_count FROM pg_stat_user_tables WHERE relid = 'headwater.shard'::regclass"
    before = one(connection, counted)

    def is_done() -> bool:
        connection.execute(UPDATE)
        return one(connection, counted) >= before + 2

    wait_until(is_done, what="autovacuum", every_s=0.1)


def one(connection: Connection, query: str) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(str(row[0]))


class Reported:
    """A server that reports these settings and standbys."""

    def __init__(self, *, fsync: str = "on", states: tuple[str | None, ...] = ("quorum",)) -> None:
        self._rows: list[list[tuple[object, ...]]] = [
            [("on", "ANY 1 (*)", fsync, False, "off")],
            [(state,) for state in states],
        ]

    def execute(self, _query: str) -> Reported:
        self._found = self._rows.pop(0)
        return self

    def fetchone(self) -> tuple[object, ...]:
        return self._found[0]

    def fetchall(self) -> list[tuple[object, ...]]:
        return self._found


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Reported(), None),
        (Reported(fsync="off"), "fsync is off: a commit could be lost with the power. Set it to on."),
        (Reported(states=(None, None)), "the user may not see the standbys. GRANT pg_monitor to it."),
        (Reported(states=("async", "potential")), "no synchronous standby is connected."),
        (Reported(states=()), "no synchronous standby is connected."),
    ],
)
def test_server_that_could_lose_commits_is_named_with_the_reason(server: Reported, reason: str | None) -> None:
    assert broken_promise(cast("Connection", server), require_standby=True) == reason


@pytest.mark.long
def test_former_primary_that_runs_again_is_not_used() -> None:
    """A copy of its data is started as it was: it accepts writes, because it does not know of the promotion."""
    with replicated_postgres() as postgres:
        former = postgres.servers[postgres.primary]
        former.kill()
        kept = Path(f"{former.directory}-kept")
        subprocess.run(["cp", "-a", former.directory, kept], check=True)
        (kept / "data" / "postmaster.pid").unlink(missing_ok=True)
        postgres.watch()
        again = LocalPostgres(kept, free_port(), settings=former.settings, sync=False, skips_set_up=True)
        again.start()
        try:
            with connect(postgres.url, "test") as connection:
                primary = connection.info.port
            hosts = ",".join(f"127.0.0.1:{server.port}" for server in (again, *postgres.servers))
            with connect(again.url.replace(f"127.0.0.1:{again.port}", hosts), "test") as connection:
                assert connection.info.port == primary != again.port
            with pytest.raises(psycopg.OperationalError, match=r"it is a former primary\. Rebuild it as a standby"):
                connect(again.url, "test")
        finally:
            again.kill()


def test_errors_of_postgres_name_the_setting_and_other_errors_pass() -> None:
    for error in (psycopg.OperationalError("gone"), psycopg.ProgrammingError("gone")):
        with pytest.raises(StorageError, match=r"cluster\.postgres_url cannot be used: gone"), required_database():
            raise error
    with pytest.raises(KeyError), required_database():
        raise KeyError
