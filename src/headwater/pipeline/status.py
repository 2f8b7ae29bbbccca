"""What a pipeline tells of itself: an entity for each query and slot, as metrics, and as events of a stream.

An event is a state-protocol change: `{"type": "query" | "slot", "key": …, "value": {…}, "headers": {"operation":
"upsert"}}`. What a value holds is written down in docs/pipeline.md. Invariant: telling never disturbs what is told of.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater.pipeline.job import Job
from headwater.postgres.lsn import lsn_to_text
from headwater.postgres.slots import SlotState
from headwater.spark.progress import batch_ms, lags
from headwater.spark.status import StatusStream


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class QueryStatus:
    """One job as others see it."""

    name: str
    source: str = ""
    target: str = ""
    status: str = "starting"
    """starting, running, waiting (to be started again), failed, stopped."""
    input_rows_per_s: float = 0.0
    processed_rows_per_s: float = 0.0
    rows: int = 0
    """Since this application began."""
    batch: int | None = None
    batch_ms: float | None = None
    lag_messages: int | None = None
    offsets: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    error: dict[str, Any] | None = None
    updated_at_ms: int = 0

    @property
    def is_well(self) -> bool:
        """Whether it runs, or has ended as it should."""
        return self.status in {"running", "stopped"}

    def take(self, progress: Any) -> None:
        """What Spark says of its last batch."""
        self.status = "running"
        self.input_rows_per_s = _number(progress.inputRowsPerSecond)
        self.processed_rows_per_s = _number(progress.processedRowsPerSecond)
        self.rows += progress.numInputRows
        self.batch = progress.batchId
        self.batch_ms = batch_ms(progress.durationMs)
        if progress.numInputRows:
            self.error = None
        lag: int | None = None
        for source in progress.sources:
            self.offsets |= _offsets(source.endOffset)
            found = lags(source.endOffset, source.latestOffset)
            if found:
                lag = (lag or 0) + sum(found.values())
        self.lag_messages = lag
        self.updated_at_ms = now_ms()


def described(job: Job) -> QueryStatus:
    source, target = getattr(job, "source", ""), getattr(job, "target", "")
    if not source:
        names = getattr(job, "streams", ()) or (f"{getattr(job, 'bucket', '')}/{getattr(job, 'prefix', '')}*",)
        source = ", ".join(names)
        target = str(getattr(job, "table", "") or getattr(job, "lake", "") or "snapshots")
    return QueryStatus(job.name, source, target)


def slot_value(slot: SlotState, error: dict[str, Any] | None) -> dict[str, Any]:
    """A replication slot as others see it."""
    return {
        "database": slot.database,
        "status": "failed" if slot.is_lost else "running",
        "lag_bytes": slot.lag_bytes,
        "confirmed_lsn": lsn_to_text(slot.confirmed_lsn),
        "current_lsn": lsn_to_text(slot.current_lsn),
        "wal_status": slot.wal_status,
        "error": error,
        "updated_at_ms": now_ms(),
    }


def failure(reason: str) -> dict[str, Any]:
    return {"message": reason, "at_ms": now_ms()}


class StatusTeller:
    """Tells of entities that have changed, and of those that were not told of for a while."""

    def __init__(self, stream: StatusStream, interval_s: float) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._told: dict[tuple[str, str], tuple[dict[str, Any], float]] = {}

    def tell(self, entities: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
        now = time.monotonic()
        for type_, key, value in entities:
            state = {name: one for name, one in value.items() if name != "updated_at_ms"}
            before, at = self._told.get((type_, key), ({}, -self._interval_s))
            if state != before or now - at >= self._interval_s:
                self._told[type_, key] = state, now
                self._stream.tell(type_, key, state)

    def close(self) -> None:
        self._stream.close()


class StatusMetrics(Collector):
    """The same for Prometheus, read when it asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lock = threading.Lock()
        self._queries: dict[str, dict[str, Any]] = {}
        self._slots: dict[str, dict[str, Any]] = {}
        self.failures = Counter(
            "headwater_pipeline_failures", "Queries that ended with an error.", ("job",), registry=registry
        )
        self.ready = Gauge("headwater_pipeline_ready", "Whether every job runs.", registry=registry)
        registry.register(self)

    def take(self, queries: Iterable[QueryStatus], slots: dict[str, dict[str, Any]]) -> None:
        with self._lock:
            self._queries = {one.name: asdict(one) for one in queries}
            self._slots = dict(slots)

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            queries, slots = self._queries, self._slots
        for name, text, key in (
            ("headwater_pipeline_running", "Whether the job runs.", None),
            ("headwater_pipeline_rows", "Rows since the application began.", "rows"),
            ("headwater_pipeline_input_rows_per_second", "Rows that arrived, a second.", "input_rows_per_s"),
            ("headwater_pipeline_batch_milliseconds", "What the last batch took.", "batch_ms"),
            ("headwater_pipeline_lag_messages", "Messages that wait.", "lag_messages"),
            ("headwater_pipeline_restarts", "Starts after a failure.", "restarts"),
        ):
            family = GaugeMetricFamily(name, text, labels=("job",))
            for job, value in queries.items():
                told = value["status"] == "running" if key is None else value[key]
                if told is not None:
                    family.add_metric([job], float(told))
            yield family
        lag = GaugeMetricFamily("headwater_slot_lag_bytes", "Log that Postgres keeps for a slot.", labels=("slot",))
        for slot, value in slots.items():
            lag.add_metric([slot], float(value["lag_bytes"]))
        yield lag


def _offsets(spelled: str | None) -> dict[str, str]:
    """Where each stream (or the database's log) stands, from what a source says."""
    try:
        found = json.loads(spelled or "{}")
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    if isinstance(found.get("lsn"), str):
        return {"lsn": found["lsn"]}
    return {
        stream: str(place["offset"]) for stream, place in found.items() if isinstance(place, dict) and "offset" in place
    }


def _number(value: float) -> float:
    """JSON has no NaN and no infinity, which Spark gives for batches of no duration."""
    return round(value, 3) if value == value and abs(value) != float("inf") else 0.0  # noqa: PLR0124
