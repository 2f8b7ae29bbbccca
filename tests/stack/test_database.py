"""Postgres as a child process: binaries, startup, logical replication, shutdown, recovery after a crash."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import psutil
import psycopg
import pytest

from headwater.stack.database import LocalPostgres, LocalPostgresError, find_binaries
from tests.postgres.databases import database, interrupted


def show(running: LocalPostgres, setting: str) -> str:
    with psycopg.connect(running.url) as connection:
        row = connection.execute("SELECT current_setting(%s)", [setting]).fetchone()
        assert row is not None
        return str(row[0])


def test_postgres_starts_ready_for_logical_replication_and_continues_after_a_stop_and_a_crash() -> None:
    with database(max_slot_wal_keep_size="64MB") as running:
        assert show(running, "wal_level") == "logical"
        assert show(running, "max_slot_wal_keep_size") == "64MB"
        with psycopg.connect(running.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept (n int)")
            connection.execute("INSERT INTO kept VALUES (1)")
        port = running.port
        running.stop()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(running.url, connect_timeout=2).close()
        running.start()
        assert running.port == port
        with psycopg.connect(running.url, autocommit=True) as connection:
            connection.execute("INSERT INTO kept VALUES (2)")
        running.kill()
        running.start()
        with psycopg.connect(running.url) as connection:
            assert connection.execute("SELECT array_agg(n ORDER BY n) FROM kept").fetchone() == ([1, 2],)


def test_postgres_starts_again_although_a_backend_outlives_its_crash_for_a_moment() -> None:
    with database() as running:
        with closing(psycopg.connect(running.url)) as connection:
            backend = psutil.Process(connection.info.backend_pid)
            backend.suspend()
            resuming = threading.Timer(1.0, backend.resume)
            resuming.start()
            running.kill()
            running.start()
            resuming.join()
        with psycopg.connect(running.url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_connections_without_the_password_are_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-pg-") as directory:
        Path(directory).chmod(0o755)
        with LocalPostgres(Path(directory), password="of-this-test", sync=False) as running:
            with psycopg.connect(running.url) as connection:
                assert connection.execute("SELECT 1").fetchone() == (1,)
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(running.url.replace("of-this-test", "wrong"), connect_timeout=5).close()


def test_data_directory_whose_creation_was_interrupted_is_created_again() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-pg-") as directory:
        Path(directory).chmod(0o755)
        made = LocalPostgres(Path(directory) / "database", sync=False)
        with interrupted(made, "initdb"), pytest.raises(LocalPostgresError, match="initdb"):
            made.prepare()
        with made:
            assert show(made, "wal_level") == "logical"
        assert [path.name for path in made.directory.glob("data*")] == ["data"]


def test_invalid_pg_bin_is_an_error() -> None:
    found = find_binaries()
    assert find_binaries({"PG_BIN": str(found)}) == found
    with pytest.raises(LocalPostgresError, match="PG_BIN=/nowhere"):
        find_binaries({"PG_BIN": "/nowhere"})


def test_failed_start_reports_the_message_of_postgres() -> None:
    with pytest.raises(LocalPostgresError, match="shared_buffers"), database(shared_buffers="1"):
        pass


def test_inaccessible_data_directory_is_reported() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-pg-") as closed:
        inner = LocalPostgres(Path(closed) / "database", sync=False)
        if os.geteuid() == 0:
            with pytest.raises(LocalPostgresError, match=r"cannot access .*chmod o\+x"):
                inner.start()
        else:  # Postgres runs as the user of the tests, who has access.
            with inner:
                assert show(inner, "wal_level") == "logical"
