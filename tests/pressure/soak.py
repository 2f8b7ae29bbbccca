"""Mixed load for a long time: memory, descriptors, CPU time per request and latency must not grow.

    python -m tests.pressure.soak --minutes 60 [--mode file-durable]        (or: make soak MINUTES=60)

Everything that is created is deleted again or bounded, so nothing should grow after a warm-up. Slopes are those of a
straight line through the samples after the warm-up; `judge` defines what counts as near zero. Other programs affect
the latency, so it is measured as a multiple of the latency of an echo server at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import psutil

from tests.crash.wire import Client, Lost, NotSent, Reply
from tests.pressure.echo import echo_server
from tests.serving import serve

MIB = 1024 * 1024
TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}
WARM_UP_SHARE = 0.25
SAMPLE_S = 10.0
DESCRIPTORS_MAX = 10
ECHO_FLOOR_MS = 1.0
"""Lower bound for the latency of the echo server: multiples of a smaller one would be noise."""
ALLOWED: dict[str, Callable[[float], float]] = {
    "rss_mib": lambda mean: 0.10 * mean,
    "descriptors": lambda _: DESCRIPTORS_MAX,
    "cpu_ms": lambda mean: 0.10 * mean,
    "p50_of_echo": lambda mean: max(1.0, 0.25 * mean),
    "p99_of_echo": lambda mean: max(2.0, 0.50 * mean),
}
"""By metric, the growth over the whole run that still counts as none, given its mean."""


class Soak:
    def __init__(self, port: int) -> None:
        self.port = port
        self.running = True
        self.times: list[float] = []
        self.echo_times: list[float] = []
        self.counts: Counter[str] = Counter()
        self._clients: list[Client] = []

    def client(self) -> Client:
        client = Client(self.port)
        self._clients.append(client)
        return client

    def ended(self) -> bool:
        return not self.running

    async def close(self) -> None:
        for client in self._clients:
            client.close()
        await asyncio.sleep(0.01)

    async def ask(self, client: Client, method: str, path: str, *wanted: int, **more: Any) -> Reply:
        began = time.monotonic()
        reply = await client.request(method, path, **more)
        self.times.append(time.monotonic() - began)
        assert reply.status in wanted, f"{method} {path}: {reply.status} {reply.body[:300]!r}"
        self.counts["requests"] += 1
        return reply


async def cycle(soak: Soak, number: int) -> None:
    """Create a stream, write to it as a producer, read it back and delete it, repeatedly."""
    client = soak.client()
    turn = 0
    while soak.running:
        path = f"/v1/stream/soak/{number}/{turn}"
        await soak.ask(client, "PUT", path, 201, headers=TEXT)
        content = b""
        for seq in range(40):
            body = f"{number}.{turn}.{seq};".encode() + b"x" * (seq * 29 % 700)
            producer = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(seq)}
            await soak.ask(client, "POST", path, 200, headers={**TEXT, **producer}, body=body)
            content += body
        found = await soak.ask(client, "GET", f"{path}?offset=-1", 200)
        assert found.body == content, f"{path} was read back wrong"
        await soak.ask(client, "DELETE", path, 204)
        turn += 1
        if turn % 5 == 0:
            client.close()
        soak.counts["cycles"] += 1
        await asyncio.sleep(0.01)


async def brief(soak: Soak) -> None:
    """Streams that expire, and buckets that are created and deleted."""
    client = soak.client()
    turn = 0
    while soak.running:
        await soak.ask(client, "PUT", f"/v1/stream/brief/{turn}", 201, headers={**TEXT, "Stream-TTL": "2"}, body=b"x")
        bucket = f"/ds/soak-{turn}"
        await soak.ask(client, "PUT", bucket, 201)
        await soak.ask(client, "PUT", f"{bucket}/s", 201, headers=TEXT)
        tail = (await soak.ask(client, "POST", f"{bucket}/s", 204, headers=TEXT, body=b"one")).offset
        await soak.ask(client, "PUT", f"{bucket}/s/snapshot/{tail}", 204, headers=TEXT, body=b"state" * 2000)
        await soak.ask(client, "GET", f"{bucket}/s/bootstrap", 200)
        await soak.ask(client, "GET", f"{bucket}/streams", 200)
        await soak.ask(client, "DELETE", f"{bucket}/s", 204)
        await soak.ask(client, "DELETE", bucket, 204)
        turn += 1
        await asyncio.sleep(0.05)


FEED = "/v1/stream/feed"


async def feed(soak: Soak) -> None:
    """A stream that drops its oldest messages, for live readers."""
    client = soak.client()
    number = 0
    while soak.running:
        body = f"{number:08d}:".encode() + b"f" * 990 + b";"
        await soak.ask(client, "POST", FEED, 204, headers=TEXT, body=body)
        number += 1
        await asyncio.sleep(0.02)


async def poll(soak: Soak) -> None:
    client = soak.client()
    offset = "now"
    while soak.running:
        reply = await client.request("GET", f"{FEED}?offset={offset}&live=long-poll")
        assert reply.status in {200, 204}, reply
        offset = reply.offset
        soak.counts["polls"] += 1


async def listen(soak: Soak) -> None:
    client = soak.client()
    while soak.running:
        with suppress(Lost, NotSent):
            async with aclosing(client.events(f"{FEED}?offset=now&live=sse")) as events:
                async for _ in events:
                    soak.counts["events"] += 1
                    if soak.ended():
                        break


async def ping(soak: Soak, echo_port: int) -> None:
    """Round trips with the echo server: the same machine and load generator, without our server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", echo_port)
    while soak.running:
        began = time.monotonic()
        writer.write(b"x" * 200)
        await reader.readexactly(200)
        soak.echo_times.append(time.monotonic() - began)
        await asyncio.sleep(0.01)
    writer.close()


