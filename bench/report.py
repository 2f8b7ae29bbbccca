"""Round trip, small messages and large messages in each storage mode, beside the official Node server.

    python -m bench.report                     every mode, five rounds in turns: median (best)
    python -m bench.report --rounds 2 --seconds 1 --modes memory file-durable

One client on one core loads one server on another. Invariant: a round counts only if every append was acknowledged.

| figure | load |
|---|---|
| round trip | 100 bytes appended, and the time until an SSE reader of the stream has them |
| small | 100-byte appends, 32 connections with one in flight each: acknowledged messages a second |
| small, CPU | the CPU time of the server for each of them |
| batched | the same messages, 100 to a JSON array, 4 connections |
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
from pathlib import Path

from bench.servers import LOAD_CORE, STORAGE_MODES, Running, headwater, official_node, on_core

CONNECTIONS = 32
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
    fields = f"Host: localhost\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{method} {path} HTTP/1.1\r\n{fields}".encode() + body


def round_trip(server: Running, path: str, _: float) -> float:
    """Median milliseconds from an append to the reader that waits for it."""
    took: list[float] = []
    with connected(server) as writer, connected(server) as reader:
        writer.create(path, TEXT)
        reader.send(f"GET {path}?offset=-1&live=sse HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
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
    """A measure of acknowledged messages a second, with this many connections, each with one append in flight."""

    def measure(server: Running, path: str, seconds: float) -> float:
        done, elapsed, _ = load(server, path, seconds, content_type, body, in_flight)
        return done * messages / elapsed

    return measure


def cpu(server: Running, path: str, seconds: float) -> float:
    """Microseconds of CPU time that the server takes for a small append: what a busy machine does not change much."""
    done, _, cpu_secs = load(server, path, seconds, TEXT, SMALL, CONNECTIONS)
    return cpu_secs * 1e6 / done


def load(
    server: Running, path: str, seconds: float, content_type: str, body: bytes, in_flight: int
) -> tuple[int, float, float]:
    """Appends that were acknowledged, and the time and the CPU time of the server that they took."""
    with ExitStack() as opened:
        connections = [opened.enter_context(connected(server)) for _ in range(in_flight)]
        connections[0].create(path, content_type)
        append = request("POST", path, content_type, body)
        done = 0
        cpu_before = cpu_secs_of(server.pid)
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            for connection in connections:
                connection.send(append)
            for connection in connections:
                connection.answers(1)
            done += in_flight
        return done, elapsed, cpu_secs_of(server.pid) - cpu_before


def cpu_secs_of(pid: int) -> float:
    """CPU time of a process with all its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


_BATCH = json.dumps([SMALL.decode()] * BATCH).encode()
FIGURES: dict[str, Callable[[Running, str, float], float]] = {
    "round trip (ms)": round_trip,
    "small (msg/s)": throughput(TEXT, SMALL, 1, CONNECTIONS),
    "small, CPU (us)": cpu,
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
                        path = f"/v1/stream/report-{number}-{index}-{list(FIGURES).index(figure)}"
                        value = measure(server, path, arguments.seconds)
                        results.setdefault(server.name, {}).setdefault(figure, []).append(value)
    print(f"{'':<16}" + "".join(f"{figure:>26}" for figure in FIGURES))
    for name, figures in results.items():
        print(f"{name:<16}" + "".join(f"{_summary(figure, rounds):>26}" for figure, rounds in figures.items()))
    print(json.dumps(results))


def _summary(figure: str, rounds: list[float]) -> str:
    """The median of the rounds and the best of them: what else the machine does only ever makes a round worse."""
    best = max(rounds) if figure.endswith("(msg/s)") else min(rounds)
    return f"{statistics.median(rounds):,.2f} ({best:,.2f})"


if __name__ == "__main__":
    main()
