"""Appends per second in our storage modes: the same load in alternating rounds, and the ratios of consecutive rounds.

    python -m bench.modes                                acid against file-durable, one stream over 32 connections
    python -m bench.modes --streams 64 --connections 128 --modes memory file-durable acid

The first mode is the baseline. Invariant: a round counts only if every append was acknowledged.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from dataclasses import replace

from bench.append import Load, Round, body_of, run_round
from bench.servers import STORAGE_MODES, headwater


def measure(modes: list[str], load: Load, rounds: int, **settings: str) -> dict[str, list[Round]]:
    """Rounds of the modes alternate, so that other load on the machine affects all of them equally."""
    with ExitStack() as running:
        servers = [replace(running.enter_context(headwater(mode, **settings)), name=mode) for mode in modes]
        for server in servers:
            run_round(server, replace(load, seconds=1), 0)
        results: dict[str, list[Round]] = {mode: [] for mode in modes}
        for number in range(1, rounds + 1):
            for server in servers:
                results[server.name].append(run_round(server, load, number))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=STORAGE_MODES, default=["file-durable", "acid"])
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="length of a round")
    parser.add_argument("--bytes", type=int, default=100, help="size of one append")
    parser.add_argument("--shards", type=int, default=16, help="storage.acid_shard_count")
    arguments = parser.parse_args()
    load = Load(
        arguments.connections,
        arguments.streams,
        arguments.seconds,
        body_of(arguments.bytes, json_mode=False),
        "text/plain",
    )
    results = measure(arguments.modes, load, arguments.rounds, DS_STORAGE__ACID_SHARD_COUNT=str(arguments.shards))
    print(f"{load.connections} connections, {load.streams} streams, {arguments.bytes} bytes, {arguments.shards} shards")
    first = results[arguments.modes[0]]
    for mode, rounds in results.items():
        ratio = statistics.median(
            one.appends_per_sec / other.appends_per_sec for one, other in zip(rounds, first, strict=True)
        )
        print(
            f"{mode:<14}{statistics.median(one.appends_per_sec for one in rounds):>9.0f} appends/s"
            f"  p50 {statistics.median(one.p50_ms for one in rounds):6.2f} ms"
            f"  p99 {statistics.median(one.p99_ms for one in rounds):6.2f} ms"
            f"  {ratio:5.2f} of {arguments.modes[0]}"
        )


if __name__ == "__main__":
    main()
