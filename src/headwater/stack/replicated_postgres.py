"""Several Postgres servers on one machine: a primary and standbys, of which one has every commit before it returns.

One step at a time (`watch`): when the primary is gone, the standby that received most is promoted, the others follow
it, and the former primary is made again from the new one. A commit is on the primary and on at least one standby, so
the promoted one has all of them only if every standby was asked: with fewer, nothing is promoted.

As a program it does that until SIGTERM, for `headwater up --nodes`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final

import psycopg

from headwater.stack import roles
from headwater.stack.database import LocalPostgres, LocalPostgresError, database_url

log = logging.getLogger("headwater.stack")

WATCH_S: Final = 0.2
STREAM_END_S: Final = 10.0
STATE_NAME: Final = "servers.json"
PASSWORD_VARIABLE: Final = "HEADWATER_POSTGRES_PASSWORD"
_SETTINGS: Final = {
    "wal_level": "replica",
    "hot_standby": "on",
    "wal_keep_size": "256MB",
    "wal_receiver_timeout": "5s",
    "wal_sender_timeout": "5s",
    "wal_retrieve_retry_interval": "200ms",
}


class ReplicatedPostgres:
    """The servers of one directory: `pg-0`, `pg-1`, …"""

    def __init__(
        self,
        directory: Path,
        ports: tuple[int, ...],
        *,
        password: str = "",
        settings: Mapping[str, str] | None = None,
        sync: bool = True,
        die_with_thread: bool = False,
    ) -> None:
        """With `die_with_thread`, the servers end with the thread that started them, in whatever way it ends."""
        self._directory = directory
        self._password = password
        self.servers: Final = [
            LocalPostgres(
                directory / f"pg-{number}",
                port,
                password=password,
                settings={**_SETTINGS, **(settings or {}), "cluster_name": f"pg-{number}"},
                sync=sync,
                dies_with_parent=die_with_thread,
            )
            for number, port in enumerate(ports)
        ]
        self.primary, self._former = self._read_state()
        """The primary, and the one before if it has not been built again as a standby."""

    @property
    def url(self) -> str:
        """The addresses of all servers; clients use the one that accepts writes."""
        ports = [server.port for server in self.servers]
        return database_url(roles.SUPERUSER, self._password, ports, self.servers[0].name)

    def start(self) -> ReplicatedPostgres:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o755)
        primary = self.servers[self.primary]
        if primary.process is None:
            # Each step is repeated if the first start was interrupted before it. The setting is the last one, and not
            # effective yet: to create the database is a commit, which would wait for standbys that do not exist.
            primary.skips_set_up = False
            primary.start()
            self._finish_promotion()
            # By their names, because the connection of pg_basebackup is no standby.
            names = ", ".join(f"pg_{server.port}" for server in self.servers)
            self._run(primary, f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 ({names})'")
        if self._former is not None:
            shutil.rmtree(self.servers[self._former].data, ignore_errors=True)
        for number, server in enumerate(self.servers):
            if number != self.primary:
                self._follow(server)
        self._former = None
        self._run(primary, "SELECT pg_reload_conf()")
        self._write_state()
        return self

    def watch(self) -> None:
        """Do what is necessary now: promote a standby, restart one that died, rebuild a former primary."""
        primary = self.servers[self.primary]
        if not _is_running(primary):
            promoted = self._most_advanced()
            if promoted is None:
                # Not every standby can be asked, so the most advanced one is unknown. The primary may come back.
                log.error(
                    "the primary pg-%d is gone, and not every standby can be asked: it is restarted", self.primary
                )
                with suppress(LocalPostgresError):
                    primary.skips_set_up = True
                    primary.start()
                for server in self.servers:
                    if server is not primary and not _is_running(server):
                        with suppress(LocalPostgresError):
                            server.start()
                return
            self._promote(promoted)
            return
        for number, server in enumerate(self.servers):
            if number != self.primary and not _is_running(server):
                log.warning("the standby pg-%d is gone and is restarted", number)
                try:
                    self._follow(server)
                except (LocalPostgresError, OSError) as error:
                    log.error("pg-%d cannot be started: %s", number, error)

    def stop(self) -> None:
        """The standbys last: a primary waits for them when it stops."""
        servers = [self.servers[self.primary], *self.servers]
        for server in servers:
            with suppress(LocalPostgresError):
                server.stop()

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _most_advanced(self) -> int | None:
        received: dict[int, int] = {}
        for number, server in enumerate(self.servers):
            if number == self.primary:
                continue
            if not _is_running(server):
                return None
            try:
                with psycopg.connect(server.url, connect_timeout=2) as connection:
                    _wait_for_end_of_stream(connection)
                    _wait_for_end_of_replay(connection)
                    row = connection.execute(
                        "SELECT pg_wal_lsn_diff(GREATEST(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()), '0/0')"
                    ).fetchone()
            except psycopg.Error:
                return None
            assert row is not None
            received[number] = int(row[0])
        return max(received, key=lambda number: received[number])

    def _promote(self, number: int) -> None:
        # Written first: after a crash here the same one is promoted, and never the former one used again.
        self._former, self.primary = self.primary, number
        self._write_state()
        log.warning("pg-%d is gone; pg-%d becomes the primary", self._former, number)
        self._finish_promotion()
        for other, server in enumerate(self.servers):
            if other not in (self._former, number):
                server.stop()
                self._follow(server)
        # What it has that the new one has not was never acknowledged, and cannot be kept.
        shutil.rmtree(self.servers[self._former].data, ignore_errors=True)
        self._follow(self.servers[self._former])
        self._former = None
        self._write_state()

    def _finish_promotion(self) -> None:
        with psycopg.connect(self.servers[self.primary].url, autocommit=True) as connection:
            connection.execute("SELECT CASE WHEN pg_is_in_recovery() THEN pg_promote(true, 60) END")

    def _follow(self, server: LocalPostgres) -> None:
        """Run this server as a standby of the primary; make a copy of that first if it has no data."""
        source = self.servers[self.primary]
        if not server.has_data:
            self._copy(source, server)
        (server.data / "standby.signal").touch()
        conninfo = f"host=127.0.0.1 port={source.port} user={roles.SUPERUSER} application_name=pg_{server.port}"
        server.settings = {**server.settings, "primary_conninfo": conninfo}
        server.environment = {"PGPASSWORD": self._password}  # Every user can read a command line.
        server.skips_set_up = True
        if server.process is not None and server.process.poll() is not None:
            server.process = None
        server.start()

    def _copy(self, source: LocalPostgres, target: LocalPostgres) -> None:
        options = ("-h", "127.0.0.1", "-p", str(source.port), "-U", roles.SUPERUSER, "-X", "stream", "-c", "fast")
        target.create_data("pg_basebackup", *options, PGPASSWORD=self._password)

    def _run(self, server: LocalPostgres, statement: str) -> None:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(statement)

    def _read_state(self) -> tuple[int, int | None]:
        try:
            state = json.loads((self._directory / STATE_NAME).read_text())
            return int(state["primary"]), state["former"]
        except (OSError, ValueError, KeyError):
            return 0, None

    def _write_state(self) -> None:
        fresh = self._directory / f"{STATE_NAME}.new"
        fresh.write_text(json.dumps({"primary": self.primary, "former": self._former}))
        fresh.replace(self._directory / STATE_NAME)


def _wait_for_end_of_stream(standby: roles.Connection) -> None:
    """Wait until the former primary sends nothing: its processes survive it for a moment, and could still commit."""
    until_s = time.monotonic() + STREAM_END_S
    while standby.execute("SELECT 1 FROM pg_stat_wal_receiver WHERE status = 'streaming'").fetchone():
        if time.monotonic() > until_s:
            raise psycopg.OperationalError("the former primary still sends")
        time.sleep(0.02)


def _wait_for_end_of_replay(standby: roles.Connection) -> None:
    """Wait until a standby that was just started has read its own log: only then it says how much it has received."""
    until_s = time.monotonic() + STREAM_END_S
    while standby.execute("SELECT pg_last_wal_receive_lsn() IS NULL").fetchone() == (True,):
        if time.monotonic() > until_s:
            raise psycopg.OperationalError("the standby is still reading its own log")
        time.sleep(0.02)


def _is_running(server: LocalPostgres) -> bool:
    return server.process is not None and server.process.poll() is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("ports", type=int, nargs="+")
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    is_stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_stopping
        is_stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    password = os.environ.get(PASSWORD_VARIABLE, "")
    servers = ReplicatedPostgres(given.directory, tuple(given.ports), password=password, die_with_thread=True)
    try:
        servers.start()
        while not is_stopping:
            servers.watch()
            time.sleep(WATCH_S)
    except LocalPostgresError as error:
        log.error("%s", error)
        return 1
    finally:
        servers.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
