"""The server and the database of a trial: durable, killed and restarted on their ports, and restored from backups.

Invariant: a backup has everything that was acknowledged before it, and a restore has nothing that was written after it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from headwater.stack.database import LocalPostgres, LocalPostgresError
from tests.ports import free_port
from tests.postgres.databases import database
from tests.serving import Server, serve
from tests.spark.session import worker_environment
from tests.waiting import wait_until

SERVER_SETTINGS: dict[str, Any] = {
    "DS_STORAGE__MODE": "file-durable",
    "DS_STORAGE__DATA_DIR": "data",
    "DS_LIMITS__MAX_STREAM_BYTES": "0",
    "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "5",
}
BACKUP_TIMEOUT_S = 240.0


class Services:
    """Both are running, except during a call."""

    def __init__(self, directory: Path, postgres: LocalPostgres) -> None:
        self._directory = directory
        self._running: AbstractContextManager[Server] | None = None
        self._server: Server | None = None
        self._port = free_port()
        self._kept_data = postgres.directory / "kept-data"
        self.postgres = postgres
        self._start_server()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def streams(self) -> str:
        return f"{self.url}/v1/stream"

    def kill_server(self, pause_s: float) -> None:
        self._end_server()
        time.sleep(pause_s)
        self._start_server()

    def kill_postgres(self, pause_s: float) -> None:
        self.postgres.kill()
        time.sleep(pause_s)
        self._start_postgres()

    def back_up(self) -> None:
        """The server's backup is taken while it runs; the database is copied while it is stopped."""
        shutil.rmtree(self._directory / "backup", ignore_errors=True)
        self._command("backup", "backup")
        self.postgres.stop()
        shutil.rmtree(self._kept_data, ignore_errors=True)
        _copy(self.postgres.data, self._kept_data)
        self.postgres.start()

    def restore(self) -> None:
        """Kill both and restore them from the backup."""
        self._end_server()
        self.postgres.kill()
        self._command("restore", "backup", "--force")
        shutil.rmtree(self.postgres.data)
        _copy(self._kept_data, self.postgres.data)
        self._start_server()
        self._start_postgres()

    def stop(self) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)

    def _start_server(self) -> None:
        self._running = serve(directory=self._directory, port=self._port, **SERVER_SETTINGS)
        self._server = self._running.__enter__()

    def _start_postgres(self) -> None:
        """Start Postgres. After a kill it does not start until its last process has released the shared memory."""

        def has_started() -> bool:
            try:
                self.postgres.start()
            except LocalPostgresError as error:
                if "still in use" not in str(error):
                    raise
                return False
            return True

        wait_until(has_started, what="Postgres starts again", every_s=0.2)

    def _end_server(self) -> None:
        assert self._server is not None
        assert self._running is not None
        self._server.kill()
        self._running.__exit__(None, None, None)
        self._running = None

    def _command(self, name: str, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "headwater", name, *arguments, "--data-dir", "data", "--mode", "file-durable"],
            cwd=self._directory,
            env=os.environ | worker_environment(),
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=BACKUP_TIMEOUT_S,
        )


def _copy(source: Path, target: Path) -> None:
    """Copy with owners and modes, which Postgres checks."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True, timeout=BACKUP_TIMEOUT_S)


@contextmanager
def services(directory: Path) -> Iterator[Services]:
    directory.mkdir(parents=True, exist_ok=True)
    with database() as postgres:
        running = Services(directory, postgres)
        try:
            yield running
        finally:
            running.stop()
