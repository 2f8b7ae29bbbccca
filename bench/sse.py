"""SSE fan-out of our server and of the official Node server: the time of an event from its POST to every reader.

Invariant: a round counts only if every reader got every event.

    python -m bench.sse
    python -m bench.sse --readers 1000 --rate 50 --seconds 5 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import httpx

from bench.servers import LOAD_CORE, REPOSITORY, STORAGE_MODES, Running, headwater, in_turns, official_node, on_core

_PAYLOAD_BYTES = 100


@dataclass(frozen=True, slots=True)
class Round:
    server: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    events_per_sec: float


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def publish(http: httpx.Client, path: str, rate: float, seconds: float) -> tuple[int, float]:
    """POST `rate` events per second, each with its send time; return their number and the actual rate."""
    sent, began = 0, time.monotonic()
    while sent < rate * seconds:
        delay = began + sent / rate - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        payload = f"<{time.monotonic_ns()}>".ljust(_PAYLOAD_BYTES, ".")
        http.post(path, content=payload, headers={"Content-Type": "text/plain"}).raise_for_status()
        sent += 1
    return sent, sent / (time.monotonic() - began)


def run_round(server: Running, readers: int, rate: float, seconds: float, number: int) -> Round:
    path = f"/v1/stream/fan-out-{number}"
    with httpx.Client(base_url=server.url, timeout=30.0) as http:
        http.put(path, headers={"Content-Type": "text/plain"}).raise_for_status()
        with on_core(LOAD_CORE):
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "bench.sse_readers",
                    "127.0.0.1",
                    str(server.port),
                    path,
                    str(readers),
                ],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        try:
            assert child.stdout is not None
            if child.stdout.readline().strip() != b"ready":
                raise SystemExit(f"{server.name}: the readers did not connect")
            with on_core(LOAD_CORE):
                sent, reached = publish(http, path, rate, seconds)
            output, _ = child.communicate(timeout=60)
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()
        http.delete(path)
    result = json.loads(output)
    short = [got for got in result["per_reader"] if got != sent]
    if short or len(result["per_reader"]) != readers:
        raise SystemExit(f"{server.name}: {len(short)} of {readers} readers did not get all {sent} events")
    ordered = sorted(result["latencies_ms"])
    return Round(server.name, percentile(ordered, 0.5), percentile(ordered, 0.99), ordered[-1], reached)


def measure(readers: int, rate: float, seconds: float, rounds: int, mode: str) -> list[Round]:
    with headwater(mode, DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as ours, official_node(mode) as theirs:
        for server in (ours, theirs):
            run_round(server, readers, rate, 1.0, 0)
        return in_turns(
            (ours, theirs), rounds, lambda server, number: run_round(server, readers, rate, seconds, number)
        )


def median_of(rounds: list[Round], server: str) -> Round:
    own = [one for one in rounds if one.server == server]
    return Round(
        server,
        statistics.median(one.p50_ms for one in own),
        statistics.median(one.p99_ms for one in own),
        statistics.median(one.max_ms for one in own),
        statistics.median(one.events_per_sec for one in own),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0, help="events per second")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", choices=STORAGE_MODES, default="memory")
    arguments = parser.parse_args()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = arguments.readers * 2 + 256
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))

    rounds = measure(arguments.readers, arguments.rate, arguments.seconds, arguments.rounds, arguments.mode)
    print(f"{'server':<16}{'round':>6}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'events/s':>10}")
    for index, one in enumerate(rounds):
        print(_row(one, str(index // 2 + 1)))
    ours, theirs = median_of(rounds, "headwater"), median_of(rounds, "official node")
    print(_row(ours, "median"))
    print(_row(theirs, "median"))
    # Consecutive rounds had the same conditions, so each pair gives a ratio.
    pairs = list(zip(rounds[::2], rounds[1::2], strict=True))
    ratios = {
        "p50": statistics.median(one.p50_ms / other.p50_ms for one, other in pairs),
        "p99": statistics.median(one.p99_ms / other.p99_ms for one, other in pairs),
    }
    print(f"median ratios, headwater / official node: p50 {ratios['p50']:.2f}, p99 {ratios['p99']:.2f}")
    summary = {
        "benchmark": "sse",
        "mode": arguments.mode,
        "readers": arguments.readers,
        "rate": arguments.rate,
        "rounds": [asdict(one) for one in rounds],
        "median": {"headwater": asdict(ours), "official_node": asdict(theirs)},
        "ratio": ratios,
    }
    print(json.dumps(summary))


def _row(one: Round, label: str) -> str:
    times = f"{one.p50_ms:>9.2f}{one.p99_ms:>9.2f}{one.max_ms:>9.2f}"
    return f"{one.server:<16}{label:>6}{times}{one.events_per_sec:>10.1f}"


if __name__ == "__main__":
    main()
