"""The event-sourced counter: never below zero, no event lost, however many write at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.examples.loading import example
from tests.serving import Server

counter = example("counter")


def test_it_adds_up_and_keeps_its_rule(server: Server, stream_name: Callable[[], str]) -> None:
    with counter.open_counter(server.url, stream_name()) as stream:
        assert counter.add(stream, 5).value == 5
        assert counter.add(stream, -2).value == 3
        with pytest.raises(counter.WouldBeNegative):
            counter.add(stream, -4)
        assert counter.load(stream) == counter.Counter(value=3, version=2)


def test_many_writers_lose_nothing_and_snapshots_shorten_the_way(
    server: Server, stream_name: Callable[[], str]
) -> None:
    name = stream_name()

    def writer(number: int) -> int:
        taken = 0
        with counter.open_counter(server.url, name) as stream:
            for turn in range(15):
                try:
                    counter.add(stream, 3 if turn % 2 else -2)
                except counter.WouldBeNegative:
                    continue
                taken += 3 if turn % 2 else -2
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = sum(pool.map(writer, range(4)))
    with counter.open_counter(server.url, name) as stream:
        state = counter.load(stream)
        assert state.value == taken >= 0
        if state.version >= counter.SNAPSHOT_EVERY:
            with stream.bootstrap() as bootstrap:
                assert bootstrap.info.has_snapshot
                assert len(list(bootstrap.parts)) <= 1 + state.version - counter.SNAPSHOT_EVERY
        before = state.version
        for _ in range(counter.SNAPSHOT_EVERY):
            counter.add(stream, 1)
        assert counter.load(stream).version == before + counter.SNAPSHOT_EVERY
        assert httpx.get(f"{stream.url}?offset=-1").status_code == 410, "what the snapshot stands for is gone"
