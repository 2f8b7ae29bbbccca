"""The change feed: every change once and in order, also when the publisher dies between sending and noting it."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.examples.loading import example
from tests.serving import Server

feed = example("change_feed")


@pytest.fixture
def stream(server: Server, stream_name: Callable[[], str]) -> str:
    url = server.stream_url(stream_name())
    httpx.put(url, headers={"Content-Type": "application/json"}).raise_for_status()
    return url


def test_a_replica_built_from_the_stream_is_the_table(stream: str, tmp_path: Path) -> None:
    chance = random.Random(5)
    with closing(feed.open_database(str(tmp_path / "db"))) as database, httpx.Client() as http:
        for _ in range(3):
            feed.change_at_random(database, chance, 120)
            assert feed.publish(database, stream, http) == 120
            assert feed.publish(database, stream, http) == 0
            assert feed.replicate(stream, http) == feed.table(database) != {}
        assert len(list(feed.read_all(stream, http))) == 360


class Dying(httpx.BaseTransport):
    """Loses what the server answered, every other time: before the request, or after it was done."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._real = httpx.HTTPTransport()
        self.deaths = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        fate = self._chance.choice(["fine", "before", "after"])
        if fate == "fine":
            return self._real.handle_request(request)
        if fate == "after":
            answer = self._real.handle_request(request)
            answer.read()
            answer.close()
        self.deaths += 1
        raise httpx.ReadError("the publisher died here")

    def close(self) -> None:
        self._real.close()
        self._real = httpx.HTTPTransport()


def test_a_publisher_that_dies_anywhere_sends_each_change_once(stream: str, tmp_path: Path) -> None:
    chance = random.Random(7)
    dying = Dying(chance)
    path = str(tmp_path / "db")
    for _ in range(12):
        with closing(feed.open_database(path)) as database, httpx.Client(transport=dying) as http:
            feed.change_at_random(database, chance, 10)
            try:
                feed.publish(database, stream, http)
            except httpx.ReadError:
                continue
    assert dying.deaths >= 4
    with closing(sqlite3.connect(path)) as database, httpx.Client() as http:
        feed.publish(database, stream, http)
        assert len(list(feed.read_all(stream, http))) == 120
        assert feed.replicate(stream, http) == feed.table(database)
