"""The asynchronous client on uvloop, whose transports are not instances of asyncio's class."""

from __future__ import annotations

import asyncio

import uvloop

from headwater.client import AsyncClient
from tests.serving import Server


def test_the_asynchronous_client_works_on_uvloop(server: Server) -> None:
    async def exchange() -> list[object]:
        async with AsyncClient(server.url) as client:
            stream = client.stream("client-on-uvloop")
            await stream.create()
            await stream.append({"n": 1})
            return await stream.last()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(exchange()) == [{"n": 1}]
