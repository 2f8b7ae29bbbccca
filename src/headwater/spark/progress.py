"""The progress of streaming queries, as Prometheus metrics and as events in a stream.

Invariant: a listener never delays its query. It stores numbers, which other threads serve or send.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from pyspark.sql.streaming.listener import StreamingQueryListener

from headwater.spark.errors import HeadwaterError
from headwater.spark.offsets import START, Place, are_of_two_streams, places_from_json
from headwater.spark.query_errors import error_sentence
from headwater.spark.status import PIPELINE, State, StatusStream

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

OFFSETS_MAX: Final = 100
"""How many streams an event lists with their offsets; a query may read thousands."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Descriptions of the source and the target of a query, for people."""

    source: str
    target: str


class ProgressMetrics(StreamingQueryListener):
    """Add it with `spark.streams.addListener(ProgressMetrics())`, then `serve(port)`."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        by_query = ("query",)

        def gauge(name: str, text: str, labels: tuple[str, ...] = by_query) -> Gauge:
            return Gauge(f"headwater_spark_{name}", text, labels, registry=self.registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"headwater_spark_{name}", text, by_query, registry=self.registry)

        self._names: dict[str, str] = {}
        self._runs: set[str] = set()
        self._running = gauge("queries_running", "Running queries.", ())
        self._failures = counter("query_failures", "Queries that ended with an error.")
        self._rows = counter("rows", "Rows read by micro-batches.")
        self._batches = counter("batches", "Micro-batches done.")
        self._batch = gauge("batch_id", "The last completed micro-batch.")
        self._lag = gauge("lag_messages", "Messages in the streams that the query has not read yet.")
        self._lagging = gauge("lagging_streams", "Streams with messages that the query has not read yet.")
        self._in_rate = gauge("input_rows_per_second", "Rows received per second.")
        self._out_rate = gauge("processed_rows_per_second", "Rows processed per second of processing time.")
        self._seconds = gauge("batch_seconds", "Duration of each phase of the last batch.", ("query", "phase"))

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Serve /metrics on its own port, 0 for a free one; return the port."""
        server, _ = start_http_server(port, host, registry=self.registry)
        return int(server.server_port)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._names[str(event.id)] = event.name or str(event.id)
        self._runs.add(str(event.runId))
        self._running.set(len(self._runs))

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        query = self._names.setdefault(str(progress.id), progress.name or str(progress.id))
        self._rows.labels(query).inc(progress.numInputRows)
        self._batches.labels(query).inc()
        self._batch.labels(query).set(progress.batchId)
        self._in_rate.labels(query).set(progress.inputRowsPerSecond)
        self._out_rate.labels(query).set(progress.processedRowsPerSecond)
        for phase, milliseconds in progress.durationMs.items():
            self._seconds.labels(query, phase).set(milliseconds / 1000)
        waiting = [lag for source in progress.sources for lag in lags(source.endOffset, source.latestOffset).values()]
        self._lag.labels(query).set(sum(waiting))
        self._lagging.labels(query).set(sum(1 for lag in waiting if lag))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        query = self._names.get(str(event.id))
        if query is not None:
            self._lag.labels(query).set(0)
            self._lagging.labels(query).set(0)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        # Queries that started before the listener was added end too.
        self._runs.discard(str(event.runId))
        self._running.set(len(self._runs))
        if event.exception is not None:
            self._failures.labels(self._names.get(str(event.id), str(event.id))).inc()


