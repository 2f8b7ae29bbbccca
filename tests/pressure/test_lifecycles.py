"""What the clients of short-lived streams expect after a request that is delayed past its repetition."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest

from tests.crash.stream_lifecycles import recreate_repeatedly
from tests.crash.wire import Client, Lost, Reply
from tests.crash.workload import Violation, Workload
from tests.serving import serve

LIVES = 6
PATH = "/v1/stream/lives"


class DelayingClient(Client):
    """Delays one append to a deleted stream: it arrives once a later stream has the same name."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload.port)
        self._workload = workload
        self._delayed: tuple[str, Mapping[str, str], bytes] | None = None
        self._created = 0

    async def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        headers = headers or {}
        if self._created == 1 and not self._delayed and body == b"too late;" and "Producer-Id" not in headers:
            self._delayed = (path, headers, body)
            raise Lost("the connection broke")
        reply = await super().request(method, path, headers, body)
        if reply.status == 201:
            self._created += 1
            self._workload.running = self._created < LIVES
            if self._created == 2 and self._delayed is not None:
                path, headers, body = self._delayed
                await super().request("POST", path, headers, body)
        return reply


class DelayedWorkload(Workload):
    def client(self) -> Client:
        client = DelayingClient(self)
        self._clients.append(client)
        return client


async def live(port: int, *, several_servers: bool) -> list[str]:
    """Create and delete streams; return the problems found."""
    workload = DelayedWorkload(port, random.Random(7))
    workload.several_servers = several_servers
    try:
        await recreate_repeatedly(workload, PATH)
    except Violation as violation:
        return [str(violation)]
    finally:
        await workload.close()
    return []


@pytest.mark.parametrize("several_servers", [True, False])
def test_a_delayed_request_is_a_problem_only_if_nothing_can_have_delayed_it(several_servers: bool) -> None:
    with serve(DS_STORAGE__MODE="memory") as server:
        problems = asyncio.run(live(int(server.url.rpartition(":")[2]), several_servers=several_servers))
    if several_servers:
        assert problems == []
    else:
        assert len(problems) == 1
        assert "too late" in problems[0]
