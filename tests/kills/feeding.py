"""Write to streams and tables continuously, through every kill, and keep an exact record of it.

Invariant: `Written` has every acknowledged write once, in order: an append or a transaction whose response was lost is
repeated in a way that has no effect if the first attempt succeeded.
"""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psycopg

from tests.kills.application import SOURCES
from tests.pipeline.test_fold import event

FOLDS, LAKE = "folds", "lake"
IN_BUCKETS = ("s0", "s1", "s2")
PAUSE_S = 0.25
"""Limits the backlog on a slow machine, on which drivers take a minute to start."""

Change = tuple[str, str, int | None]
"""Operation, key and new value of a row."""


@dataclass(slots=True)
class Written:
    streams: dict[str, list[Any]] = field(default_factory=dict)
    """The messages by path: `/v1/stream/NAME` or `/ds/BUCKET/NAME`."""
    changes: list[Change] = field(default_factory=list)
    """Changes of the table `ledger`."""
    rows: set[int] = field(default_factory=set)

    def of(self, root: str) -> dict[str, list[Any]]:
        """The messages of the streams under a root, by name."""
        return {path.removeprefix(root): sent for path, sent in self.streams.items() if path.startswith(root)}

    def copy(self) -> Written:
        return Written({path: list(sent) for path, sent in self.streams.items()}, list(self.changes), set(self.rows))


def set_up(url: str, postgres: str) -> Written:
    """Create the streams and the table."""
    paths = [f"/v1/stream/{name}" for name in SOURCES]
    with httpx.Client(base_url=url, timeout=60.0) as http:
        for bucket in (FOLDS, LAKE):
            http.put(f"/ds/{bucket}").raise_for_status()
            paths += [f"/ds/{bucket}/{name}" for name in IN_BUCKETS]
        for path in paths:
            http.put(path, headers={"Content-Type": "application/json"}).raise_for_status()
    with psycopg.connect(postgres) as connection:
        connection.execute("CREATE TABLE ledger (id int PRIMARY KEY, n int NOT NULL)")
    return Written({path: [] for path in paths})


class Feeder(threading.Thread):
    """Runs from `start()` to `stop()`; the epoch must grow from one feeder to the next."""

    def __init__(self, url: str, postgres: str, rng: random.Random, written: Written, epoch: int) -> None:
        super().__init__(name="feeder", daemon=True)
        self._url = url
        self._postgres = postgres
        self._rng = rng
        self._epoch = epoch
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.written = written

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=10.0) as http:
                round_number = 0
                while not self._done.wait(PAUSE_S):
                    for path in self.written.streams:
                        self._append(http, path, round_number)
                    self._change()
                    round_number += 1
        except BaseException as error:
            self._error = error

    def stop(self) -> None:
        """Stop after the append or transaction in progress is acknowledged."""
        self._done.set()
        self.join(timeout=120)
        assert not self.is_alive(), "the feeder is stuck"
        assert self._error is None, f"the feeder failed: {self._error!r}"

    def _append(self, http: httpx.Client, path: str, seq: int) -> None:
        sent = self.written.streams[path]
        count = self._rng.randrange(1, 12)
        if path.startswith("/ds/"):
            news = [event(self._rng) for _ in range(count)]
        else:
            news = [
                {"key": str(n), "type": "count", "pad": "x" * (n % 60)} for n in range(len(sent), len(sent) + count)
            ]
        headers = {
            "Content-Type": "application/json",
            "Producer-Id": f"feeder-{path.replace('/', '-')}",
            "Producer-Epoch": str(self._epoch),
            "Producer-Seq": str(seq),
        }
        body = json.dumps(news)
        while True:
            try:
                answer = http.post(path, content=body, headers=headers)
                if answer.status_code < 300:
                    break
                assert answer.status_code >= 500, answer.text
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        sent += news

    def _change(self) -> None:
        """One transaction: a new row, and often an update or a delete of an earlier one."""
        number = len(self.written.changes)
        rows = self.written.rows
        changes: list[Change] = [("insert", str(number), number)]
        chance = self._rng.random()
        if rows and chance < 0.6:
            earlier = self._rng.choice(sorted(rows))
            changes.append(("update", str(earlier), number) if chance < 0.4 else ("delete", str(earlier), None))
        while True:
            try:
                with psycopg.connect(self._postgres, connect_timeout=10) as connection:
                    for operation, key, value in changes:
                        connection.execute(_STATEMENTS[operation], {"key": key, "value": value})
                break
            except psycopg.OperationalError:
                time.sleep(0.05)
        for operation, key, _ in changes:
            (rows.discard if operation == "delete" else rows.add)(int(key))
        self.written.changes += changes


_STATEMENTS = {
    "insert": "INSERT INTO ledger VALUES (%(key)s::int, %(value)s) ON CONFLICT DO NOTHING",
    "update": "UPDATE ledger SET n = %(value)s WHERE id = %(key)s::int AND n < %(value)s",
    "delete": "DELETE FROM ledger WHERE id = %(key)s::int",
}
"""Each has no effect if it is repeated."""
