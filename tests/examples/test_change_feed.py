"""The change feed: every change once and in order, also when the publisher dies between sending and noting it."""

from __future__ import annotations

import random
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headwater.client import NO_RETRY, ConnectionLostError, Stream
from tests.client.proxies import Proxy, running
from tests.examples.loading import example
from tests.serving import Server

feed = example("change_feed")


@pytest.fixture
def stream(server: Server, stream_name: Callable[[], str]) -> Iterator[Stream]:
    with Stream(server.stream_url(stream_name())) as stream:
        stream.create()
        yield stream


def test_a_replica_built_from_the_stream_is_the_table(stream: Stream, tmp_path: Path) -> None:
    chance = random.Random(5)
    with closing(feed.open_database(str(tmp_path / "db"))) as database:
        for _ in range(3):
            feed.change_at_random(database, chance, 120)
            assert feed.publish(database, stream) == 120
            assert feed.publish(database, stream) == 0
            assert feed.replicate(stream) == feed.table(database) != {}
        assert len(list(stream.read())) == 360


class Dying(Proxy):
    """Cuts connections: before a request arrives, or after it was processed and before it is answered."""

    def __init__(self, target: str, chance: random.Random) -> None:
        super().__init__(target)
        self._chance = chance
        self._fate = "fine"
        self.deaths = 0

    def on_request(self, data: bytes, client: socket.socket) -> bool:
        if not data.startswith(b"POST"):
            return True
        self._fate = self._chance.choice(["fine", "before", "after"])
        if self._fate == "before":
            self.deaths += 1
            client.shutdown(socket.SHUT_RDWR)
        return self._fate != "before"

    def on_response(self, data: bytes) -> tuple[bytes, bool]:
        if self._fate != "after":
            return data, True
        self._fate = "fine"
        self.deaths += 1
        return b"", False


def test_a_publisher_that_dies_anywhere_sends_each_change_once(server: Server, stream: Stream, tmp_path: Path) -> None:
    chance = random.Random(7)
    dying = Dying(server.url, random.Random(8))
    path = str(tmp_path / "db")
    with running(dying):
        for _ in range(12):
            url = stream.url.replace(server.url, dying.url)
            with closing(feed.open_database(path)) as database, Stream(url, retry=NO_RETRY) as broken:
                feed.change_at_random(database, chance, 10)
                try:
                    feed.publish(database, broken)
                except ConnectionLostError:
                    continue
    assert dying.deaths >= 4
    with closing(sqlite3.connect(path)) as database:
        feed.publish(database, stream)
        assert len(list(stream.read())) == 120
        assert feed.replicate(stream) == feed.table(database)
