"""The results of the checkers in docs/reliability.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.generated_docs.check_results import CHECKS, results
from scripts.generated_docs.markdown import section, table
from scripts.generated_docs.stalls import loop_cpu, stalls

KILL_COUNTS = {
    "drivers": "drivers killed, with their JVM and Python processes",
    "workers": "Python processes of Spark killed",
    "servers": "servers killed",
    "databases": "databases killed",
    "second drivers": "second drivers started while the first one ran",
    "suspended": "drivers suspended for 5 to 45 s while another one ran",
    "suspended long": "drivers suspended for 130 to 150 s, longer than every timeout",
    "restores": "restores from a backup",
    "messages": "messages and changes that were compared",
}
"""By count of `tests/kills/trial.py`."""
CLUSTER_COUNTS = {
    "append": "appends",
    "read": "reads",
    "tail": "HEAD",
    "events": "events",
    "fork trees": "trees of forks",
    "lifecycles": "streams created, closed and deleted by one client",
    "delete": "deletions by several clients at once",
    "work appended": "messages of a subscription",
    "acks": "acknowledgements of a subscription",
    "lost": "requests without a response",
    "busy": "responses 503 (or 429, 507)",
}
"""By count of `tests/cluster/nodes/faults.py`."""


def reliability() -> str:
    """All results: a summary, then those with more than one number."""
    sections = (
        _summary(),
        _kills(),
        _cluster_faults(),
        _cluster_tables(),
        _crowds(),
        _soak(),
        *map(loop_cpu, results("loop_cpu")[-1:]),
        *map(stalls, results("stalls")[-1:]),
        _findings(),
    )
    return "\n\n".join(filter(None, sections))


def _summary() -> str:
    rows = (_check(name, *words) for name, words in CHECKS.items() if results(name))
    return f"## Summary\n\n{table('| check | size | runs | found | by mode |', rows)}"


def _check(name: str, what: str, count: str, unit: str) -> tuple[str, ...]:
    runs = [run for run in results(name) if "ended_early" not in run]
    by_mode: dict[str, float] = {}
    for run in runs:
        by_mode[run["mode"]] = by_mode.get(run["mode"], 0) + run["counts"].get(count, 0)
    found = sum(len(run["found"]) for run in runs)
    modes = ", ".join(f"{mode} {number:,.0f}" for mode, number in sorted(by_mode.items()))
    return what, f"{sum(by_mode.values()):,.0f} {unit}", str(len(runs)), str(found) if found else "nothing", modes


def _kills() -> str:
    return section(
        "Kills around the pipeline",
        "Stream to stream, stream to Postgres, Postgres to stream, a fold and an archive run in one application while"
        " messages and rows are written. At random times its processes, the server (durable files) and the database are"
        " killed, second drivers start on the same checkpoints, drivers are suspended and resumed while another one"
        " runs, and everything is restored from a backup. At the end of a run everything that was written must be there"
        " in every direction: once, and in order.",
        "| event | count |",
        _kill_rows(),
    )


def _kill_rows() -> Iterator[tuple[str, str]]:
    """The events of the pipeline's trials, summed over the runs."""
    if runs := [run["counts"] for run in results("pipeline_kills") if run["counts"]]:
        for name, words in KILL_COUNTS.items():
            yield words, f"{sum(run.get(name, 0) for run in runs):,}"


def _cluster_faults() -> str:
    return section(
        "Faults of a cluster",
        "Three nodes with three shards, TLS between them and standbys that serve reads, three Postgres servers and an"
        " object store on one machine. The clients' history is judged after the last fault.",
        "| faults | of these | clients had | time | load | commit |",
        (_fault_row(run, run["counts"]) for run in results("cluster_faults") if run["counts"]),
    )


def _fault_row(run: dict[str, Any], counts: dict[str, Any]) -> tuple[str, ...]:
    faults = ", ".join(f"{name} {number}" for name, number in sorted(counts["by_fault"].items()))
    done = ", ".join(f"{counts.get(name, 0):,} {words}" for name, words in CLUSTER_COUNTS.items())
    load = f"{run['load_before']} to {run['load_after']}"
    return str(run["size"]), faults, done, f"{run['seconds'] / 60:.0f} min", load, run["commit"]


