"""Round trip, small messages and large messages in each storage mode, beside the official Node server.

    python -m bench.report                     every mode, five rounds in turns, medians
    python -m bench.report --rounds 2 --seconds 1 --modes memory file-durable

One client on one core loads one server on another. Invariant: a round counts only if every append was acknowledged.

| figure | load |
|---|---|
| round trip | 100 bytes appended, and the time until an SSE reader of the stream has them |
| small | 100-byte appends, one connection, 64 requests in flight: acknowledged messages a second |
| batched | the same messages, 100 to a JSON array |
| large | 1 MiB appends, one after the other: messages a second |
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from bench.servers import LOAD_CORE, STORAGE_MODES, Running, headwater, official_node, on_core

PIPELINED = 64
BATCH = 100
SMALL = b"x" * 100
LARGE = b"x" * 2**20
TEXT = "text/plain"
JSON = "application/json"
TRIPS = 200


class Connection:
    """One HTTP/1.1 connection that counts answers and reads nothing else out of them."""

    def __init__(self, server: Running) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""

    def close(self) -> None:
        self._socket.close()

    def create(self, path: str, content_type: str) -> None:
        self._socket.sendall(request("PUT", path, content_type, b""))
        self.answers(1)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answers(self, count: int) -> None:
        """Read this many answers without a body; stop at the first one that is not a success."""
        while count:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                self._buffer += self._received()
                continue
            self._buffer = rest
            if head == b"0":  # An empty body in chunks, as Node sends it.
                continue
            if head[9:10] != b"2":
                raise SystemExit(f"refused: {head[:200]!r}")
            count -= 1

    def until(self, mark: bytes) -> None:
        """Read up to and including a mark."""
        while mark not in self._buffer:
            self._buffer += self._received()
        self._buffer = self._buffer.partition(mark)[2]

    def _received(self) -> bytes:
        received = self._socket.recv(262_144)
        if not received:
            raise SystemExit("the server closed the connection")
        return received


@contextmanager
def connected(server: Running) -> Iterator[Connection]:
    connection = Connection(server)
    try:
        yield connection
    finally:
        connection.close()


def request(method: str, path: str, content_type: str, body: bytes) -> bytes:
    fields = f"Host: bench\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{method} {path} HTTP/1.1\r\n{fields}".encode() + body


def round_trip(server: Running, path: str, _: float) -> float:
    """Median milliseconds from an append to the reader that waits for it."""
    took: list[float] = []
    with connected(server) as writer, connected(server) as reader:
        writer.create(path, TEXT)
        reader.send(f"GET {path}?offset=-1&live=sse HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
        reader.until(b"upToDate")
        for number in range(TRIPS):
            mark = b"%099d" % number
            began = time.perf_counter()
            writer.send(request("POST", path, TEXT, mark))
            reader.until(mark)
            took.append(time.perf_counter() - began)
            writer.answers(1)
    return statistics.median(took) * 1000


def throughput(content_type: str, body: bytes, messages: int, in_flight: int) -> Callable[[Running, str, float], float]:
    """A measure of acknowledged messages a second, with this many appends in flight on one connection."""

    def measure(server: Running, path: str, seconds: float) -> float:
        with connected(server) as connection:
            connection.create(path, content_type)
            requests = request("POST", path, content_type, body) * in_flight
            done = 0
            began = time.perf_counter()
            while (elapsed := time.perf_counter() - began) < seconds:
                connection.send(requests)
                connection.answers(in_flight)
                done += in_flight * messages
            return done / elapsed

    return measure


_BATCH = json.dumps([SMALL.decode()] * BATCH).encode()
FIGURES: dict[str, Callable[[Running, str, float], float]] = {
    "round trip (ms)": round_trip,
    "small (msg/s)": throughput(TEXT, SMALL, 1, PIPELINED),
    "batched (msg/s)": throughput(JSON, _BATCH, BATCH, 4),
    "large (msg/s)": throughput(TEXT, LARGE, 1, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=STORAGE_MODES, default=list(STORAGE_MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a throughput round")
    parser.add_argument("--no-node", action="store_true", help="leave out the official Node server")
    arguments = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as running:
        servers = [replace(running.enter_context(headwater(mode)), name=mode) for mode in arguments.modes]
        if not arguments.no_node:
            servers += [
                replace(running.enter_context(official_node(mode)), name=f"node {mode}") for mode in ("memory", "file")
            ]
        with on_core(LOAD_CORE):
            for number in range(arguments.rounds):
                for figure, measure in FIGURES.items():
                    for index, server in enumerate(servers):
                        path = f"/v1/stream/report-{number}-{index}-{figure[:5].strip()}"
                        value = measure(server, path, arguments.seconds)
                        results.setdefault(server.name, {}).setdefault(figure, []).append(value)
    medians = {
        name: {figure: statistics.median(rounds) for figure, rounds in of.items()} for name, of in results.items()
    }
    print(f"{'':<16}" + "".join(f"{figure:>18}" for figure in FIGURES))
    for name, of in medians.items():
        print(f"{name:<16}" + "".join(f"{of[figure]:>18,.2f}" for figure in FIGURES))
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