def quantile_ms(times: list[float], share: float) -> float:
    ordered = sorted(times) or [0.0]
    return ordered[int(len(ordered) * share)] * 1000


async def sample(soak: Soak, pid: int, until: float) -> list[dict[str, float]]:
    process = psutil.Process(pid)
    samples = []
    began = time.monotonic()
    spent_s, requests = _cpu_s(process), soak.counts["requests"]
    while time.monotonic() < until:
        await asyncio.sleep(min(SAMPLE_S, max(0.1, (until - began) / 40)))
        times, soak.times = soak.times, []
        echo_times, soak.echo_times = soak.echo_times, []
        before_s, spent_s = spent_s, _cpu_s(process)
        before, requests = requests, soak.counts["requests"]
        samples.append(
            {
                "minute": (time.monotonic() - began) / 60,
                "rss_mib": process.memory_info().rss / MIB,
                "descriptors": float(process.num_fds()),
                "cpu_ms": (spent_s - before_s) / max(1, requests - before) * 1000,
                "p50_ms": quantile_ms(times, 0.5),
                "p99_ms": quantile_ms(times, 0.99),
                "echo_p50_ms": quantile_ms(echo_times, 0.5),
                "echo_p99_ms": quantile_ms(echo_times, 0.99),
            }
        )
    return samples


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def load(port: int, echo_port: int, pid: int, minutes: float) -> tuple[list[dict[str, float]], Counter[str]]:
    soak = Soak(port)
    client = soak.client()
    retention = {"Stream-Retention-Bytes": str(MIB), "Stream-Retention-Drop": "allowed"}
    await soak.ask(client, "PUT", FEED, 201, headers={**TEXT, **retention})
    until = time.monotonic() + minutes * 60
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(cycle(soak, number))
            for task in (
                brief(soak),
                feed(soak),
                poll(soak),
                poll(soak),
                listen(soak),
                listen(soak),
                ping(soak, echo_port),
            ):
                group.create_task(task)
            samples = await sample(soak, pid, until)
            soak.running = False
    finally:
        await soak.close()
    return samples, soak.counts


def slope(samples: list[dict[str, float]], key: str) -> float:
    """The slope per minute, after the warm-up."""
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    return statistics.linear_regression([each["minute"] for each in kept], [each[key] for each in kept]).slope


def judge(samples: list[dict[str, float]]) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Mean, slope per minute and growth of each metric after the warm-up; and descriptions of those that grow."""
    kept = samples[int(len(samples) * WARM_UP_SHARE) :]
    minutes = kept[-1]["minute"] - kept[0]["minute"]
    found: dict[str, dict[str, float]] = {}
    growing = []
    for each in samples:
        for key in ("p50", "p99"):
            each[f"{key}_of_echo"] = each[f"{key}_ms"] / max(each[f"echo_{key}_ms"], ECHO_FLOOR_MS)
    for key in (*ALLOWED, "p50_ms", "p99_ms", "echo_p50_ms", "echo_p99_ms"):
        mean = statistics.fmean(each[key] for each in kept)
        per_minute = slope(samples, key)
        growth = per_minute * minutes
        found[key] = {"mean": round(mean, 2), "per_minute": round(per_minute, 4), "growth": round(growth, 2)}
        if key in ALLOWED and growth > ALLOWED[key](mean):
            growing.append(f"{key} grew by {growth:.2f} (mean {mean:.2f}) in {minutes:.1f} minutes")
    return found, growing


def run(minutes: float, mode: str = "file-durable", program: tuple[str, ...] = ("headwater",)) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "DS_STORAGE__MODE": mode,
        "DS_STORAGE__HOT_TAIL_BYTES": str(4 * MIB),
        "DS_STORAGE__SEGMENT_BYTES": str(4 * MIB),
        "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "2",
        "DS_SERVER__SSE_RECONNECT_INTERVAL_SECS": "10",
    }
    with echo_server() as echo_port, serve(program=program, **settings) as server:
        samples, counts = asyncio.run(load(server.port, echo_port, server.pid, minutes))
        assert "Traceback" not in server.log(), server.log()[-3000:]
    found, growing = judge(samples)
    first, last = samples[int(len(samples) * WARM_UP_SHARE)], samples[-1]
    return {
        "minutes": minutes,
        **counts,
        "numbers": found,
        "growing": growing,
        "first": {key: round(value, 1) for key, value in first.items()},
        "last": {key: round(value, 1) for key, value in last.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--mode", default="file-durable")
    chosen = parser.parse_args()
    found = run(chosen.minutes, chosen.mode)
    print(json.dumps(found, indent=1))  # noqa: T201
    raise SystemExit(1 if found["growing"] else 0)


if __name__ == "__main__":
    main()
