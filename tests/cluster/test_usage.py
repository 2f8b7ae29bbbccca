"""Workers report their usage to each other: when it changes, and when they are connected."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from headwater.cluster import usage
from headwater.cluster.peers import Peer
from headwater.cluster.usage import SharedUsage
from headwater.config import Settings
from headwater.engine.clock import SteadyClock
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.scheduler import LoopScheduler
from headwater.http.server import build_context
from headwater.storage.memory import MemoryStorage
from tests.cluster.test_tunnels import Tunnelled, exchange, request
from tests.waiting import async_wait_until


def test_usage_is_reported_when_it_changes_and_forgotten_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "EVERY_S", 0.001)
    reports: list[int] = []
    comparisons: Counter[SharedUsage] = Counter()
    send, usage_of_worker = Peer.report, SharedUsage._usage

    def report(peer: Peer, used: tuple[int, ...]) -> None:
        reports.append(peer.worker)
        send(peer, used)

    def compare(shared: SharedUsage) -> tuple[int, ...]:
        comparisons[shared] += 1
        return usage_of_worker(shared)

    monkeypatch.setattr(Peer, "report", report)
    monkeypatch.setattr(SharedUsage, "_usage", compare)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        tunnelled = Tunnelled(loop)
        engine = Engine(MemoryStorage(), SteadyClock(), LoopScheduler(loop), EngineLimits(), commit="inline")
        contexts = [tunnelled.context, build_context(Settings(), engine, None, loop, 16)]
        shared = [SharedUsage(peers, context) for peers, context in zip(tunnelled.peers, contexts, strict=True)]
        peer = await tunnelled.connect()
        tasks = [asyncio.create_task(one.run()) for one in shared]
        try:
            await exchange(peer, request("PUT"))
            await exchange(peer, request("POST", b"x" * 1000))
            await async_wait_until(lambda: engine.quota.content_elsewhere >= 1000, what="the report of the usage")
            assert engine.quota.content_elsewhere == tunnelled.engine.quota.content_bytes
            assert tunnelled.engine.quota.content_elsewhere == 0
            count = len(reports)
            comparisons.clear()
            await async_wait_until(
                lambda: [comparisons[one] for one in shared],
                lambda counts: min(counts) >= 20,
                what="20 comparisons of the usage at each worker",
            )
            assert len(reports) == count, "an idle worker reports nothing"
            tunnelled.close()
            await async_wait_until(lambda: engine.quota.content_elsewhere == 0, what="the end of the other worker")
            await tunnelled.connect()
            await async_wait_until(lambda: engine.quota.content_elsewhere >= 1000, what="the report at the connection")
        finally:
            for task in tasks:
                task.cancel()
            tunnelled.close()
            await asyncio.sleep(0)

    asyncio.run(scene())
