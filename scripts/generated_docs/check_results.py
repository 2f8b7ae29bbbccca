"""The results of the checkers in tests/pressure, as they are saved in the repository."""

from __future__ import annotations

import json
from typing import Any

from scripts.generated_docs.source import REPOSITORY

_DIRECTORY = REPOSITORY / "tests" / "pressure" / "results"
CHECKS: dict[str, tuple[str, str, str]] = {
    "crash_points": ("Crashes of a simulated disk, each recovery compared with an oracle", "recoveries", "recoveries"),
    "kill_nine": ("kill -9 of the server under load, repeatedly on one directory", "rounds", "rounds"),
    "pipeline_kills": ("kill -9 of processes of a pipeline that runs in every direction", "kills", "kills"),
    "model_steps": ("Random operations on the engine, compared with the model", "steps", "steps"),
    "fuzz": ("Pipelined requests, split at random bytes, compared with the model", "requests", "requests"),
    "history": ("Concurrent clients during kills, stops, clock jumps and disk errors", "troubles", "disruptions"),
    "worker_deaths": (
        "kill -9 and SIGSTOP of random workers, with concurrent clients and a subscription",
        "rounds",
        "rounds",
    ),
    "cluster_faults": (
        "Faults of nodes, Postgres, the object store and connections of a cluster, with concurrent clients",
        "faults",
        "faults",
    ),
    "cluster_tables": ("Load on the tables of a cluster in Postgres, at a constant rate", "minutes", "minutes"),
    "silent_readers": ("Readers that never read", "readers", "readers"),
    "idle_connections": ("Idle connections", "connections", "connections"),
    "soak": ("Mixed load", "minutes", "minutes"),
}
"""By result file: the check, the count that is its size, and the unit."""


def results(name: str) -> list[dict[str, Any]]:
    """The runs of a check, the latest last."""
    path = _DIRECTORY / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
