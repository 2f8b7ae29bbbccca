"""Timeouts that are due together are handled in several iterations of the event loop, and each once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from headwater.config import Settings, StorageSettings
from headwater.engine.open_storage import open_store
from headwater.http import server as http_server
from headwater.http.context import Context
from headwater.http.deadlines import Deadlines
from headwater.http.flow import TURNS_S
from headwater.http.server import build_context, build_engine

COSTLY_S = 0.001
PER_ITERATION = int(TURNS_S / COSTLY_S) + 1
COUNT = 40
UNREAD_BYTES = 1000


class Due:
    """A connection whose timeout takes time to handle; it can have unread responses."""

    unread_bytes = UNREAD_BYTES

    def __init__(self, context: Context, since_s: float, *, is_slow_reader: bool) -> None:
        self._context = context
        self.waits_since_s = since_s
        self.is_slow_reader = is_slow_reader
        self.checks = self.aborts = 0
        self.fails = False
        context.connections.add(self)

    def check_time(self, now_s: float) -> None:
        self.checks += 1
        _compute()
        assert not self.fails, "as the test asks for"

    def drain(self) -> None:
        raise AssertionError("the server is not stopping")

    def abort(self) -> None:
        self.aborts += 1
        self.is_slow_reader = False
        _compute()


def _compute() -> None:
    ends_at = time.perf_counter() + COSTLY_S
    while time.perf_counter() < ends_at:
        pass


def server(max_unread_bytes: int = 2**20) -> Context:
    loop = asyncio.get_running_loop()
    settings = Settings(storage=StorageSettings(mode="memory"), limits={"max_unread_bytes": max_unread_bytes})
    engine = build_engine(settings, open_store(settings.storage), loop)
    return build_context(settings, engine, None, loop, 10_000)


async def most_of_an_iteration(connections: list[Due], what: str, iterations: int = 60) -> int:
    most = 0
    for _ in range(iterations):
        before = sum(getattr(one, what) for one in connections)
        await asyncio.sleep(0)
        most = max(most, sum(getattr(one, what) for one in connections) - before)
    return most


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_timeouts_of_many_connections_are_handled_in_several_iterations() -> None:
    async def test() -> None:
        context = server()
        connections = [Due(context, 0.0, is_slow_reader=False) for _ in range(COUNT)]
        context.sweep()
        assert sum(one.checks for one in connections) <= PER_ITERATION
        context.sweep()  # While the first one continues, no other begins.
        assert sum(one.checks for one in connections) <= PER_ITERATION
        assert await most_of_an_iteration(connections, "checks") <= PER_ITERATION
        assert {one.checks for one in connections} == {1}
        context.sweep()
        await most_of_an_iteration(connections, "checks")
        assert {one.checks for one in connections} == {2}

    run(test())


def test_those_who_have_not_read_for_longest_are_disconnected_in_several_iterations() -> None:
    async def test() -> None:
        context = server(max_unread_bytes=UNREAD_BYTES * COUNT // 4)
        connections = [Due(context, float(number), is_slow_reader=True) for number in range(COUNT)]
        context.sweep()
        assert sum(one.aborts for one in connections) <= PER_ITERATION
        assert await most_of_an_iteration(connections, "aborts") <= PER_ITERATION
        assert [one.aborts for one in connections] == [1] * (COUNT * 3 // 4) + [0] * (COUNT // 4)
        assert context.metrics.slow_followers == COUNT * 3 // 4

    run(test())


def test_check_that_fails_does_not_keep_others_from_running() -> None:
    async def test() -> None:
        context = server()
        connections = [Due(context, 0.0, is_slow_reader=False) for _ in range(COUNT)]
        for one in connections[::2]:
            one.fails = True
        context.sweep()
        await most_of_an_iteration(connections, "checks")
        assert {one.checks for one in connections[1::2]} == {1}

    run(test())


def test_sweeps_continue_after_one_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ended for ever when a descriptor was missing, and with them all timeouts."""

    class Memory:
        def __init__(self) -> None:
            self.checks = 0
            self.is_third = asyncio.Event()

        def check(self, now_s: float) -> None:
            self.checks += 1
            if self.checks == 3:
                self.is_third.set()
            raise OSError("Too many open files")

    async def test() -> None:
        memory = Memory()
        monkeypatch.setattr(http_server, "memory_return", lambda: memory)
        monkeypatch.setattr(http_server, "SWEEP_S", 0.001)
        context = server()
        one = Due(context, 0.0, is_slow_reader=False)
        sweeping = asyncio.create_task(http_server.sweep(context))
        async with asyncio.timeout(60):
            await memory.is_third.wait()
        sweeping.cancel()
        assert one.checks >= 2

    run(test())


def test_deadline_that_fails_does_not_keep_later_ones_from_being_noticed() -> None:
    async def test() -> None:
        is_due = asyncio.Event()

        def fail() -> None:
            raise RuntimeError("the test made this fail")

        deadlines = Deadlines(asyncio.get_running_loop(), 0.001)
        deadlines.set(fail)
        deadlines.set(is_due.set)
        async with asyncio.timeout(60):
            await is_due.wait()

    run(test())
