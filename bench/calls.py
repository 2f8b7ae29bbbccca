"""Number of Python calls of an append, a read, a delivery by long-poll and an event to each live reader: without noise.

    python -m bench.calls            print the counts
    python -m bench.calls --write    write them to bench/calls.json as the new limits

The server runs in this process: connections with a transport that keeps what is written, the real engine, and storage
in memory or in files. `append-relayed` counts the calls of two workers, for an append that one relays to the other.
`sys.setprofile` counts calls of Python functions and of functions written in C, but not what a compiled function calls:
operations named `…-compiled` take the compiled path, and the others do not. The test
`tests/test_call_counts.py` fails when an operation needs more calls than `bench/calls.json` allows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwater.cluster.followed_streams import FollowedStreams
from headwater.cluster.multi_worker_follow import MultiWorkerFollow
from headwater.cluster.peers import Peer, Peers
from headwater.cluster.placements import Placements
from headwater.cluster.relay import Relay, RelayingConnection
from headwater.cluster.relayed import RelayServer
from headwater.cluster.routing import WorkerRouter
from headwater.cluster.shards import ShardMap
from headwater.cluster.shared_reads import SharedReads
from headwater.config import Settings, StorageSettings
from headwater.core import native
from headwater.engine.engine import Engine
from headwater.engine.open_storage import open_store
from headwater.engine.scheduler import LoopScheduler
from headwater.http.compiled_appends import use_no_compiled_appends
from headwater.http.connection import Connection
from headwater.http.context import Context
from headwater.http.head_cache import KNOWN_MAX
from headwater.http.routes import ROUTES
from headwater.http.routing import Router
from headwater.http.server import build_context, build_engine

LIMITS = Path(__file__).with_name("calls.json")
REPEATS = 200
"""Operations that are counted together, so that occasional work is averaged over them."""
READERS = 50
CONNECTIONS = 16
"""Connections of a worker whose requests arrive in one iteration of the event loop."""


class KeptTransport:
    """A socket that keeps what is written to it, and is never full."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name == "peername" else None

    def pause_reading(self) -> None:
        raise AssertionError("no operation here fills a queue")

    def resume_reading(self) -> None:
        raise AssertionError("reading was not paused")

    def close(self) -> None:
        raise AssertionError("no operation here closes its connection")


class PeerTransport:
    """A socket between two workers: what one writes, the other receives in the next iteration of the event loop."""

    def __init__(self, receiver: Peer) -> None:
        self._receiver = receiver
        self._loop = asyncio.get_running_loop()

    def set_write_buffer_limits(self, high: int) -> None:
        """Do nothing: it is never full."""

    def write(self, data: bytes) -> None:
        self._loop.call_soon(self._receiver.data_received, data)


