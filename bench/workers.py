"""A server with one process and with several workers under the same loads, in alternating rounds of one run.

    python -m bench.workers                         100 bytes, 32 connections, in memory; 1 process, 2, 4 and 8 workers

Appends, sent by wrk: each of its 8 threads has 4 connections and one stream, and the workers own equally many of these
streams; or each of 2 threads appends to 500 streams in turn, most of which another worker owns. Fan-out: 40 events per
second of one stream to 200 SSE readers. Replay: 8 connections that read one stream of 4 MiB from its beginning. CPU
time is that of all processes of the server, and of wrk, per append, delivered event, or MiB. The load generator uses
the same cores. A round is repeated if other programs, or other machines of the host, used more than a twentieth of
these cores during it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import psutil
import uvloop
from scripts.generated_docs import markdown
from tests.cluster.workers import name_in
from tests.serving import Server, serve

from bench.append import Load, body_of, need_wrk, run_wrk
from bench.limits import encode
from bench.servers import STORAGE_MODES

OWN_STREAMS = 8
"""Streams of the connections that use one each: a multiple of the number of workers, so that each has equally many."""
READERS = 200
EVENTS_PER_S = 40
EVENT = b"<event>"
CORES = os.cpu_count() or 1
OTHERS_MAX = 0.05
"""The most of the machine that other programs may use during a round."""
ATTEMPTS = 4
"""Rounds until one is accepted although it was disturbed."""
TIMES = "\N{MULTIPLICATION SIGN}"


class CountingReader(asyncio.Protocol):
    """Sends one request, and counts the events of its response."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self.events = 0
        self.has_begun = False
        self.transport: asyncio.Transport = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        self.has_begun = self.has_begun or b"event: control" in data
        self.events += data.count(EVENT)
        self._rest = data[-len(EVENT) + 1 :]


class RepeatingReader(asyncio.Protocol):
    """Reads the same chunk repeatedly, and counts its bytes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._left = 0
        self._head = b""
        self.received = 0
        self.transport: asyncio.Transport = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._left:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._left, self._head = int(length), b""
        self._left -= len(data)
        self.received += len(data)
        if not self._left:
            self.transport.write(self._request)


def create(server: Server, requests: list[bytes]) -> None:
    """Send each request once. Responses have no body."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for request in requests:
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b"\r\n\r\n"):
                answer += connection.recv(65536)
            if not answer.startswith(b"HTTP/1.1 201"):
                raise SystemExit(f"a stream could not be created: {answer!r}")


async def fan_out(server: Server, seconds: float) -> tuple[float, float]:
    """Events delivered per second, and CPU microseconds of the server per event."""
    loop = asyncio.get_running_loop()
    request = encode("GET", "/v1/stream/hot?offset=now&live=sse", b"")
    readers = [
        (await loop.create_connection(partial(CountingReader, request), "127.0.0.1", server.port))[1]
        for _ in range(READERS)
    ]
    answers, writer = await asyncio.open_connection("127.0.0.1", server.port)
    while not all(reader.has_begun for reader in readers):  # noqa: ASYNC110 - they say so one by one
        await asyncio.sleep(0.01)
    cpu_s, began_s = cpu_of(server), time.perf_counter()
    sent = 0
    while time.perf_counter() - began_s < seconds:
        writer.write(encode("POST", "/v1/stream/hot", EVENT.ljust(100, b".")))
        await answers.readuntil(b"\r\n\r\n")
        sent += 1
        await asyncio.sleep(max(0.0, began_s + sent / EVENTS_PER_S - time.perf_counter()))
    while (count := sum(reader.events for reader in readers)) < sent * READERS:  # noqa: ASYNC110 - others count
        await asyncio.sleep(0.001)
    cpu_s, took_s = cpu_of(server) - cpu_s, time.perf_counter() - began_s
    writer.close()
    for reader in readers:
        reader.transport.abort()
    return count / took_s, cpu_s / max(1, count) * 1e6


async def replay(connections: int, server: Server, seconds: float) -> tuple[float, float]:
    """MiB read per second, and CPU microseconds of the server per MiB."""
    loop = asyncio.get_running_loop()
    request = encode("GET", "/v1/stream/replayed?offset=-1", b"")
    readers = [
        (await loop.create_connection(partial(RepeatingReader, request), "127.0.0.1", server.port))[1]
        for _ in range(connections)
    ]
    await asyncio.sleep(min(0.5, seconds))
    before, cpu_s, began_s = sum(reader.received for reader in readers), cpu_of(server), time.perf_counter()
    await asyncio.sleep(seconds)
    count = (sum(reader.received for reader in readers) - before) / 2**20
    cpu_s, took_s = cpu_of(server) - cpu_s, time.perf_counter() - began_s
    for reader in readers:
        reader.transport.abort()
    return count / took_s, cpu_s / max(1e-9, count) * 1e6


Measure = Callable[[Server, int], tuple[float, ...]]


