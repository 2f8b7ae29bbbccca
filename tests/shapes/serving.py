"""A real `headwater shapes` for a test, as a child process, with its own stream server and Postgres.

Invariant: all children have exited after the `with` block; a test may kill and restart each of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psycopg

from headwater.stack.database import LocalPostgres
from tests.ports import free_port
from tests.postgres.databases import database
from tests.serving import Server, server_environment


class Child:
    """A `headwater` command on its own port, which can be killed and restarted."""

    def __init__(self, command: str, directory: Path, settings: dict[str, str]) -> None:
        self.port = free_port()
        self.directory = directory
        self.process: Server | None = None
        self._command = command
        self._settings = settings

    def start(self) -> None:
        child = subprocess.Popen(
            [sys.executable, "-m", "headwater", self._command, "--port", str(self.port)],
            cwd=self.directory,
            env=server_environment(**self._settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.process = Server(child, self.directory)
        self.process.wait_until_listening()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process = None

    def stop(self) -> int:
        assert self.process is not None
        code = self.process.stop()
        self.process = None
        return code

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Shapes(Child):
    """`headwater shapes`, with its Postgres and its stream server. `url` is that of the Shape API."""

    def __init__(self, postgres: LocalPostgres, streams: Child, directory: Path, **settings: str) -> None:
        self.streams_url = f"http://127.0.0.1:{streams.port}"
        defaults = {"POSTGRES_URL": postgres.url, "DS_SERVER_URL": self.streams_url}
        super().__init__("shapes", directory, {**defaults, **settings})
        self.postgres = postgres
        self.streams = streams
        self.url = f"http://127.0.0.1:{self.port}/v1/shape"
        self.http = httpx.Client(timeout=60.0)

    def log(self) -> str:
        return self.process.log() if self.process is not None else ""

    def sql(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement in its own transaction."""
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description is not None else []

    # -- requests to the API -------------------------------------------------------------------------------------

    def get(self, **query: Any) -> httpx.Response:
        return self.http.get(self.url, params={"offset": "-1", **query})

    def everything(self, **query: Any) -> Reading:
        """Read a shape from its start until it is up to date."""
        reading = Reading(self, query)
        reading.catch_up()
        return reading


class Reading:
    """A reader of one shape that folds its messages."""

    def __init__(self, shapes: Shapes, query: dict[str, Any]) -> None:
        self._shapes = shapes
        self._query = query
        self.handle = ""
        self.offset = "-1"
        self.cursor = ""
        self.rows: dict[str, dict[str, Any]] = {}
        self.messages: list[dict[str, Any]] = []
        self.responses = 0
        self.up_to_date = False
        self.last: httpx.Response | None = None

    def step(self, **more: Any) -> httpx.Response:
        query = {**self._query, "offset": self.offset, **more}
        if self.handle:
            query["handle"] = self.handle
        while (response := self._shapes.http.get(self._shapes.url, params=query)).status_code == 503:
            time.sleep(0.05)
        self.last = response
        self.responses += 1
        if response.status_code == 409:
            self.rows.clear()
            self.messages.clear()
            self.handle, self.offset, self.up_to_date = "", "-1", False
            return response
        assert response.status_code == 200, response.text
        self.handle = response.headers["electric-handle"]
        self.offset = response.headers["electric-offset"]
        for message in response.json():
            self.fold(message)
        self.up_to_date = "electric-up-to-date" in response.headers
        return response

    def fold(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        match message["headers"].get("operation"):
            case "insert":
                assert message["key"] not in self.rows, f"inserted twice: {message}"
                self.rows[message["key"]] = dict(message["value"])
            case "update":
                self.rows[message["key"]].update(message["value"])
            case "delete":
                del self.rows[message["key"]]

    def catch_up(self) -> None:
        while not self.up_to_date:
            self.step()

    def live(self, until: Any = None) -> None:
        """Send one long-poll, or as many as needed until a condition holds."""
        while True:
            response = self.step(live="true", cursor=self.cursor)
            if response.status_code == 409:
                self.catch_up()
            else:
                self.cursor = response.headers["electric-cursor"]
            if until is None or until(self):
                return


@contextmanager
def shapes(tables: str, **settings: str) -> Iterator[Shapes]:
    """Run all three."""
    with tempfile.TemporaryDirectory(prefix="headwater-shapes-") as temporary, database() as postgres:
        directory = Path(temporary)
        storage = {"DS_STORAGE__MODE": "file-durable", "DS_STORAGE__DATA_DIR": str(directory / "streams")}
        chosen = {
            "DS_SHAPES__TABLES": tables,
            "DS_SHAPES__LONG_POLL_TIMEOUT_SECS": "1",
            "DS_SHAPES__CHECK_INTERVAL_SECS": "0.5",
            "DS_SHAPES__READY_TIMEOUT_SECS": "0.5",
            "DS_SHAPES__ALLOW_DELETE": "true",
            **settings,
        }
        with (
            Child("serve", directory, storage) as streams,
            Shapes(postgres, streams, directory, **chosen) as running,
        ):
            yield running
            running.http.close()
