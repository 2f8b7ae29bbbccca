"""Many readers of a few shapes of one table, while rows change and processes are killed.

Invariant: at the end every reader has the rows of a query, so no reader missed a change or applied one twice.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import Any

import psycopg

from tests.shapes.npm_readers import Readers
from tests.shapes.serving import Shapes

TABLE = "changing"
SHAPES: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    # The parameters of the client, the condition in SQL, and the columns that are compared.
    ({}, "true", ("id", "title", "n")),
    ({"where": "n < 500"}, "n < 500", ("id", "title", "n")),
    ({"where": "title LIKE $1", "params": ["%7%"]}, "title LIKE '%7%'", ("id", "title", "n")),
    ({"columns": ["id", "title"], "where": "n IS NOT NULL"}, "n IS NOT NULL", ("id", "title")),
    ({"replica": "full", "where": "n BETWEEN 100 AND 900"}, "n BETWEEN 100 AND 900", ("id", "title", "n")),
]


def prepare(running: Shapes, rows: int = 1000) -> None:
    running.sql(f"CREATE TABLE {TABLE} (id int PRIMARY KEY, title text, n int)")
    running.sql(f"INSERT INTO {TABLE} SELECT i, 't' || i, i FROM generate_series(1, {rows}) i")


def open_readers(running: Shapes, readers: Readers, count: int) -> list[str]:
    names = []
    for number in range(count):
        params, _, columns = SHAPES[number % len(SHAPES)]
        name = f"reader-{number}"
        # Half of the readers of each shape get events, the others poll.
        sse = (number // len(SHAPES)) % 2 == 1
        readers.open(name, running.url, {"table": TABLE, **params}, columns, sse=sse)
        names.append(name)
    return names


def wait_for_all(running: Shapes, readers: Readers, names: list[str], timeout_s: float) -> None:
    for number, (_, condition, columns) in enumerate(SHAPES):
        rows = running.sql(f"SELECT {', '.join(columns)} FROM {TABLE} WHERE {condition}")
        readers.wait(names[number :: len(SHAPES)], rows, timeout_s)


class Writer:
    """Changes rows in small transactions; a transaction that was not committed is retried."""

    def __init__(self, url: str, changes: int, seed: int) -> None:
        self._url = url
        self._left = changes
        self._chance = random.Random(seed)
        self._next_id = 1_000_000
        self.done = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self.done < self._left:
            with contextlib.suppress(psycopg.Error), psycopg.connect(self._url, connect_timeout=5) as connection:
                while self.done < self._left:
                    count = min(self._chance.randint(1, 8), self._left - self.done)
                    for _ in range(count):
                        self._change(connection)
                    if self._chance.random() < 0.1:
                        connection.rollback()
                        continue
                    connection.commit()
                    self.done += count

    def _change(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        chance = self._chance
        pick = chance.random()
        title = f"t{chance.randint(1, 999)}"
        n = None if chance.random() < 0.05 else chance.randint(0, 1000)
        if pick < 0.3:
            self._next_id += 1
            connection.execute(b"INSERT INTO changing VALUES (%s, %s, %s)", [self._next_id, title, n])
        elif pick < 0.8:
            query = b"UPDATE changing SET title = %s, n = %s WHERE id = (SELECT id FROM changing OFFSET %s LIMIT 1)"
            connection.execute(query, [title, n, chance.randint(0, 500)])
        else:
            query = b"DELETE FROM changing WHERE id = (SELECT id FROM changing OFFSET %s LIMIT 1)"
            connection.execute(query, [chance.randint(0, 500)])

    def wait_for(self, changes: int) -> None:
        deadline = time.monotonic() + 300
        while self.done < changes and self._thread.is_alive():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def join(self) -> None:
        self._thread.join(300)
        assert not self._thread.is_alive()
