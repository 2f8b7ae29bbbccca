"""Pipelined requests and input that wait for a response: at most 32 requests, and a share of the memory for bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest
from bench.calls import ServerHarness, encode

from headwater.config import Settings, StorageSettings
from headwater.engine.open_storage import open_store
from headwater.http.connection import Connection
from headwater.http.flow import FIELD_BYTES, PIPELINE_MAX_BYTES, PIPELINE_MAX_REQUESTS, QUEUE_FULL
from headwater.http.request import Request
from headwater.http.server import build_context, build_engine
from tests.http_units.transport import Transport

WAIT = encode("GET", "/v1/stream/waiting?offset=now&live=long-poll")
APPEND = encode("POST", "/v1/stream/waiting", b"x")
TINY = b"GET /a HTTP/1.1\r\n\r\n"
CHUNKED = encode("POST", "/v1/stream/waiting").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
CHUNKED += b"4\r\n\r\n\r\n\r\n0\r\n\r\n"
WITH_BODY = encode("POST", "/v1/stream/waiting", b"\r\n\r\n" * 20)


class Rig:
    """One server, and connections that wait for an append with the first request."""

    def __init__(self, budget: int = 2**28) -> None:
        loop = asyncio.get_running_loop()
        settings = Settings(storage=StorageSettings(mode="memory"), limits={"max_request_bodies_bytes": budget})
        engine = build_engine(settings, open_store(settings.storage), loop)
        engine.start()
        self.server = ServerHarness(engine, build_context(settings, engine, None, loop, 10_000))
        self.budget = self.server.context.budget
        self.deepest = 0

    def connect(self) -> tuple[Connection, Transport]:
        connection, transport = Connection(self.server.context, self.server.router), Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        on_request = connection.on_request

        def counted(request: Request) -> None:
            on_request(request)
            self.deepest = max(self.deepest, len(connection._input.requests))

        connection._input.parser._sink = Sink(connection, counted)
        return connection, transport

    async def wait(self) -> tuple[Connection, Transport]:
        """A connection whose long-poll waits."""
        connection, transport = self.connect()
        connection.data_received(WAIT)
        await asyncio.sleep(0)
        assert not transport.written
        return connection, transport

    async def until_read(self, connection: Connection, transport: Transport) -> None:
        async with asyncio.timeout(60):
            while not transport.is_read or connection._input.requests or connection._input.unparsed:  # noqa: ASYNC110 - each iteration
                await asyncio.sleep(0)

    async def create(self) -> tuple[Connection, Transport]:
        connection, transport = self.connect()
        await self.server.request(connection, transport, encode("PUT", "/v1/stream/waiting"), b"201")
        return connection, transport


class Sink:
    """The connection as the sink of its parser, with another `on_request`."""

    def __init__(self, connection: Connection, on_request: Any) -> None:
        self._connection = connection
        self.on_request = on_request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def statuses(transport: Transport) -> list[bytes]:
    return [part[:3] for part in b"".join(transport.written).split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("seed", range(6))
def test_at_most_32_requests_are_queued_however_they_are_split(seed: int) -> None:
    async def test() -> None:
        rig, dice = Rig(), Random(seed)
        writer, written = await rig.create()
        connection, transport = await rig.wait()
        kinds = [TINY, CHUNKED, WITH_BODY]
        requests = [dice.choice(kinds) for _ in range(2_000)]
        data = b"".join(requests)
        if seed % 2:
            pieces = [data[at : at + 65_536] for at in range(0, len(data), 65_536)]
        else:
            cuts = sorted(dice.sample(range(1, len(data)), 3_000))
            pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        appended = False
        for at, piece in enumerate(pieces):
            while not transport.is_read:
                assert rig.deepest <= PIPELINE_MAX_REQUESTS
                if not appended and connection._input.reasons & QUEUE_FULL:
                    appended = True
                    await rig.server.request(writer, written, APPEND, b"204")
                await asyncio.sleep(0)
            connection.data_received(piece)
            assert at or not transport.written
        await rig.until_read(connection, transport)
        assert PIPELINE_MAX_REQUESTS // 2 < rig.deepest <= PIPELINE_MAX_REQUESTS
        expected = {TINY: b"404", CHUNKED: b"204", WITH_BODY: b"204"}
        assert statuses(transport) == [b"200", *(expected[request] for request in requests)]
        assert rig.budget.held == 0

    run(test())


def test_header_fields_of_queued_requests_are_limited() -> None:
    """The limit on bodies used to ignore that each field takes 20 times its bytes."""

    async def test() -> None:
        rig = Rig()
        writer, written = await rig.create()
        connection, transport = await rig.wait()
        request = b"GET /a HTTP/1.1\r\n" + b"".join(b"%x:\r\n" % number for number in range(4_000)) + b"\r\n"
        connection.data_received(request * 8)
        assert connection._input._queued_bytes < PIPELINE_MAX_BYTES + 3 * 4_000 * FIELD_BYTES, (
            "the limit and a piece of input"
        )
        assert len(connection._input.requests) < 8
        assert not transport.is_read
        await rig.server.request(writer, written, APPEND, b"204")
        await rig.until_read(connection, transport)
        assert statuses(transport) == [b"200"] + [b"404"] * 8

    run(test())


def test_requests_and_input_that_wait_share_the_memory_for_bodies_and_are_503_beyond_it() -> None:
    async def test() -> None:
        rig = Rig(budget=600_000)
        writer, written = await rig.create()
        many = TINY * 5_000
        clients = [await rig.wait() for _ in range(20)]
        for connection, _ in clients:
            connection.data_received(many)
            assert rig.budget.held <= rig.budget.limit
        accepted = [client for client in clients if client[0]._input.parser.refusal is None]
        refused = [client for client in clients if client[0]._input.parser.refusal is not None]
        assert 3 <= len(accepted) <= 8
        await rig.server.request(writer, written, APPEND, b"204")
        for _, transport in refused:
            transport.close = lambda: None  # type: ignore[method-assign]
            found = statuses(transport)
            assert (found[0], found[-1]) == (b"200", b"503"), "the first request was accepted before"
            assert set(found[1:-1]) <= {b"404"}
        for connection, transport in accepted:
            await rig.until_read(connection, transport)
            assert statuses(transport) == [b"200"] + [b"404"] * 5_000
        assert rig.budget.held == 0

    run(test())


def test_memory_is_released_when_connections_that_wait_are_lost() -> None:
    async def test() -> None:
        rig = Rig()
        await rig.create()
        clients = [await rig.wait() for _ in range(5)]
        for connection, _ in clients:
            connection.data_received(WITH_BODY * 1_000)
        assert rig.budget.held > 5 * 100_000
        for connection, _ in clients:
            connection.connection_lost(None)
        assert rig.budget.held == 0

    run(test())
