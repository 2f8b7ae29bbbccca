"""Requests of all connections share the time of one iteration of the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from bench.calls import KeptTransport, ServerHarness, encode

from headwater.config import Settings, StorageSettings
from headwater.engine.open_storage import open_store
from headwater.http.connection import Connection
from headwater.http.context import Context
from headwater.http.flow import QUICK_TURNS, TURNS_S, Turns
from headwater.http.headers import OK
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response
from headwater.http.routes import ROUTES
from headwater.http.routing import Router
from headwater.http.server import build_context, build_engine

COSTLY_S = 0.003
PER_ITERATION = int(TURNS_S / COSTLY_S) + 1
"""Costly requests that begin before the time of an iteration is used up."""
CLIENTS = 12
DEPTH = 5


class Costly(ServerHarness):
    """A server whose `GET /healthz` takes `COSTLY_S`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        settings = Settings(storage=StorageSettings(mode="memory"))
        engine = build_engine(settings, open_store(settings.storage), loop)
        super().__init__(engine, build_context(settings, engine, None, loop, 10_000))
        engine.start()
        self.routes = tuple(
            replace(route, handler=self._compute) if route.operation == "health" else route for route in ROUTES
        )
        self.router = Router(self.routes)
        self.handled = 0

    def _compute(self, context: Context, request: Request, address: Address) -> Response:
        _compute(COSTLY_S)
        self.handled += 1
        return Response(OK, b"", b"%d" % self.handled)


def _compute(seconds: float) -> None:
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at:
        pass


GET = encode("GET", "/healthz")


def answers(transport: KeptTransport) -> int:
    return b"".join(transport.written).count(b"HTTP/1.1 200")


async def most_of_an_iteration(world: Costly, clients: list[tuple[Connection, KeptTransport]], count: int) -> int:
    """The highest number of requests that one iteration handled, until each client has `count` responses."""
    most = 0
    async with asyncio.timeout(60):
        while any(answers(transport) < count for _, transport in clients):
            before = world.handled
            await asyncio.sleep(0)
            most = max(most, world.handled - before)
    return most


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_pipelined_requests_of_one_connection_take_the_time_of_an_iteration_only() -> None:
    async def test() -> None:
        world = Costly()
        client = world.connect()
        client[0].data_received(GET * 30)
        assert world.handled <= PER_ITERATION
        assert await most_of_an_iteration(world, [client], 30) <= PER_ITERATION
        bodies = [data.rpartition(b"\r\n\r\n")[2] for data in client[1].written]
        assert bodies == [b"%d" % number for number in range(1, 31)]

    run(test())


def test_requests_of_many_connections_share_the_time_of_an_iteration() -> None:
    """They used to be processed at once, each when it was received."""

    async def test() -> None:
        world = Costly()
        clients = [world.connect() for _ in range(CLIENTS)]
        for round_number in range(1, 3):  # The heads of the second round are known.
            before = world.handled
            for connection, _ in clients:
                connection.data_received(GET)
            assert world.handled - before <= PER_ITERATION
            assert await most_of_an_iteration(world, clients, round_number) <= PER_ITERATION
        assert world.handled == 2 * CLIENTS

    run(test())


def test_client_is_served_at_once_while_pipelined_requests_of_others_wait_for_their_turns() -> None:
    async def test() -> None:
        world = Costly()
        clients = [world.connect() for _ in range(CLIENTS)]
        for connection, _ in clients:
            connection.data_received(GET * DEPTH)
        connection, transport = world.connect()
        for count in range(1, 6):
            await asyncio.sleep(0)
            connection.data_received(GET)
            assert answers(transport) == count
        assert any(answers(others) < DEPTH for _, others in clients), "they were not ahead"
        await most_of_an_iteration(world, clients, DEPTH)

    run(test())


