"""The Postgres servers of a cluster on one machine: a first start that was interrupted is continued by the next."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from headwater.stack.database import LocalPostgres, LocalPostgresError
from headwater.stack.replicated_postgres import ReplicatedPostgres, main
from tests.ports import free_port
from tests.postgres.databases import interrupted
from tests.waiting import LIMIT_S, wait_until


class KilledError(BaseException):
    """Instead of the end of the process."""


@pytest.fixture
def prepared() -> Iterator[Callable[..., ReplicatedPostgres]]:
    """Makes the servers of one directory, each time as another process would."""
    directory = Path(tempfile.mkdtemp(prefix="headwater-pg-"))
    directory.chmod(0o755)
    ports = free_port(), free_port()
    made: list[ReplicatedPostgres] = []

    def make(password: str = "") -> ReplicatedPostgres:
        for servers in made:
            servers.kill()
            # The next ones do not know them, and Postgres does not start beside a process of its former run.
            for left in (each for server in servers.servers for each in server._left_over):
                left.wait(LIMIT_S)
        made.append(ReplicatedPostgres(directory, ports, password=password, sync=False))
        return made[-1]

    try:
        yield make
    finally:
        for servers in made:
            servers.kill()
        shutil.rmtree(directory)


def check(servers: ReplicatedPostgres) -> None:
    """Check that a commit is replicated to the standby."""
    standby = servers.servers[1]
    with psycopg.connect(servers.servers[0].url, autocommit=True) as connection:
        wait_until(
            lambda: connection.execute("SELECT application_name, sync_state FROM pg_stat_replication").fetchall(),
            lambda found: found == [(f"pg_{standby.port}", "quorum")],
            what="a synchronous standby",
        )
        connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
    with psycopg.connect(standby.url) as connection:
        wait_until(
            lambda: connection.execute("SELECT to_regclass('kept') IS NOT NULL").fetchone() == (True,),
            what="the table on the standby",
        )
        assert connection.execute("SELECT n FROM kept").fetchone() == (1,)


def test_interrupted_copy_is_made_again(prepared: Callable[..., ReplicatedPostgres]) -> None:
    servers = prepared()
    primary, standby = servers.servers
    with (
        interrupted(primary, "pg_basebackup"),
        interrupted(standby, "pg_basebackup"),
        pytest.raises(LocalPostgresError, match="pg_basebackup"),
    ):
        servers.start()
    check(prepared().start())


def test_start_without_the_database_is_continued(
    prepared: Callable[..., ReplicatedPostgres], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(server: LocalPostgres) -> None:
        server._as_superuser().close()
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(LocalPostgres, "_set_up", killed)
        with pytest.raises(KilledError):
            prepared().start()
    check(prepared().start())


def test_start_before_replication_became_synchronous_is_continued(
    prepared: Callable[..., ReplicatedPostgres], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(ReplicatedPostgres, "_run", killed)
        with pytest.raises(KilledError):
            prepared().start()
    check(prepared().start())


def test_complete_copy_is_kept(prepared: Callable[..., ReplicatedPostgres]) -> None:
    servers = prepared().start()
    marks = [server.data / "mark" for server in servers.servers]
    for mark in marks:
        mark.touch()
    check(prepared().start())
    assert all(mark.exists() for mark in marks)


def test_password_of_the_standbys_is_in_no_command_line(prepared: Callable[..., ReplicatedPostgres]) -> None:
    servers = prepared(password="Secret-for-replication").start()
    check(servers)
    for server in servers.servers:
        assert server.process is not None
        assert "Secret-for-replication" not in " ".join(psutil.Process(server.process.pid).cmdline())


def test_start_that_fails_says_why_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: ReplicatedPostgres) -> None:
        raise LocalPostgresError("Postgres cannot access the directory.")

    monkeypatch.setattr(ReplicatedPostgres, "start", fail)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["replicated_postgres", str(tmp_path), "1", "2"])
    assert main() == 1
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("Postgres cannot access the directory.", None)
    ]
