"""What the clients of short-lived streams expect after a request that is delayed past its repetition."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import pytest

from tests.crash.stream_lifecycles import fork_repeatedly, recreate_repeatedly
from tests.crash.wire import Client, Lost, Reply
from tests.crash.workload import Violation, Workload
from tests.serving import serve

LIVES = 3


@dataclass(frozen=True)
class Case:
    """A client, the first stream that it deletes, and a request for that stream that is performed too late."""

    client: Callable[[Workload, str], Awaitable[None]]
    path: str
    stream: str
    is_delayed: Callable[[str, Mapping[str, str], bytes], bool]
    arrives_after: str
    """The method of the request after which it arrives: the deletion of the stream, or the next creation."""


CASES = {
    "append after the end": Case(
        recreate_repeatedly,
        "/v1/stream/lives",
        "/v1/stream/lives",
        lambda _method, headers, body: body == b"too late;" and "Producer-Id" not in headers,
        "PUT",
    ),
    "creation": Case(
        recreate_repeatedly,
        "/v1/stream/lives",
        "/v1/stream/lives",
        lambda method, _headers, _body: method == "PUT",
        "DELETE",
    ),
    "append of a producer to a source of forks": Case(
        fork_repeatedly,
        "/v1/stream/forks",
        "/v1/stream/forks/root",
        lambda method, _headers, _body: method == "POST",
        "PUT",
    ),
}


class DelayingClient(Client):
    def __init__(self, workload: DelayedWorkload) -> None:
        super().__init__(workload.port)
        self._workload = workload
        self._delayed: tuple[str, str, Mapping[str, str], bytes] | None = None
        self._is_deleted = False
        self._has_arrived = False

    async def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        headers, case, counts = headers or {}, self._workload.case, self._workload.counts
        self._workload.running = counts["lifecycles"] + counts["fork trees"] < LIVES - 1
        if self._delayed is None and path == case.stream and case.is_delayed(method, headers, body):
            self._delayed = (method, path, headers, body)
            raise Lost("the connection broke")
        reply = await super().request(method, path, headers, body)
        self._is_deleted = self._is_deleted or (method == "DELETE" and path == case.stream)
        if self._delayed is not None and self._is_deleted and method == case.arrives_after and not self._has_arrived:
            self._has_arrived = True
            await super().request(*self._delayed)
        return reply


class DelayedWorkload(Workload):
    def __init__(self, port: int, case: Case) -> None:
        super().__init__(port, random.Random(7))
        self.case = case

    def client(self) -> Client:
        client = DelayingClient(self)
        self._clients.append(client)
        return client


async def live(port: int, case: Case, *, several_servers: bool) -> list[str]:
    """Create and delete streams; return the problems found."""
    workload = DelayedWorkload(port, case)
    workload.several_servers = several_servers
    try:
        await case.client(workload, case.path)
    except Violation as violation:
        return [str(violation)]
    finally:
        await workload.close()
    return []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("several_servers", [True, False])
def test_a_delayed_request_is_a_problem_only_if_nothing_can_have_delayed_it(case: Case, several_servers: bool) -> None:
    with serve(DS_STORAGE__MODE="memory", DS_EXPIRY__SWEEP_INTERVAL_SECS="0.2") as server:
        problems = asyncio.run(live(int(server.url.rpartition(":")[2]), case, several_servers=several_servers))
    assert len(problems) == (0 if several_servers else 1), problems