def test_client_of_quick_requests_does_not_wait_behind_costly_ones_that_were_received_before() -> None:
    """60 clients that sent one search each used to be answered before it."""
    quick = encode("GET", "/readyz")

    async def test() -> None:
        server = Costly()
        clients = [server.connect() for _ in range(CLIENTS)]
        connection, transport = server.connect()
        for _ in range(QUICK_TURNS):
            await asyncio.sleep(0)
            connection.data_received(quick)
        before = answers(transport)
        await asyncio.sleep(0)
        for others, _ in clients:
            others.data_received(GET)
        connection.data_received(quick)
        assert answers(transport) == before
        await asyncio.sleep(0)
        assert answers(transport) == before + 1
        assert sum(answers(others) for _, others in clients) < CLIENTS
        # After a costly one, it waits like the others.
        await most_of_an_iteration(server, clients, 1)
        connection.data_received(GET)
        for others, _ in clients:
            others.data_received(GET)
        connection.data_received(quick)
        await asyncio.sleep(0)
        assert answers(transport) == before + 2
        await most_of_an_iteration(server, [*clients, (connection, transport)], 2)

    run(test())


def test_costly_requests_get_turns_while_quick_ones_use_all_time() -> None:
    async def test() -> None:
        turns = Turns(asyncio.get_running_loop())
        given: list[str] = []

        def quick() -> None:
            _compute(TURNS_S)
            given.append("quick")
            turns.schedule(quick, is_quick=True)

        def costly() -> None:
            assert time.perf_counter() < turns.ends_at_s, "it has time for one request"
            given.append("costly")
            turns.schedule(costly)

        turns.schedule(costly)
        turns.schedule(quick, is_quick=True)
        for _ in range(3):
            await asyncio.sleep(0)
        assert given == ["quick", "costly"] * 3

    run(test())


def test_request_split_while_it_waits_for_its_turn_is_answered_once() -> None:
    async def test() -> None:
        world = Costly()
        clients = [world.connect() for _ in range(CLIENTS)]
        for connection, _ in clients:
            connection.data_received(GET)
        connection, transport = world.connect()
        transport.pause_reading = transport.resume_reading = lambda: None  # type: ignore[method-assign]
        for at in range(0, len(GET), 10):
            connection.data_received(GET[at : at + 10])
        await most_of_an_iteration(world, [*clients, (connection, transport)], 1)
        assert answers(transport) == 1

    run(test())


def test_connection_that_is_lost_while_its_request_waits_does_not_process_it() -> None:
    async def test() -> None:
        world = Costly()
        clients = [world.connect() for _ in range(CLIENTS)]
        for connection, _ in clients:
            connection.data_received(GET)
        handled = world.handled
        for connection, _ in clients:
            connection.connection_lost(None)
        for _ in range(CLIENTS * 2):
            await asyncio.sleep(0)
        assert world.handled == handled < CLIENTS

    run(test())


class ClosableTransport(KeptTransport):
    closing = False

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


@pytest.mark.parametrize("reason", ["Connection: close", "shutdown"])
def test_request_that_waits_for_its_turn_is_not_processed_after_the_last_response(reason: str) -> None:
    """It used to be processed, although the response before it said that the connection ends (RFC 9112 §9.6)."""
    first = encode("GET", "/readyz")

    async def test() -> None:
        server = Costly()
        running: list[Callable[[Any], None]] = []
        slow = Deferred(running.append, lambda body: Response(OK, b"", body))
        server.router = Router(
            tuple(
                replace(route, handler=lambda *_: slow) if route.pattern == "/readyz" else route
                for route in server.routes
            )
        )
        clients = [server.connect() for _ in range(CLIENTS)]
        connection, transport = Connection(server.context, server.router), ClosableTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.data_received(GET)  # So that its head is known.
        await asyncio.sleep(0)
        if reason == "shutdown":
            connection.data_received(first)
            connection.drain()
        else:
            connection.data_received(first.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        for other, _ in clients:
            other.data_received(GET)
        connection.data_received(GET)
        assert server.handled < CLIENTS, "it waits for its turn"
        running.pop()(b"done")
        assert b"Connection: close\r\n" in transport.written[-1]
        assert transport.closing
        await most_of_an_iteration(server, clients, 1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert server.handled == 1 + CLIENTS
        assert transport.written[-1].endswith(b"done")

    run(test())


def test_time_of_an_iteration_is_over_for_whoever_asks_and_begins_again_in_the_next() -> None:
    async def test() -> None:
        turns = Turns(asyncio.get_running_loop())
        assert turns.begin(100.0)
        assert turns.ends_at_s == 100.0 + TURNS_S
        assert not turns.begin(turns.ends_at_s)
        await asyncio.sleep(0)
        assert turns.begin(200.0)
        assert not turns.begin(300.0)

    run(test())
