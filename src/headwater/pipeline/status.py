"""The status of jobs and replication slots, as values for the status stream and as Prometheus metrics.

docs/pipeline.md documents the fields.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater.pipeline.job import Job
from headwater.postgres.lsn import lsn_to_text
from headwater.postgres.slots import SlotState
from headwater.spark.progress import OFFSETS_MAX, query_state


@dataclass(slots=True)
class QueryStatus:
    """The published status of a job."""

    name: str
    source: str = ""
    target: str = ""
    status: str = "starting"
    """starting, running, waiting (for its restart), failed, stopped."""
    input_rows_per_s: float = 0.0
    processed_rows_per_s: float = 0.0
    rows: int = 0
    """Since the application started."""
    batch: int | None = None
    batch_ms: float | None = None
    lag_messages: int | None = None
    offsets: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    error: dict[str, Any] | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether the job runs, or has ended normally."""
        return self.status in {"running", "stopped"}

    def update(self, progress: Any) -> None:
        """Update the status from Spark's progress report of a batch."""
        state = query_state(progress)
        self.status = "running"
        self.input_rows_per_s = state["input_rows_per_s"] or 0.0
        self.processed_rows_per_s = state["processed_rows_per_s"] or 0.0
        self.rows += state["rows"]
        self.batch = state["batch"]
        self.batch_ms = state["batch_ms"]
        self.lag_messages = state["lag_messages"]
        self.offsets = dict(sorted({**self.offsets, **state["offsets"]}.items())[:OFFSETS_MAX])
        if state["rows"]:
            self.error = None


def describe_job(job: Job) -> QueryStatus:
    """The status of a job before its first start."""
    return QueryStatus(job.name, job.source, job.target)


def slot_value(slot: SlotState, error: dict[str, Any] | None) -> dict[str, Any]:
    """The published status of a replication slot."""
    return {
        "database": slot.database,
        "status": "failed" if slot.is_lost else "running",
        "lag_bytes": slot.lag_bytes,
        "confirmed_lsn": lsn_to_text(slot.confirmed_lsn),
        "current_lsn": lsn_to_text(slot.current_lsn),
        "wal_status": slot.wal_status,
        "error": error,
    }


def error_state(reason: str) -> dict[str, Any]:
    return {"message": reason, "at_ms": time.time_ns() // 1_000_000}


class StatusMetrics(Collector):
    """The status as Prometheus metrics, collected at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, dict[str, Any]] = {}
        self._slots: dict[str, dict[str, Any]] = {}
        self.failures = Counter(
            "headwater_pipeline_failures", "Queries that ended with an error.", ("job",), registry=registry
        )
        self.ready = Gauge("headwater_pipeline_ready", "Whether every job runs.", registry=registry)
        registry.register(self)

    def set(self, queries: Iterable[QueryStatus], slots: dict[str, dict[str, Any]]) -> None:
        with self._lock:
            self._queries = {one.name: asdict(one) for one in queries}
            self._slots = dict(slots)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            queries, slots = self._queries, self._slots
        rows = "Rows since the application started."
        restarts = "Restarts after a failure."
        old = "Deprecated: use {}."
        for kind, name, text, key, scale in (
            (GaugeMetricFamily, "running", "Whether the job runs.", None, 1.0),
            (CounterMetricFamily, "rows", rows, "rows", 1.0),
            (GaugeMetricFamily, "input_rows_per_second", "Rows received per second.", "input_rows_per_s", 1.0),
            (GaugeMetricFamily, "batch_seconds", "Duration of the last batch.", "batch_ms", 0.001),
            (GaugeMetricFamily, "lag_messages", "Messages not processed yet.", "lag_messages", 1.0),
            (CounterMetricFamily, "restarts", restarts, "restarts", 1.0),
            # The names of earlier releases, kept for one more release.
            (GaugeMetricFamily, "rows", old.format("headwater_pipeline_rows_total"), "rows", 1.0),
            (GaugeMetricFamily, "restarts", old.format("headwater_pipeline_restarts_total"), "restarts", 1.0),
            (GaugeMetricFamily, "batch_milliseconds", old.format("headwater_pipeline_batch_seconds"), "batch_ms", 1.0),
        ):
            family = kind(f"headwater_pipeline_{name}", text, labels=("job",))
            for job, value in queries.items():
                shown = value["status"] == "running" if key is None else value[key]
                if shown is not None:
                    family.add_metric([job], float(shown) * scale)
            yield family
        lag = GaugeMetricFamily("headwater_slot_lag_bytes", "WAL that Postgres keeps for a slot.", labels=("slot",))
        for slot, value in slots.items():
            lag.add_metric([slot], float(value["lag_bytes"]))
        yield lag