def _cluster_tables() -> str:
    return section(
        "Tables of a cluster",
        "The largest size of each table of a cluster in Postgres, in each third of a run at a constant rate. The row of"
        " a shard changes at every commit; a row of the journal is deleted when the object store has it.",
        "| run | what | first third | second | last | commit |",
        _cluster_table_rows(),
    )


def _cluster_table_rows() -> Iterator[tuple[str, ...]]:
    for run in results("cluster_tables"):
        for name, sizes in run["counts"].get("numbers", {}).items():
            unit = "" if name == "appends" else " KiB"
            thirds = (f"{sizes[third]:,.0f}{unit}" for third in ("first", "middle", "last"))
            yield f"{run['counts']['minutes']:g} min", name, *thirds, run["commit"]


def _crowds() -> str:
    return section(
        "Many idle connections and silent readers",
        "Memory of the server process before, with and after many such connections, and after a second time; and the"
        " cost of an append and a HEAD of a normal client without and with them: the server's CPU time, and the 99th"
        " percentile of the response time. The client alternates between a server without the connections and one with"
        " them, so that other programs on the machine delay both equally. What stays after idle connections are unused"
        " pools of Python's allocator (7 of 8 MiB in `sys._debugmallocstats()`): the interpreter returns them to the"
        " system only when a whole arena is empty, and uses them for the next connections, so the second time adds"
        " nothing.",
        "| connections | before | with | after | after the second | CPU without | CPU with | p99 without | p99 with"
        " | commit |",
        (
            _crowd_row(f"{run['counts'][count]:,} {CHECKS[name][0].lower()}", run["counts"], run["commit"])
            for name, count in (("silent_readers", "readers"), ("idle_connections", "connections"))
            for run in results(name)
            if run["counts"]
        ),
    )


def _crowd_row(crowd: str, counts: dict[str, Any], commit: str) -> tuple[str, ...]:
    times = ("before_mib", "during_mib", "after_mib", "after_second_mib")
    memory = (f"{counts[when]:.0f} MiB" if when in counts else "" for when in times)
    costs = ("quiet_cpu_ms", "crowded_cpu_ms", "quiet_p99_ms", "crowded_p99_ms")
    return crowd, *memory, *(f"{counts[cost]} ms" for cost in costs), commit


def _soak() -> str:
    return section(
        "Soak",
        "Slopes of a straight line through the samples after the first quarter of the run. `cpu_ms` is the server's CPU"
        " time per request. `echo_…` are the times of round trips with an echo server at the same time, and"
        " `…_of_echo` the latency as a multiple of them: other programs on the machine slow down both.",
        "| run | metric | mean | per minute | over the run | commit |",
        _soak_rows(),
    )


def _soak_rows() -> Iterator[tuple[str, ...]]:
    for run in results("soak"):
        for key, number in run["counts"].get("numbers", {}).items():
            growth = (f"{number['mean']}", f"{number['per_minute']:+}", f"{number['growth']:+}")
            yield f"{run['counts']['minutes']:g} min, {run['mode']}", f"`{key}`", *growth, run["commit"]


def _findings() -> str:
    runs = [(name, run) for name in CHECKS for run in results(name)]
    found = [
        f"- {_origin(name, run, _loads(run))}: {finding.splitlines()[0]}"
        for name, run in runs
        for finding in run["found"]
    ]
    early = [f"- {_origin(name, run)} ended early: {run['ended_early']}" for name, run in runs if "ended_early" in run]
    lists = (("Findings", found), ("Runs without a result", early))
    return "\n\n".join("\n".join([f"## {title}\n", *lines]) for title, lines in lists if lines)


def _origin(name: str, run: dict[str, Any], loads: str = "") -> str:
    return f"`{name}` (seed {run['seed']}, {run['mode']}, commit {run['commit']}{loads})"


def _loads(run: dict[str, Any]) -> str:
    return f", load average {run['load_before']} before and {run['load_after']} after" if "load_after" in run else ""
