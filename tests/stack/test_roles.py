"""Roles of the stack's Postgres: random passwords, a pipeline without superuser rights, upgrades of older data."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headwater.postgres import slots, snapshots, tables
from headwater.postgres.catalog import table_name
from headwater.postgres.connections import PostgresSetupError, connect
from headwater.stack.database import LocalPostgres, LocalPostgresError
from headwater.stack.roles import FORMER_DEFAULT, resolve_credentials, stored_credentials
from headwater.stack.state import StackDirectory
from tests.ports import free_port
from tests.serving import server_environment


@pytest.fixture
def stack_directory() -> Iterator[StackDirectory]:
    # Not pytest's tmp_path: as root, Postgres runs as another user, who needs access.
    root = Path(tempfile.mkdtemp(prefix="headwater-roles-"))
    root.chmod(0o755)
    try:
        yield StackDirectory(root)
    finally:
        shutil.rmtree(root)


def as_in_the_stack(directory: StackDirectory, port: int, chosen: str = "") -> LocalPostgres:
    credentials = resolve_credentials(directory.database_credentials, chosen)
    former = (credentials.former, FORMER_DEFAULT)
    root = directory.root / "postgres"
    return LocalPostgres(
        root, port, password=credentials.superuser, former_passwords=former, pipeline_password=credentials.pipeline,
        sync=False,
    )  # fmt: skip


def test_passwords_are_random_private_and_persistent(tmp_path: Path) -> None:
    first = resolve_credentials(tmp_path / "one" / "postgres.json", "")
    second = resolve_credentials(tmp_path / "two" / "postgres.json", "")
    assert len({first.superuser, first.pipeline, second.superuser, second.pipeline}) == 4
    file = tmp_path / "one" / "postgres.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert resolve_credentials(file, "") == first
    chosen = resolve_credentials(file, "chosen")
    assert (chosen.superuser, chosen.former, chosen.pipeline) == ("chosen", first.superuser, first.pipeline)
    assert stored_credentials(file) == chosen


def test_pipeline_role_is_sufficient_and_not_a_superuser(
    stack_directory: StackDirectory,
) -> None:
    with as_in_the_stack(stack_directory, free_port()) as running, connect(running.pipeline_url) as connection:
        is_super = connection.execute("SELECT rolsuper, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = user")
        assert is_super.fetchone() == (False, False, False)
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")
        items = table_name("items")
        events = tables.EventMapping(table_name("session_events"), tables.SESSION_EVENTS, {})
        tables.prepare(connection, events)
        tables.prepare_items(connection, items)
        slots.create(connection, "of_this_test")
        slots.publish(connection, "of_this_test", [items], full_rows=True)
        snapshots.prepare(connection)
        snapshots.take(connection, "of_this_test", items, with_rows=True)
        connection.execute("INSERT INTO items (title) VALUES ('one')")
        end = slots.flushed_lsn(connection)
        assert slots.messages(connection, "of_this_test", "of_this_test", end)
        slots.advance_restart_point(connection)
        slots.advance(connection, "of_this_test", end)
        assert slots.drop(connection, "of_this_test")


def test_error_for_a_table_of_the_superuser_has_the_statement_to_run(stack_directory: StackDirectory) -> None:
    with (
        as_in_the_stack(stack_directory, free_port()) as running,
        psycopg.connect(running.url, autocommit=True) as superuser,
        connect(running.pipeline_url) as connection,
    ):
        superuser.execute("CREATE TABLE theirs (n int PRIMARY KEY)")
        with pytest.raises(PostgresSetupError, match=r"ALTER TABLE .* OWNER TO") as refused:
            slots.publish(connection, "p", [table_name("theirs")], full_rows=False)
        superuser.execute(str(refused.value).rpartition("run: ")[2])
        slots.publish(connection, "p", [table_name("theirs")], full_rows=False)


def test_data_made_with_the_former_password_is_migrated(stack_directory: StackDirectory) -> None:
    port = free_port()
    with LocalPostgres(stack_directory.root / "postgres", port, password=FORMER_DEFAULT, sync=False) as before:
        with connect(before.url) as connection:
            tables.prepare_items(connection, table_name("items"))
            tables.prepare(connection, tables.EventMapping(table_name("session_events"), tables.SESSION_EVENTS, {}))
            slots.publish(connection, "headwater_items", [table_name("items")], full_rows=False)
            connection.execute("CREATE VIEW titles AS SELECT title FROM items")
            connection.execute("CREATE SEQUENCE alone")
        former = before.url
    for _ in range(2):
        with as_in_the_stack(stack_directory, port) as running:
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(former, connect_timeout=5).close()
            with connect(running.pipeline_url) as connection:
                connection.execute("INSERT INTO items (title) VALUES ('after')")
                owners = connection.execute(
                    "SELECT DISTINCT pg_get_userbyid(relowner) FROM pg_class WHERE relnamespace IN"
                    " ('public'::regnamespace, 'headwater'::regnamespace)"
                )
                assert owners.fetchall() == [("headwater",)]
                connection.execute("ALTER PUBLICATION headwater_items SET TABLE items, session_events")
                slots.publish(connection, "headwater_items", [table_name("items")], full_rows=True)


def test_stored_password_is_set_in_the_database_after_a_crash(
    stack_directory: StackDirectory,
) -> None:
    port = free_port()
    with as_in_the_stack(stack_directory, port) as running:
        random = running.password
    resolve_credentials(stack_directory.database_credentials, "chosen")  # and a crash before the database was started
    with as_in_the_stack(stack_directory, port, "chosen") as running:
        psycopg.connect(running.url).close()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(running.url.replace("chosen", random), connect_timeout=5).close()
    stack_directory.database_credentials.unlink()
    with pytest.raises(LocalPostgresError, match="DS_STACK__POSTGRES_PASSWORD"):
        as_in_the_stack(stack_directory, port).start()


def test_headwater_psql_opens_a_shell_with_the_stored_password(stack_directory: StackDirectory) -> None:
    def psql(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headwater", "psql", "--data-dir", str(stack_directory.root), *arguments],
            env=server_environment(DS_STACK__POSTGRES_PORT=str(port)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    port = free_port()
    missing = psql()
    assert missing.returncode == 2
    assert "headwater up --profile sync" in missing.stderr
    with as_in_the_stack(stack_directory, port) as running:
        asked = ("--", "-Atc", "SELECT current_user, (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)")
        for role, expected in (("postgres", "postgres|t"), ("headwater", "headwater|f")):
            done = psql("--role", role, *asked)
            assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
        assert psql("-c", "SELECT 1").returncode == 0
        assert psql("--", "-c", "SELECT nothing").returncode == 1
        assert psql("--print-url", "--role", "headwater").stdout.strip() == running.pipeline_url
