"""The whole loop under kill -9: whatever dies and in whatever order, table equals stream equals what was written.

Twenty rounds, the driver with its JVM among the victims; under `--long` sixty, in random order.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest

from headwater.stack.database import LocalPostgres
from tests.pipeline.syncing import Sync, syncing
from tests.pipeline.waiting import eventually
from tests.ports import free_port
from tests.postgres.databases import database
from tests.serving import serve

VICTIMS = (*("postgres", "server", "worker") * 6, "driver", "server")


class Writers:
    """Append events and insert rows, each under a number of its own, and count only what was acknowledged."""

    def __init__(self, streams: str, postgres: str) -> None:
        self._streams = streams
        self._postgres = postgres
        self._stop = threading.Event()
        self.events = 0
        self.rows = 0
        self._threads = [threading.Thread(target=self._append), threading.Thread(target=self._insert)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _append(self) -> None:
        with httpx.Client(timeout=5.0) as http:
            while not self._stop.is_set():
                headers = {
                    "Content-Type": "application/json",
                    "Producer-Id": "writer",
                    "Producer-Epoch": "0",
                    "Producer-Seq": str(self.events),
                }
                body = json.dumps([{"key": str(self.events), "type": "count"}])
                with contextlib.suppress(httpx.HTTPError):
                    answer = http.post(f"{self._streams}/session-events", content=body, headers=headers)
                    if answer.status_code in {200, 204}:
                        self.events += 1
                self._stop.wait(0.02)

    def _insert(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(psycopg.Error), psycopg.connect(self._postgres, connect_timeout=5) as sql:
                while not self._stop.is_set():
                    # A commit whose answer was lost is tried again under the same number.
                    sql.execute(
                        "INSERT INTO items (id, title) VALUES (%s, 'count') ON CONFLICT (id) DO NOTHING",
                        [self.rows + 1],
                    )
                    sql.commit()
                    self.rows += 1
                    self._stop.wait(0.02)
            self._stop.wait(0.05)


def kill_a_worker(sync: Sync, chance: random.Random) -> None:
    """A Python process of Spark's: on one machine, tasks run in those."""
    workers: list[psutil.Process] = []
    for process in psutil.Process(sync.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("pyspark.daemon" in word for word in process.cmdline()):
                workers.append(process)
    if workers:
        chance.choice(workers).kill()


@pytest.mark.timeout(1800)
def test_table_equals_stream_equals_what_was_written(tmp_path: Path, long: bool) -> None:
    chance = random.Random(7)
    victims = list(VICTIMS) * (3 if long else 1)
    if long:
        chance.shuffle(victims)
    port = free_port()
    settings: Any = {"DS_STORAGE__MODE": "file-durable", "DS_LIMITS__MAX_STREAM_BYTES": "0"}
    with database() as postgres, contextlib.ExitStack() as servers, contextlib.ExitStack() as syncs:
        server = servers.enter_context(serve(directory=tmp_path, port=port, **settings))
        streams = f"{server.url}/v1/stream"
        sync = syncs.enter_context(syncing(tmp_path, server.url, postgres.url))
        sync.wait_until_ready()
        with Writers(streams, postgres.url) as writers:
            for victim in victims:
                time.sleep(chance.uniform(0.3, 1.0))
                match victim:
                    case "postgres":
                        postgres.kill()
                        time.sleep(chance.uniform(0.0, 0.5))
                        postgres.start()
                    case "server":
                        server.kill()
                        servers.pop_all().close()
                        server = servers.enter_context(serve(directory=tmp_path, port=port, **settings))
                    case "worker":
                        kill_a_worker(sync, chance)
                    case _:
                        sync.kill()
                        sync = syncs.enter_context(syncing(tmp_path, server.url, postgres.url))
            time.sleep(0.5)
        assert writers.events > 0
        assert writers.rows > 0
        check(streams, postgres, writers, sync)


def check(streams: str, postgres: LocalPostgres, writers: Writers, sync: Sync) -> None:
    def in_table() -> list[tuple[str, str]]:
        with psycopg.connect(postgres.url) as sql:
            found = sql.execute("SELECT event_key, ds_offset FROM session_events ORDER BY id").fetchall()
            return [(str(key), str(offset)) for key, offset in found]

    def in_stream(name: str) -> list[Any]:
        found: list[Any] = []
        offset = "-1"
        while True:
            answer = httpx.get(f"{streams}/{name}", params={"offset": offset}, timeout=30.0)
            answer.raise_for_status()
            found += answer.json()
            offset = answer.headers["Stream-Next-Offset"]
            if answer.headers.get("Stream-Up-To-Date") == "true":
                return found

    with psycopg.connect(postgres.url) as sql:
        items = [row[0] for row in sql.execute("SELECT id FROM items ORDER BY id")]
    appended = [one["key"] for one in in_stream("session-events")]
    # The last of each may have been taken without its writer hearing of it.
    assert len(items) - writers.rows in {0, 1}
    assert len(appended) - writers.events in {0, 1}
    assert appended == [str(n) for n in range(len(appended))]
    try:
        table = eventually(in_table, lambda found: len(found) >= len(appended), 240)
        told = eventually(lambda: in_stream("pg-items"), lambda found: len(found) >= len(items), 240)
    except AssertionError as error:
        raise AssertionError(f"{error}\nthe log of headwater sync ends:\n{sync.log()[-4000:]}") from None
    assert [key for key, _ in table] == appended, "each event once, and in order"
    assert len({offset for _, offset in table}) == len(table)
    assert [one["id"] for one in told] == items, "each row once, and in order"