class Counter:
    """Counts calls between `start` and `stop`."""

    def __init__(self) -> None:
        self.calls = 0

    def start(self) -> None:
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        sys.setprofile(None)
        self.calls -= 1  # `setprofile` itself.

    def _on_event(self, frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.calls += 1


class ServerHarness:
    """A server without sockets: received data is passed in, and sent data is kept."""

    def __init__(self, engine: Engine, context: Context) -> None:
        self.engine = engine
        self.context = context
        self.router = Router(ROUTES)

    def connect(self) -> tuple[Connection, KeptTransport]:
        connection = Connection(self.context, self.router)
        transport = KeptTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        return connection, transport

    async def request(self, connection: Connection, transport: KeptTransport, data: bytes, status: bytes) -> None:
        """Send one request and wait for its response."""
        before = len(transport.written)
        connection.data_received(data)
        while len(transport.written) == before:  # noqa: ASYNC110 - the next iteration is what is waited for
            await asyncio.sleep(0)
        assert transport.written[before].startswith(b"HTTP/1.1 " + status), transport.written[before]


def encode(method: str, target: str, body: bytes = b"", content_type: str = "text/plain") -> bytes:
    head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def count_appends(harness: ServerHarness, body: bytes, content_type: str = "text/plain") -> float:
    connection, transport = harness.connect()
    await harness.request(connection, transport, encode("PUT", "/v1/stream/a", b"", content_type), b"201")
    append = encode("POST", "/v1/stream/a", body, content_type)
    await harness.request(connection, transport, append, b"204")
    counter = Counter()
    for _ in range(REPEATS):
        before = len(transport.written)
        counter.start()
        connection.data_received(append)
        counter.stop()
        while len(transport.written) == before:
            # The commit is a callback of the event loop; only its own calls are counted.
            counter.start()
            await asyncio.sleep(0)
            counter.stop()
    return counter.calls / REPEATS


async def count_spread(harness: ServerHarness, fields: str = "") -> float:
    """Calls of an append to one of more streams than there are heads in the cache, `REPEATS` of them not in it.

    `fields` are more headers; a `%d` in them is the number of the append to the stream.
    """
    connection, transport = harness.connect()
    names = [f"/v1/stream/s{number}" for number in range(KNOWN_MAX + REPEATS)]
    for name in names:
        await harness.request(connection, transport, encode("PUT", name), b"201")
        await harness.request(connection, transport, _with(fields, encode("POST", name, b"x" * 100), 0), b"20")
    counter = Counter()
    for name in names[KNOWN_MAX:]:
        append = _with(fields, encode("POST", name, b"x" * 100), 1)
        before = len(transport.written)
        counter.start()
        connection.data_received(append)
        counter.stop()
        while len(transport.written) == before:
            counter.start()
            await asyncio.sleep(0)
            counter.stop()
        assert transport.written[-1].startswith(b"HTTP/1.1 20"), transport.written[-1]
    return counter.calls / REPEATS


def _with(fields: str, request: bytes, number: int) -> bytes:
    """The request with more headers."""
    return request.replace(b"Content-Length", (fields and fields % number).encode() + b"Content-Length", 1)


async def count_json(harness: ServerHarness, *, compiled: bool) -> float:
    """Calls of an append of many JSON messages, in one of the two builds."""
    chosen = native.split, native.scan, native.extend_ends, native.offset_token
    if not compiled:
        native.split, native.scan = native.pure_split, native.pure_scan
        native.extend_ends, native.offset_token = native.pure_extend_ends, native.pure_offset_token
    try:
        return await count_appends(harness, JSON_BATCH, "application/json")
    finally:
        native.split, native.scan, native.extend_ends, native.offset_token = chosen


async def count_reads(harness: ServerHarness) -> float:
    connection, transport = harness.connect()
    await harness.request(connection, transport, encode("PUT", "/v1/stream/r"), b"201")
    await harness.request(connection, transport, encode("POST", "/v1/stream/r", b"x" * 100), b"204")
    read = encode("GET", "/v1/stream/r?offset=-1")
    await harness.request(connection, transport, read, b"200")
    counter = Counter()
    for _ in range(REPEATS):
        counter.start()
        connection.data_received(read)
        counter.stop()
        await asyncio.sleep(0)  # One iteration of the event loop has time for a few milliseconds of requests.
    assert transport.written[-1].endswith(b"x" * 100)
    return counter.calls / REPEATS


async def count_events(harness: ServerHarness) -> float:
    """Calls for each of the readers of one event."""
    writer, transport = harness.connect()
    await harness.request(writer, transport, encode("PUT", "/v1/stream/e"), b"201")
    readers = [harness.connect() for _ in range(READERS)]
    for reader, received in readers:
        await harness.request(reader, received, encode("GET", "/v1/stream/e?offset=-1&live=sse"), b"200")
    append = encode("POST", "/v1/stream/e", b"x" * 100)
    await harness.request(writer, transport, append, b"204")
    counter = Counter()
    repeats = REPEATS // 10
    for _ in range(repeats):
        events = sum(len(received.written) for _, received in readers) + READERS
        counter.start()
        writer.data_received(append)
        counter.stop()
        while sum(len(received.written) for _, received in readers) < events:
            counter.start()
            await asyncio.sleep(0)
            counter.stop()
    return counter.calls / (repeats * READERS)


async def count_deliveries(harness: ServerHarness) -> float:
    """Calls from an append until the response to a long-poll that waits for it."""
    writer, transport = harness.connect()
    reader, received = harness.connect()
    await harness.request(writer, transport, encode("PUT", "/v1/stream/p"), b"201")
    append = encode("POST", "/v1/stream/p", b"x" * 100)
    await harness.request(writer, transport, append, b"204")
    counter = Counter()
    for _ in range(REPEATS):
        offset = transport.written[-1].partition(b"Stream-Next-Offset: ")[2].partition(b"\r\n")[0].decode()
        reader.data_received(encode("GET", f"/v1/stream/p?offset={offset}&live=long-poll"))
        before = len(received.written)
        counter.start()
        writer.data_received(append)
        counter.stop()
        while len(received.written) == before:
            counter.start()
            await asyncio.sleep(0)
            counter.stop()
        assert received.written[-1].endswith(b"x" * 100)
        await asyncio.sleep(0)  # A new turn of the reader's connection.
    return counter.calls / REPEATS


class WorkerPair:
    """Two workers of one server in this process. All names used here belong to worker 1; clients use worker 0."""

    def __init__(self, harnesses: list[ServerHarness], loop: asyncio.AbstractEventLoop) -> None:
        self.harnesses = harnesses
        shard_map = ShardMap(16, 2)
        both = [Peers(number, 2) for number in range(2)]
        self._relays = [Relay(peers, loop, 1.0) for peers in both]
        self._relays[0].hand_over = _no_hand_over
        for harness, peers, relay in zip(harnesses, both, self._relays, strict=True):
            placements = Placements(harness.engine, shard_map, relay)
            reads = SharedReads(harness.context, FollowedStreams(harness.engine, relay, LoopScheduler(loop)))
            harness.router = WorkerRouter(ROUTES, shard_map, peers.worker, relay, placements, reads)
            following = MultiWorkerFollow(harness.context, shard_map, relay, placements)
            served = RelayServer(harness.context, harness.router, Router(ROUTES), relay, following)
            peers.open_server = served.open
        ends = [both[0].connect(1), both[1].connect(0)]
        for peers, end, other in zip(both, ends, reversed(ends), strict=True):
            end.connection_made(PeerTransport(other))  # type: ignore[arg-type]
            peers.connected(end)
        numbers = (f"w{number}" for number in itertools.count())
        self.names = (name for name in numbers if shard_map.owner_of(name) == 1)

    def connect(self) -> tuple[Connection, KeptTransport]:
        """A client's connection to worker 0."""
        harness = self.harnesses[0]
        connection, transport = RelayingConnection(harness.context, harness.router, self._relays[0]), KeptTransport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.has_moved, connection.is_movable = True, False  # So that every request is relayed.
        return connection, transport


def _no_hand_over(_worker: int, _descriptor: int, _request: bytes) -> bool:
    raise AssertionError("the connections cannot move")


async def count_relayed(harness: ServerHarness) -> float:
    """Calls of both workers for an append, when `CONNECTIONS` clients append at the same time."""
    loop = asyncio.get_running_loop()
    settings = Settings(storage=StorageSettings(mode="memory"))
    first = build_engine(settings, open_store(settings.storage), loop)
    first.start()
    try:
        front = ServerHarness(first, build_context(settings, first, None, loop, 10_000))
        pair = WorkerPair([front, harness], loop)
        clients = []
        for _ in range(CONNECTIONS):
            connection, transport = pair.connect()
            name = next(pair.names)
            append = encode("POST", f"/v1/stream/{name}", b"x" * 100)
            await harness.request(connection, transport, encode("PUT", f"/v1/stream/{name}"), b"201")
            for _ in range(4):
                await harness.request(connection, transport, append, b"204")
            clients.append((connection, transport, append))
        counter = Counter()
        repeats = REPEATS // 10
        for _ in range(repeats):
            answered = sum(len(transport.written) for _, transport, _ in clients) + CONNECTIONS
            counter.start()
            for connection, _, append in clients:
                connection.data_received(append)
            counter.stop()
            while sum(len(transport.written) for _, transport, _ in clients) < answered:
                counter.start()
                await asyncio.sleep(0)
                counter.stop()
        assert all(transport.written[-1].startswith(b"HTTP/1.1 204") for _, transport, _ in clients)
        assert not first.catalog.by_name, "worker 0 owns none of the streams"
        return counter.calls / (repeats * CONNECTIONS)
    finally:
        first.stop()


PRODUCER = "Producer-Id: p\r\nProducer-Epoch: 0\r\nProducer-Seq: %d\r\n"
JSON_BATCH = b"[" + b",".join(b'{"number":%d,"text":"some text"}' % number for number in range(100)) + b"]"

OPERATIONS: dict[str, tuple[str, Callable[[ServerHarness], Any]]] = {
    "append-memory": ("memory", lambda harness: count_appends(harness, b"x" * 100)),
    "append-durable": ("file-durable", lambda harness: count_appends(harness, b"x" * 100)),
    "append-spread": ("memory", count_spread),
    "append-produced": ("memory", lambda harness: count_spread(harness, PRODUCER)),
    "append-produced-durable": ("file-durable", lambda harness: count_spread(harness, PRODUCER)),
    "append-relayed": ("memory", count_relayed),
    "json-100-memory": ("memory", lambda harness: count_json(harness, compiled=False)),
    "read-memory": ("memory", count_reads),
    "read-durable": ("file-durable", count_reads),
    "long-poll-memory": ("memory", count_deliveries),
    "long-poll-durable": ("file-durable", count_deliveries),
    "fan-out-memory": ("memory", count_events),
    "fan-out-durable": ("file-durable", count_events),
}
if native.BUILD == "compiled":
    OPERATIONS["json-100-compiled"] = ("memory", lambda harness: count_json(harness, compiled=True))
    OPERATIONS["append-memory-compiled"] = OPERATIONS["append-memory"]
    OPERATIONS["append-spread-compiled"] = OPERATIONS["append-spread"]
    OPERATIONS["append-relayed-compiled"] = OPERATIONS["append-relayed"]
    OPERATIONS["append-durable-compiled"] = OPERATIONS["append-durable"]
    OPERATIONS["long-poll-memory-compiled"] = OPERATIONS["long-poll-memory"]


async def _measure(mode: str, count: Callable[[ServerHarness], Any], *, compiled: bool) -> float:
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory() as directory:
        storage = StorageSettings(mode=mode, data_dir=Path(directory) / "data", commit="inline")
        settings = Settings(storage=storage)
        store = open_store(storage)
        engine = build_engine(settings, store, loop)
        engine.start()
        try:
            harness = ServerHarness(engine, build_context(settings, engine, None, loop, 10_000))
            if not compiled:
                use_no_compiled_appends(harness.context)
            calls: float = await count(harness)
            return calls
        finally:
            engine.stop()


def measure(name: str) -> float:
    """Calls of one operation."""
    mode, count = OPERATIONS[name]
    return round(asyncio.run(_measure(mode, count, compiled=name.endswith("-compiled"))), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the counts as the new limits")
    chosen = parser.parse_args()
    counts = {name: measure(name) for name in OPERATIONS}
    for name, calls in counts.items():
        print(f"{name:24} {calls:8.1f}")
    if chosen.write:
        LIMITS.write_text(json.dumps(json.loads(LIMITS.read_text()) | counts, indent=2) + "\n")


if __name__ == "__main__":
    main()
