"""Events that sessions store over a network that fails: each once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from headwater.ai.agents import DurableSession
from headwater.ai.retried_appends import RetriedAppends
from headwater.client import NO_RETRY, AsyncClient, AsyncStream, Retry, Stream, TransportError
from tests.client.proxies import Breaking, CutNetwork, running
from tests.serving import Server

QUICK = Retry(timeout_s=60, first_delay_s=0.001, max_delay_s=0.02)


def test_sessions_store_each_event_once_when_connections_break(server: Server, stream_name: Callable[[], str]) -> None:
    # Imported here: it takes a second, and every process of the tests imports this module.
    from mcp import types

    from headwater.ai.mcp import DurableEventStore

    name, prefix = stream_name(), stream_name()
    proxy = Breaking(server.url, seed=5)

    async def store() -> None:
        async with AsyncClient(proxy.url, retry=QUICK) as client:
            session = DurableSession("s", client.stream(name))
            events = DurableEventStore(client, prefix, session="s")
            for n in range(30):
                await session.add_items([{"n": n}])
                await events.store_event("7", types.JSONRPCNotification(jsonrpc="2.0", method="m", params={"n": n}))
            assert [item["n"] for item in await session.get_items()] == list(range(30))

    with running(proxy):
        asyncio.run(store())
    assert proxy.cuts > 3
    with Stream(server.stream_url(name)) as stream:
        assert [event["add"][0]["n"] for event in stream.read()] == list(range(30))
    stored = f"{prefix}/{b's'.hex()}/{b'7'.hex()}"
    with Stream(server.stream_url(stored)) as stream:
        assert [event["message"]["params"]["n"] for event in stream.read()] == list(range(30))


def test_appends_at_the_same_time_are_all_stored(server: Server, stream_name: Callable[[], str]) -> None:
    async def store() -> None:
        async with AsyncStream(server.stream_url(stream_name())) as stream:
            await stream.create()
            appends = RetriedAppends(stream)
            await asyncio.gather(*(appends.append(n) for n in range(50)))
            assert [n async for n in stream.read()] == list(range(50))

    asyncio.run(store())


def test_an_append_after_a_failed_one_is_not_taken_for_its_repetition(
    server: Server, stream_name: Callable[[], str]
) -> None:
    network = CutNetwork(server.url)

    async def store() -> None:
        async with AsyncStream(f"{network.url}/v1/stream/{stream_name()}", retry=NO_RETRY) as stream:
            await stream.create()
            appends = RetriedAppends(stream)
            await appends.append("first")
            network.cut()
            with pytest.raises(TransportError):
                await appends.append("lost")
            network.restore()
            await appends.append("second")
            assert [event async for event in stream.read()] == ["first", "second"]

    with running(network):
        asyncio.run(store())