class Undisturbed:
    """Runs rounds, and repeats those in which something else used the machine."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers
        self.repeated = 0

    def run(self, measure: Measure, server: Server, seconds: int) -> tuple[float, ...]:
        for _ in range(ATTEMPTS - 1):
            others_s, began_s = self._others_s(), time.perf_counter()
            found = measure(server, seconds)
            if self._others_s() - others_s <= OTHERS_MAX * CORES * (time.perf_counter() - began_s):
                return found
            self.repeated += 1
        return measure(server, seconds)

    def _others_s(self) -> float:
        """CPU time of other programs, and time that the host used for other machines."""
        times = psutil.cpu_times()
        used_s = times.user + times.nice + times.system + getattr(times, "steal", 0.0)
        return used_s - time.process_time() - cpu_of_wrk() - sum(cpu_of(server) for server in self._servers)


def cpu_of_wrk() -> float:
    """User and system time of the runs of wrk that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of(server: Server) -> float:
    """User and system time of all processes of a server."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
    # The clock of each process: its times in /proc have a resolution of 10 ms, and an idle worker uses less.
    return sum(time.clock_gettime(~process.pid << 3 | 2) for process in processes)


def append(
    connections: int, streams: int, names: list[str], threads: int, server: Server, seconds: int
) -> tuple[float, float, float]:
    """Appends per second, and CPU microseconds of the server and of wrk per append."""
    load = Load(connections, streams, seconds, body_of(100, json_mode=False), "text/plain")
    paths = [f"/v1/stream/{name}" for name in names]
    cpu_s, wrk_s = cpu_of(server), cpu_of_wrk()
    result = run_wrk(server.url, load, paths, threads)
    count, cpu_s, wrk_s = result["requests"], cpu_of(server) - cpu_s, cpu_of_wrk() - wrk_s
    return count / (result["duration_us"] / 1e6), cpu_s / count * 1e6, wrk_s / count * 1e6


def table(found: dict[str, list[tuple[float, ...]]]) -> str:
    """The medians as the table of docs/workers.md, and the medians of the ratios to the first server in each round."""
    kinds = {
        "one stream": ("append, one stream per connection", True),
        "500 streams": ("append, 500 streams per connection", True),
        "fan-out": ("SSE event to one of 200 readers", False),
        "replay": ("MiB of replay", False),
    }
    rows = []
    numbers = list(dict.fromkeys(int(name.split(" ")[0]) for name in found))
    for number in numbers:
        cells = []
        for kind, (_, has_rate) in kinds.items():
            rounds, first = (found[f"{each} workers, {kind}"] for each in (number, numbers[0]))
            rate, cpu_us, *wrk_us = (statistics.median(values) for values in zip(*rounds, strict=True))
            ratios = [(one[0] / other[0], one[1] / other[1]) for one, other in zip(rounds, first, strict=True)]
            times, cpu_times = (statistics.median(values) for values in zip(*ratios, strict=True))
            ratio = number != numbers[0]
            cell = (f"{rate:,.0f} per s" + (f" ({times:.2f} {TIMES})" if ratio else "") + "; ") if has_rate else ""
            cell += f"{cpu_us:.1f} µs" + (f" ({cpu_times:.2f} {TIMES})" if ratio else "")
            cells.append(cell + "".join(f", wrk {value:.1f} µs" for value in wrk_us))
        rows.append((str(number) if number == 1 else f"{number} workers", *cells))
    return markdown.table(f"| processes | {' | '.join(title for title, _ in kinds.values())} |", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=STORAGE_MODES, default="memory")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="length of a round")
    chosen = parser.parse_args()
    need_wrk()
    names = [f"w{number}" for number in range(500)]
    own_names = [name_in(number, OWN_STREAMS, "own") for number in range(OWN_STREAMS)]
    measures: dict[str, Measure] = {
        "one stream": partial(append, chosen.connections, 1, own_names, OWN_STREAMS),
        "500 streams": partial(append, chosen.connections, len(names), names, 2),
        "fan-out": lambda server, seconds: uvloop.run(fan_out(server, seconds)),
        "replay": lambda server, seconds: uvloop.run(replay(8, server, seconds)),
    }
    found: dict[str, list[tuple[float, ...]]] = {}
    began_with = os.getloadavg()[0]
    with ExitStack() as running:
        servers = {
            workers: running.enter_context(
                serve(
                    DS_STORAGE__MODE=chosen.mode,
                    DS_SERVER__WORKERS=str(workers),
                    DS_LIMITS__MAX_STREAM_BYTES="0",
                    DS_LIMITS__MAX_MEMORY_BYTES=str(8 * 2**30),
                )
            )
            for workers in chosen.workers
        }
        for server in servers.values():
            puts = [encode("PUT", f"/v1/stream/{name}", b"") for name in (*names, *own_names, "hot")]
            puts.append(encode("PUT", "/v1/stream/replayed", b"r" * 4 * 2**20))
            create(server, puts)
        undisturbed = Undisturbed(list(servers.values()))
        for _ in range(chosen.rounds):
            for kind, measure in measures.items():
                for workers, server in servers.items():
                    result = undisturbed.run(measure, server, chosen.seconds)
                    found.setdefault(f"{workers} workers, {kind}", []).append(result)
    print(f"{undisturbed.repeated} rounds were repeated because they were disturbed")
    print(f"load average {began_with:.1f} at the beginning, {os.getloadavg()[0]:.1f} at the end")
    print(f"{'load':<28}{'per second':>12}{'CPU us':>9}{'wrk us':>9}")
    for name, results in found.items():
        rate, *cpu_us = (statistics.median(values) for values in zip(*results, strict=True))
        print(f"{name:<28}{rate:>12.0f}" + "".join(f"{value:>9.1f}" for value in cpu_us))
    print(table(found))
    print(json.dumps({"benchmark": "workers", "mode": chosen.mode, "rounds": found}))


if __name__ == "__main__":
    main()
