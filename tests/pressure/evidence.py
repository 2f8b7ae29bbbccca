"""Run a checker at a chosen size and store its result, for `docs/reliability.md`.

    python -m tests.pressure.evidence fuzz --size 1000000 [--mode memory]
    python -m tests.pressure.evidence --list

A run adds one entry to `tests/pressure/results/NAME.json`: its size, counts, findings, seed, commit and duration. A run
that finds an error is stored as well. `make fmt` generates the page from these files; its sizes are sums over all
stored runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

from tests.pressure import many_connections, soak
from tests.pressure.disruptions import DISRUPTIONS, OF_WORKERS, run_disruptions
from tests.pressure.fuzz import run_against_server
from tests.pressure.operations import OPERATIONS
from tests.pressure.stalls import STALL_MAX_MS, cpu_of, wall_of

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"

Counts = dict[str, Any]
Experiment = Callable[[int, int, str], Counts]
"""Takes size, seed and mode; returns counts. An assertion error is a finding."""


class Finding(AssertionError):
    """A finding of a run that has counts as well."""

    def __init__(self, found: object, counts: Counts) -> None:
        super().__init__(found)
        self.counts = counts


def crash_points(size: int, seed: int, mode: str) -> Counts:
    """Recoveries after power losses and kills of the simulated disk."""
    from tests.storage.simulation import run_seeds

    checked = lives = 0
    while checked < size:
        checked += run_seeds(range(seed + lives, seed + lives + 20))
        lives += 20
    return {"recoveries": checked, "simulations": lives}


def kill_nine(size: int, seed: int, mode: str) -> Counts:
    """Rounds of kill -9 under load on one data directory."""
    from tests.crash.test_kill_nine import run_rounds

    with tempfile.TemporaryDirectory() as home:
        workload = asyncio.run(run_rounds(Path(home), mode, size, seed))
    return {"rounds": workload.counts["rounds"], **workload.counts}


def pipeline_kills(size: int, seed: int, mode: str) -> Counts:
    """Kills of drivers, workers, servers and databases around a pipeline in every direction."""
    from tests.kills.trial import run_kills

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    home = Path(tempfile.mkdtemp(prefix="headwater-kills-"))
    counts = run_kills(home, size, seed)
    shutil.rmtree(home)  # After a failure the directory is kept, with the logs of the drivers.
    return dict(counts)


def model_steps(size: int, seed: int, mode: str) -> Counts:
    """Steps of the engine's state machine, compared with the model."""
    import hypothesis
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from tests.engine.seams import JournalBacking, MemoryBacking
    from tests.model.machine import machine

    steps = examples = 0

    def counted(base: Any) -> Any:
        class Counted(base):  # type: ignore[misc]
            def check_invariants(self, *args: Any) -> None:
                nonlocal steps
                steps += 1
                super().check_invariants(*args)

        return Counted

    kinds = [(MemoryBacking, "inline"), (JournalBacking, "inline"), (JournalBacking, "thread")]
    while steps < size:
        backing, commit = kinds[(examples // 100) % len(kinds)]
        run_state_machine_as_test(
            hypothesis.seed(seed + examples)(counted(machine(backing, commit))),  # type: ignore[arg-type]
            settings=settings(
                max_examples=100,
                stateful_step_count=50,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
        examples += 100
    return {"steps": steps, "examples": examples}


def fuzz(size: int, seed: int, mode: str) -> Counts:
    """Pipelined requests, split at random bytes, checked against the model."""
    return dict(run_against_server(requests=size, seed=seed, mode=mode))


def history(size: int, seed: int, mode: str) -> Counts:
    """Disruptions with concurrent clients."""
    with tempfile.TemporaryDirectory() as home:
        disruptions = Random(seed).choices(list(DISRUPTIONS), k=size)
        counts = asyncio.run(run_disruptions(Path(home), mode, disruptions, seed))
    return {"troubles": size, **counts}


def worker_deaths(size: int, seed: int, mode: str) -> Counts:
    """kill -9 and SIGSTOP of random workers of two, with concurrent clients and a subscription."""
    names = Random(seed).choices([*OF_WORKERS, "kill"], (4, 3, 1), k=size)
    with tempfile.TemporaryDirectory() as home:
        counts = asyncio.run(run_disruptions(Path(home), mode, names, seed, workers=2))
    return {"rounds": size, **counts}


def stalls(size: int, seed: int, mode: str) -> Counts:
    """The longest wait of another client while each operation runs at its full size.

    After all operations, those with a wait over the limit are measured again, at most `size` times in all: what the
    server does itself appears each time, what the machine adds does not. The row has the measurement with the shortest
    wait, and every measured wait.
    """
    rows: dict[str, Counts] = {}
    for _ in range(size):
        for operation in OPERATIONS:
            row = rows.get(operation.name)
            if row is not None and ("failed" in row or row["worst_ms"] <= STALL_MAX_MS):
                continue
            try:
                found = wall_of(operation, 1.0)
                waits = [*(row["all_ms"] if row is not None else ()), found["worst_ms"]]
                best = found if row is None or found["worst_ms"] < row["worst_ms"] else row
                rows[operation.name] = {**best, "all_ms": waits}
            except Exception as error:
                rows[operation.name] = {
                    "operation": operation.name,
                    "input": operation.worst,
                    "failed": str(error)[:200],
                }
            print(json.dumps(rows[operation.name]), flush=True)  # noqa: T201
    return {"operations": len(rows), "rows": list(rows.values())}


def loop_cpu(size: int, seed: int, mode: str) -> Counts:
    """The most CPU time of one iteration of the loop while each operation runs; the size is in percent of its input."""
    rows: list[Counts] = []
    for operation in OPERATIONS:
        share = size / 100
        row: Counts = {"operation": operation.name, "input": operation.worst, "mode": operation.mode}
        try:
            worst = cpu_of([replace(operation, share=share)])[operation.name]
            row |= {"cpu_ms": round(worst.cpu_ms, 1), "syncs": worst.syncs, "read_bytes": worst.read_bytes}
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        print(json.dumps(row), flush=True)  # noqa: T201
        rows.append(row)
    return {"operations": len(rows), "rows": rows}


def silent_readers(size: int, seed: int, mode: str) -> Counts:
    """Readers that never read, and their cost for other clients."""
    return many_connections.silent_readers(size)


def idle_connections(size: int, seed: int, mode: str) -> Counts:
    """Idle connections, and their memory."""
    return many_connections.idle_connections(size)


def soak_minutes(size: int, seed: int, mode: str) -> Counts:
    """Mixed load for this many minutes; slopes of memory, descriptors and latency."""
    found = soak.run(size, mode)
    if found["growing"]:
        raise Finding(found["growing"], found)
    return found


def cluster_faults(size: int, seed: int, mode: str) -> Counts:
    """Faults of a cluster (TLS between its nodes, standbys that serve reads), with concurrent clients."""
    from tests.cluster.nodes.faults import FAULTS, run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    names = Random(seed).choices(list(FAULTS), k=size)
    counts = run(names, seed, standbys=1, standby_reads=True, tls=True)
    return {"faults": size, "by_fault": dict(Counter(names)), **counts}


def cluster_tables(size: int, seed: int, mode: str) -> Counts:
    """Appends to a cluster at a constant rate for this many minutes; sizes of its tables in Postgres."""
    from tests.cluster.nodes.tables import run

    found = run(size)
    if found["growing"]:
        raise Finding(found["growing"], found)
    return found


EXPERIMENTS: dict[str, Experiment] = {
    "crash_points": crash_points,
    "kill_nine": kill_nine,
    "pipeline_kills": pipeline_kills,
    "model_steps": model_steps,
    "fuzz": fuzz,
    "history": history,
    "worker_deaths": worker_deaths,
    "stalls": stalls,
    "loop_cpu": loop_cpu,
    "silent_readers": silent_readers,
    "idle_connections": idle_connections,
    "soak": soak_minutes,
    "cluster_faults": cluster_faults,
    "cluster_tables": cluster_tables,
}


def commit() -> str:
    """The tested commit. Results that earlier runs added do not count as a change."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(REPOSITORY)}")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def keep(name: str, entry: Counts, results: Path = RESULTS) -> None:
    results.mkdir(exist_ok=True)
    path = results / f"{name}.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    entries.append(entry)
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


FIXED_MODES: dict[str, str] = {
    "crash_points": "file-durable",
    "pipeline_kills": "file-durable",
    "cluster_faults": "cluster",
    "cluster_tables": "cluster",
}
"""The storage mode of checkers that have only one."""


def run(name: str, size: int, seed: int, mode: str) -> Counts:
    began = time.monotonic()
    entry: Counts = {
        "size": size,
        "seed": seed,
        "mode": mode,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "found": [],
    }
    try:
        entry["counts"] = EXPERIMENTS[name](size, seed, mode)
    except AssertionError as error:
        entry["found"] = ["\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])[:2000]]
        entry["counts"] = error.counts if isinstance(error, Finding) else {}
    entry["seconds"] = round(time.monotonic() - began, 1)
    entry["load_after"] = round(os.getloadavg()[0], 1)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=EXPERIMENTS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    parser.add_argument("--mode", default="memory", help="storage mode, where the checker has one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.list or chosen.name is None:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:18} {experiment.__doc__}")  # noqa: T201
        return
    print(f"{chosen.name}: size {chosen.size}, seed {chosen.seed}, mode {chosen.mode}", flush=True)  # noqa: T201
    entry = run(chosen.name, chosen.size, chosen.seed, FIXED_MODES.get(chosen.name, chosen.mode))
    keep(chosen.name, entry, chosen.results)
    print(json.dumps(entry)[:3000], flush=True)  # noqa: T201
    raise SystemExit(1 if entry["found"] else 0)


if __name__ == "__main__":
    main()
