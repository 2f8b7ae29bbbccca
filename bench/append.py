"""Appends per second of our server and of the official Node server, loaded by wrk in alternating rounds.

Invariant: a round counts only if every request succeeded; a rejected or failed request ends the run.

    python -m bench.append                 100-byte text appends to one stream over 32 connections, in memory
    python -m bench.append --json --connections 128 --mode file-durable
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from bench.servers import LOAD_CORE, STORAGE_MODES, Running, headwater, in_turns, official_node, on_core

_SCRIPT = Path(__file__).with_name("append.lua")
_RESULT = "RESULT "


@dataclass(frozen=True, slots=True)
class Round:
    server: str
    appends_per_sec: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    connections: int
    streams: int
    seconds: int
    body: str
    content_type: str


def body_of(size: int, *, json_mode: bool) -> str:
    if not json_mode:
        return "x" * size
    frame = len('{"k":""}')
    return '{"k":"' + "x" * (size - frame) + '"}'


def run_wrk(url: str, load: Load, paths: list[str], threads: int = 1) -> dict[str, int]:
    """Append with wrk, each thread to `load.streams` of these streams; returns the totals that `append.lua` prints."""
    done = subprocess.run(
        [
            "wrk",
            f"--threads={threads}",
            f"--connections={load.connections}",
            f"--duration={load.seconds}s",
            "--timeout=10s",
            f"--script={_SCRIPT}",
            url,
            "--",
            load.content_type,
            load.body,
            str(load.streams),
            *paths,
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=load.seconds + 30,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith(_RESULT))
    result: dict[str, int] = json.loads(line.removeprefix(_RESULT))
    if result["refused"] or result["broken"] or not result["requests"]:
        raise SystemExit(f"{url}: not every append was acknowledged: {result}")
    return result


def need_wrk() -> None:
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is missing; on Debian: apt-get install wrk")


def run_round(server: Running, load: Load, number: int) -> Round:
    paths = [f"/v1/stream/bench-{number}-{index}" for index in range(load.streams)]
    with httpx.Client(base_url=server.url) as http:
        for path in paths:
            http.put(path, headers={"Content-Type": load.content_type}).raise_for_status()
        with on_core(LOAD_CORE):
            result = run_wrk(server.url, load, paths)
        for path in paths:
            http.delete(path).raise_for_status()
    return Round(
        server.name,
        result["requests"] / (result["duration_us"] / 1e6),
        result["p50_us"] / 1e3,
        result["p99_us"] / 1e3,
    )


def measure(load: Load, rounds: int, mode: str) -> list[Round]:
    with headwater(mode) as ours, official_node(mode) as theirs:
        warm_up = Load(load.connections, load.streams, 1, load.body, load.content_type)
        for server in (ours, theirs):
            run_round(server, warm_up, 0)
        return in_turns((ours, theirs), rounds, lambda server, number: run_round(server, load, number))


def median_of(rounds: list[Round], server: str) -> Round:
    own = [one for one in rounds if one.server == server]
    return Round(
        server,
        statistics.median(one.appends_per_sec for one in own),
        statistics.median(one.p50_ms for one in own),
        statistics.median(one.p99_ms for one in own),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="length of a round")
    parser.add_argument("--bytes", type=int, default=100, help="size of one append")
    parser.add_argument("--json", action="store_true", help="JSON streams instead of text")
    parser.add_argument("--mode", choices=STORAGE_MODES, default="memory")
    arguments = parser.parse_args()
    need_wrk()
    load = Load(
        connections=arguments.connections,
        streams=arguments.streams,
        seconds=arguments.seconds,
        body=body_of(arguments.bytes, json_mode=arguments.json),
        content_type="application/json" if arguments.json else "text/plain",
    )
    rounds = measure(load, arguments.rounds, arguments.mode)

    print(f"{'server':<16}{'round':>6}{'appends/s':>12}{'p50 ms':>9}{'p99 ms':>9}")
    for index, one in enumerate(rounds):
        print(_row(one, str(index // 2 + 1)))
    ours, theirs = median_of(rounds, "headwater"), median_of(rounds, "official node")
    print(_row(ours, "median"))
    print(_row(theirs, "median"))
    # Consecutive rounds had the same conditions, so each pair gives a ratio.
    ratio = statistics.median(
        one.appends_per_sec / other.appends_per_sec for one, other in zip(rounds[::2], rounds[1::2], strict=True)
    )
    print(f"median ratio of the rates, headwater / official node: {ratio:.2f}")
    summary = {
        "benchmark": "append",
        "mode": arguments.mode,
        "connections": load.connections,
        "streams": load.streams,
        "bytes": arguments.bytes,
        "content_type": load.content_type,
        "rounds": [asdict(one) for one in rounds],
        "median": {"headwater": asdict(ours), "official_node": asdict(theirs)},
        "ratio": ratio,
    }
    print(json.dumps(summary))


def _row(one: Round, label: str) -> str:
    return f"{one.server:<16}{label:>6}{one.appends_per_sec:>12.0f}{one.p50_ms:>9.2f}{one.p99_ms:>9.2f}"


if __name__ == "__main__":
    main()
