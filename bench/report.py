"""Every load on every storage mode, compared with the official Node server and other servers in alternating rounds.

    python -m bench.report --json run.json                   everything: about 6 minutes on two quiet cores
    python -m bench.report --full --json run.json            up to 1,000,000 streams and 1 GB: about 8 minutes
    python -m bench.report --modes memory --loads append --no-scale
    python -m bench.report --peer other=http://127.0.0.1:8080 --peer-command rust="server --port {port}"
    python -m bench.report --page run.json                   write the tables and the charts of docs/benchmarks.md

One client on one core loads one server on another, and the servers take turns in each round; only the ratios within a
run are meaningful. Small appends are sent by wrk if it is installed. A bare echo of the same requests shows the limit
of the generator, and a raw loop of syncs that of the disk. The loads are in `workloads`, growth is in `scale`. If a
request to our server fails there is no report; another server that fails under a load is listed with its first error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import scale
from bench.limits import GROWING_FILE, bare_echo, sync_loop
from bench.report_page import write_page
from bench.servers import LOAD_CORE, SERVER_CORE, STORAGE_MODES, Running, headwater, official_node, on_core
from bench.workloads import CLIENT, ECHO, ECHOED, LOADS, peak_bytes
from headwater.core import native

_START_S = 20.0


@contextmanager
def commanded(name: str, command: str) -> Iterator[Running]:
    """Another server, started by a command line in which `{port}` is replaced by its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with on_core(SERVER_CORE):
        child = subprocess.Popen(shlex.split(command.replace("{port}", str(port))), stdout=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if child.poll() is not None or time.monotonic() > until_s:
                    raise SystemExit(f"{name} does not listen on port {port}: {command}") from None
                time.sleep(0.05)
        yield Running(name, f"http://127.0.0.1:{port}", child.pid)
    finally:
        child.terminate()
        child.wait(_START_S)


def growing_loop(directory: Path, size: int, seconds: float) -> float:
    """Megabytes per second of appending and syncing to a growing file."""
    block = b"x" * size
    written = 0
    descriptor = os.open(directory / "growing", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        began_s = time.perf_counter()
        while (elapsed_s := time.perf_counter() - began_s) < seconds:
            written += os.write(descriptor, block)
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    return written / elapsed_s / 1e6


def disk(seconds: float) -> dict[str, float]:
    """Measurements of the disk itself."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        small = sync_loop(directory, 3200, seconds)
        large = sync_loop(directory, 2**20, seconds)
        return {
            "syncs of 3,200 bytes over written blocks, per second": small["syncs_per_sec"],
            "p50 of such a sync (us)": small["p50_us"],
            "1 MiB and sync over written blocks, MB/s": large["syncs_per_sec"] * 2**20 / 1e6,
            GROWING_FILE: growing_loop(directory, 2**20, seconds),
        }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    samples: dict[str, dict[str, list[dict[str, float]]]] = {}
    peaks: dict[str, int] = {}
    failures: dict[str, dict[str, str]] = {}
    with ExitStack() as running:
        servers = [replace(running.enter_context(headwater(mode)), name=mode) for mode in arguments.modes]
        if not arguments.no_node:
            servers += [
                replace(running.enter_context(official_node(mode)), name=f"node {mode}") for mode in ("memory", "file")
            ]
        servers += [Running(name, url, 0) for name, url in arguments.peer]
        servers += [running.enter_context(commanded(*peer)) for peer in arguments.peer_command]
        servers.append(running.enter_context(bare_echo()))
        with on_core(LOAD_CORE):
            for number in range(arguments.rounds):
                for index, (load, (_, measure)) in enumerate(LOADS.items()):
                    if arguments.loads and not any(text in load for text in arguments.loads):
                        continue
                    for server in servers:
                        if server.name == ECHO and load not in ECHOED:
                            continue
                        if server.name in failures.get(load, {}):
                            continue
                        print(f"round {number + 1}: {load}, {server.name}", file=sys.stderr)
                        try:
                            sample = measure(server, f"/v1/stream/r{number}-{index}", arguments.seconds)
                        except SystemExit as error:
                            if server.name in arguments.modes:
                                raise
                            # Another server that fails under a load has no result for it; the others still do.
                            failures.setdefault(load, {})[server.name] = str(error)[:100]
                            samples.get(load, {}).pop(server.name, None)
                            continue
                        samples.setdefault(load, {}).setdefault(server.name, []).append(asdict(sample))
        peaks = {server.name: peak_bytes(server.pid) for server in servers}
    result: dict[str, Any] = {
        "taken": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "build": native.BUILD,
        "client": CLIENT,
        "load_average": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "units": {load: unit for load, (unit, _) in LOADS.items()},
        "samples": samples,
        "failures": failures,
        "peak_bytes": peaks,
        "disk": disk(arguments.seconds),
    }
    return result


def save(result: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def print_table(result: dict[str, Any]) -> None:
    for load, servers in result["samples"].items():
        print(f"\n{load} ({result['units'][load]}): median, spread; p50, p99, p99.9 and CPU per request in us")
        for name, rounds in servers.items():
            rates = [one["per_second"] for one in rounds]
            times = "".join(
                f"{statistics.median(one[key] for one in rounds):>11,.0f}"
                for key in ("p50_us", "p99_us", "p999_us", "cpu_us")
            )
            spread = f"{min(rates):,.0f}-{max(rates):,.0f}"
            print(f"  {name:<14}{statistics.median(rates):>12,.0f} {spread:>20}{times}")
    for load, failed in result["failures"].items():
        print("\n" + "\n".join(f"{load}: {name} failed: {error}" for name, error in failed.items()))
    print("\n" + "\n".join(f"{name}: {value:,.0f}" for name, value in result["disk"].items()))
    scale.print_tables(result.get("scale", {}))
    print("peak memory (MB): " + ", ".join(f"{name} {size / 1e6:,.0f}" for name, size in result["peak_bytes"].items()))


def _named(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=STORAGE_MODES, default=list(STORAGE_MODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of one load in a round")
    parser.add_argument("--loads", nargs="+", help="run only loads whose name contains one of these")
    parser.add_argument("--no-scale", action="store_true", help="omit the tables of growth")
    parser.add_argument("--full", action="store_true", help="grow to 1,000,000 streams and 1 GB")
    parser.add_argument("--no-node", action="store_true", help="omit the official Node server")
    parser.add_argument("--peer", type=_named, action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--peer-command", type=_named, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--json", type=Path, help="write the run to this file")
    parser.add_argument("--page", type=Path, metavar="RUN", help="only write docs/benchmarks.md from this file")
    arguments = parser.parse_args()
    if arguments.page is not None:
        write_page(json.loads(arguments.page.read_text()))
        return
    result = run(arguments)
    save(result, arguments.json)
    if not arguments.no_scale:
        # A failure here does not lose what was measured before.
        result["scale"] = scale.run(full=arguments.full)
        save(result, arguments.json)
    print_table(result)


if __name__ == "__main__":
    main()
