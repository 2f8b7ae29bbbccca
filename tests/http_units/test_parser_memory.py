"""What the parser of a connection keeps: little while it is idle or its reader waits, nothing after it has ended."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref

import pytest
from bench.calls import ServerHarness, encode

from headwater.config import Settings, StorageSettings
from headwater.engine.open_storage import open_store
from headwater.http.flow import ByteBudget
from headwater.http.parser import ParserLimits, RequestParser
from headwater.http.request import Request
from headwater.http.server import build_context, build_engine

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


class Sink:
    """A connection that ignores requests."""

    def __init__(self) -> None:
        self.parser = RequestParser(ParserLimits(8192, 8192, 8192, 30.0), ByteBudget(8192), lambda *_: None, self)
        self.requests: list[Request] = []

    def on_request(self, request: Request) -> None:
        self.requests.append(request)

    def on_expect_continue(self) -> None:
        """Nothing to send."""

    def begin_upload(self, head: Request) -> None:
        """Keep all bodies in memory."""

    def on_upload_ahead(self) -> None:
        """Do nothing: there are no uploads."""


def test_a_closed_parser_needs_no_garbage_collection() -> None:
    sink = Sink()
    sink.parser.feed(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nPOST /v1/stream/a HTTP/1.1\r\nHost: x\r\n", 0.0)
    assert [request.target for request in sink.requests] == [b"/healthz"]
    freed = weakref.ref(sink)
    gc.disable()
    try:
        sink.parser.close()
        del sink
        assert freed() is None
    finally:
        gc.enable()


def test_parser_of_an_idle_connection_keeps_little_memory() -> None:
    sinks = []
    tracemalloc.start()
    try:
        for _ in range(100):
            sinks.append(Sink())
            sinks[-1].parser.feed(REQUEST, 0.0)
            sinks[-1].requests.clear()
        used, _ = tracemalloc.get_traced_memory()
        for sink in sinks:
            sink.parser.rest()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used - kept > 80_000, "the parser for the next request takes more than 800 bytes"


def test_parser_that_has_rested_reads_the_next_request() -> None:
    sink = Sink()
    for _ in range(3):
        sink.parser.feed(REQUEST, 0.0)
        sink.parser.rest()
    assert [request.target for request in sink.requests] == [b"/healthz"] * 3
    assert all(request.headers == {b"host": b"x"} for request in sink.requests)


def test_parser_does_not_rest_within_a_request() -> None:
    sink = Sink()
    for at in range(len(REQUEST)):
        sink.parser.feed(REQUEST[at : at + 1], 0.0)
        sink.parser.rest()
    assert [request.target for request in sink.requests] == [b"/healthz"]


@pytest.mark.parametrize("live", ["sse", "long-poll"])
def test_live_reader_keeps_little_for_its_next_request_and_can_send_one(live: str) -> None:
    """The parser and the queue of a live reader used to take 1,600 bytes until the response was complete."""
    watch = encode("GET", f"/v1/stream/watched?offset=now&live={live}")
    following = encode("GET", "/healthz")
    count = 100

    async def test() -> None:
        settings = Settings(storage=StorageSettings(mode="memory"))
        loop = asyncio.get_running_loop()
        engine = build_engine(settings, open_store(settings.storage), loop)
        server = ServerHarness(engine, build_context(settings, engine, None, loop, 10_000))
        engine.start()
        writer, written = server.connect()
        await server.request(writer, written, encode("PUT", "/v1/stream/watched"), b"201")
        readers = [server.connect() for _ in range(count)]
        tracemalloc.start()
        try:
            for number, (reader, _) in enumerate(readers):
                reader.data_received(watch)
                if number % 2:
                    reader.data_received(following[:20])
                await asyncio.sleep(0)
            before, _ = tracemalloc.get_traced_memory()
            for reader, _ in readers:
                reader.check_time(server.context.now_s)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert before - after > count // 2 * 1_000
        await server.request(writer, written, encode("POST", "/v1/stream/watched", b"an event"), b"204")
        for number, (reader, _) in enumerate(readers):
            reader.data_received(following[20:] if number % 2 else following)
            await asyncio.sleep(0)
        for reader, received in readers:
            assert b"an event" in b"".join(received.written)
            if live == "sse":
                assert [request.target for request in reader._input.requests] == [b"/healthz"]
            else:
                assert received.written[-1].endswith(b"\r\n\r\nok")
        engine.stop()

    asyncio.run(test())