class ProgressStream(StreamingQueryListener):
    """Publish the current state of each query to a stream, by default the one that the UI's page "Pipeline" shows.

    `flows` maps the name of a query to descriptions of what it reads and writes; without it the page shows the streams
    that the query reads. Pass `status` to share one `StatusStream` with other publishers.
    """

    def __init__(
        self,
        url: str,
        stream: str = PIPELINE,
        *,
        token: str = "",
        ca_file: str = "",
        flows: Mapping[str, Flow] | None = None,
        status: StatusStream | None = None,
    ) -> None:
        self.status = status or StatusStream(url, stream, token=token, ca_file=ca_file)
        self._flows = dict(flows or {})
        self._names: dict[str, str] = {}
        self._states: dict[str, State] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._publish(str(event.id), event.name, {"status": "running", "error": None})

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        state: State = {"status": "running", "error": None} | query_state(progress)
        offsets = state["offsets"]
        state["offsets"] = dict(sorted(offsets.items())[:OFFSETS_MAX])
        if offsets:
            state["source"] = _listed(sorted(offsets))
        self._publish(str(progress.id), progress.name, state)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Publish the idle state: the page reports a query as silent if it sends nothing for half a minute."""
        known = self._states.get(str(event.id), {})
        lag = {"lag_messages": 0} if known.get("lag_messages") is not None else {}
        self._publish(str(event.id), None, {"input_rows_per_s": 0.0, "processed_rows_per_s": 0.0} | lag)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        ended: State = {"status": "stopped", "input_rows_per_s": 0.0}
        if event.exception is not None:
            error = {"message": error_sentence(event.exception), "at_ms": time.time_ns() // 1_000_000}
            ended = {"status": "failed", "input_rows_per_s": 0.0, "error": error}
        self._publish(str(event.id), None, ended, urgent=True)

    def close(self) -> None:
        """Send the waiting states."""
        self.status.close()

    def _publish(self, query: str, name: str | None, changes: State, *, urgent: bool = False) -> None:
        key = self._names.setdefault(query, name or query)
        known = self._states.setdefault(query, {"name": key, "id": query})
        known.update(changes)
        if (flow := self._flows.get(key)) is not None:
            known |= {"source": flow.source, "target": flow.target}
        self.status.publish("query", key, dict(known), urgent=urgent)


def batch_ms(phases: Mapping[str, int]) -> int | None:
    """The duration of a batch without the wait for new data, which is part of the phase `latestOffset`."""
    whole = phases.get("triggerExecution")
    return None if whole is None else whole - phases.get("latestOffset", 0)


def query_state(progress: Any) -> State:
    """The state of a query after a batch, from `StreamingQueryProgress`, with the field names that we publish."""
    lag = [lags(source.endOffset, source.latestOffset) for source in progress.sources]
    offsets = {name: offset for source in progress.sources for name, offset in last_offsets(source.endOffset).items()}
    return {
        "batch": progress.batchId,
        "batch_ms": batch_ms(progress.durationMs),
        "phases_ms": dict(progress.durationMs),
        "rows": progress.numInputRows,
        "input_rows_per_s": _number(progress.inputRowsPerSecond),
        "processed_rows_per_s": _number(progress.processedRowsPerSecond),
        "lag_messages": sum(sum(one.values()) for one in lag) if any(lag) else None,
        "streams": len(offsets),
        "offsets": offsets,
    }


def last_offsets(end: str | None) -> dict[str, str]:
    """The end offset of a batch by stream, or the `lsn` of a database. Empty for other kinds of sources."""
    try:
        ends = json.loads(end or "{}").items()
    except (ValueError, AttributeError):
        return {}
    offsets = {name: place.get("offset") if isinstance(place, dict) else place for name, place in ends}
    return {name: offset for name, offset in offsets.items() if isinstance(offset, str)}


def _number(rate: float) -> float | None:
    """The rate, or None for NaN, which Spark reports if no time has passed and which JSON does not have."""
    return rate if math.isfinite(rate) else None


def _listed(streams: list[str]) -> str:
    return ", ".join(streams[:3]) + (f" and {len(streams) - 3} more" if len(streams) > 3 else "")


def lags(end: str | None, latest: str | None) -> dict[str, int]:
    """Messages between the end of a batch and the end of each stream. Empty for other kinds of sources."""
    ends = _places(end)
    return {
        stream: max(0, tail.position - _messages_read(tail, ends.get(stream, START)))
        for stream, tail in _places(latest).items()
    }


def _messages_read(tail: Place, end: Place) -> int:
    """Messages of the current stream that were read: none if `end` is a place in a stream that it replaced."""
    return 0 if are_of_two_streams(end.offset, tail.offset) else end.position


def _places(offset: str | None) -> Mapping[str, Place]:
    """The places of an offset from the progress of a query; empty for other kinds of sources."""
    try:
        return places_from_json(json.loads(offset or "{}"))
    except (ValueError, AttributeError, HeadwaterError):
        return {}
