"""Our appends compared with two limits in one run: a bare echo of the same requests, and a raw loop of syncs.

    python -m bench.limits                          appends of 100 bytes over 32 connections, in memory
    python -m bench.limits --mode file-durable

Rates depend on the machine and its other load. CPU time per request, divided by that of the echo, depends much less on
either. Rounds of the servers alternate. The load generator runs in this process, on another core; the rate of the echo
shows how much it can send.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop

from bench.servers import LOAD_CORE, REPOSITORY, SERVER_CORE, STORAGE_MODES, Running, cpu_seconds, headwater, on_core

GROWING_FILE = "1 MiB and sync on a growing file, MB/s"
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class LimitRound:
    server: str
    requests_per_sec: float
    cpu_us: float
    """User and system time of the server per request."""
    p50_us: float
    p99_us: float


@contextmanager
def bare_echo() -> Iterator[Running]:
    with on_core(SERVER_CORE):
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.echo_server"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        assert child.stdout is not None
        line = child.stdout.readline()
        yield Running("bare echo", line.removeprefix("listening on ").strip(), child.pid)
    finally:
        child.communicate(timeout=20)


def encode(method: str, path: str, body: bytes) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}"
    return head.encode() + _END + body


class Sender(asyncio.Protocol):
    """Sends one request after the other on a connection and times each. Responses have no body."""

    def __init__(self, request: bytes, latencies_s: list[float]) -> None:
        self._request = request
        self._latencies_s = latencies_s
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._received = b""
        self._sent_s = 0.0
        self.stopped = asyncio.get_running_loop().create_future()
        self.is_last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._received.endswith(_END):
            return
        if not self._received.startswith(b"HTTP/1.1 20"):
            raise SystemExit(f"not every request succeeded: {self._received!r}")
        self._received = b""
        self._latencies_s.append(time.perf_counter() - self._sent_s)
        if self.is_last:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.stopped.set_result(None)

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)


async def load(server: Running, request: bytes, connections: int, seconds: float) -> LimitRound:
    loop = asyncio.get_running_loop()
    latencies_s: list[float] = []
    senders = []
    cpu_s, began_s = cpu_seconds(server.pid), time.perf_counter()
    for _ in range(connections):
        _, sender = await loop.create_connection(lambda: Sender(request, latencies_s), "127.0.0.1", server.port)
        senders.append(sender)
    await asyncio.sleep(seconds)
    for sender in senders:
        sender.is_last = True
    await asyncio.gather(*(sender.stopped for sender in senders))
    cpu_s, seconds = cpu_seconds(server.pid) - cpu_s, time.perf_counter() - began_s
    latencies_s.sort()
    count = len(latencies_s)
    return LimitRound(
        server.name,
        count / seconds,
        cpu_s / count * 1e6,
        latencies_s[count // 2] * 1e6,
        latencies_s[count * 99 // 100] * 1e6,
    )


def one_round(server: Running, number: int, size: int, connections: int, seconds: float) -> LimitRound:
    path = f"/v1/stream/limit-{number}"

    async def run() -> LimitRound:
        await load(server, encode("PUT", path, b""), 1, 0)
        return await load(server, encode("POST", path, b"x" * size), connections, seconds)

    with on_core(LOAD_CORE):
        return uvloop.run(run())


def sync_loop(directory: Path, size: int, seconds: float) -> dict[str, float]:
    """Repeat `pwrite` and `fdatasync` over blocks that were written before: the limit of the disk."""
    file_bytes = 16 * 2**20
    block = b"x" * size
    took_s: list[float] = []
    descriptor = os.open(directory / "sync-loop", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, b"\0" * file_bytes, 0)
        os.fsync(descriptor)
        until_s = time.perf_counter() + seconds
        at = 0
        while time.perf_counter() < until_s:
            began_s = time.perf_counter()
            os.pwrite(descriptor, block, at)
            os.fdatasync(descriptor)
            took_s.append(time.perf_counter() - began_s)
            at = (at + size) % (file_bytes - size)
    finally:
        os.close(descriptor)
    took_s.sort()
    return {
        "syncs_per_sec": len(took_s) / sum(took_s),
        "p50_us": took_s[len(took_s) // 2] * 1e6,
        "p99_us": took_s[len(took_s) * 99 // 100] * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=STORAGE_MODES, default="memory")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a round")
    chosen = parser.parse_args()
    rounds: list[LimitRound] = []
    with headwater(chosen.mode) as ours, bare_echo() as echo, tempfile.TemporaryDirectory() as directory:
        for server in (ours, echo):
            one_round(server, 0, chosen.bytes, chosen.connections, 0.5)
        for number in range(1, chosen.rounds + 1):
            rounds += [
                one_round(server, number, chosen.bytes, chosen.connections, chosen.seconds) for server in (ours, echo)
            ]
        # A batch has the appends that one iteration of the event loop received: at most one per connection.
        batch_bytes = chosen.connections * chosen.bytes
        syncs = sync_loop(Path(directory), batch_bytes, chosen.seconds) if chosen.mode != "memory" else None
    print(f"{'server':<12}{'requests/s':>12}{'CPU us':>9}{'p50 us':>9}{'p99 us':>9}")
    for one in rounds:
        figures = f"{one.requests_per_sec:>12.0f}{one.cpu_us:>9.1f}{one.p50_us:>9.0f}{one.p99_us:>9.0f}"
        print(f"{one.server:<12}{figures}")
    pairs = list(zip(rounds[::2], rounds[1::2], strict=True))
    cpu_ratio = statistics.median(one.cpu_us / other.cpu_us for one, other in pairs)
    print(f"CPU time of an append / of the bare echo: {cpu_ratio:.2f}")
    if syncs is not None:
        print(f"raw syncs of {batch_bytes} bytes: {syncs['syncs_per_sec']:.0f}/s, p50 {syncs['p50_us']:.0f} us")
    summary = {
        "benchmark": "limits",
        "mode": chosen.mode,
        "rounds": [asdict(one) for one in rounds],
        "cpu_ratio": cpu_ratio,
        "raw_syncs": syncs,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
