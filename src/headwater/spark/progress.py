"""What a streaming query does, told to others: as Prometheus metrics beside the server's, and as events in a stream.

Invariant: a listener never disturbs the query it listens to. What cannot be told is logged and dropped.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server
from pyspark.sql.streaming.listener import StreamingQueryListener

from headwater.spark.delivery import Source
from headwater.spark.errors import HeadwaterError, StreamMissing
from headwater.spark.options import Connection
from headwater.spark.protocol import connect

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

log = logging.getLogger("headwater.spark")

_JSON = "application/json"


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
        self._running = gauge("queries_running", "Queries that run.", ())
        self._failures = counter("query_failures", "Queries that ended with an error.")
        self._rows = counter("rows", "Rows read by micro-batches.")
        self._batches = counter("batches", "Micro-batches done.")
        self._batch = gauge("batch_id", "The last micro-batch that was done.")
        self._lag = gauge("lag_messages", "Messages in the streams that the query has not read yet.")
        self._lagging = gauge("lagging_streams", "Streams that have messages which the query has not read yet.")
        self._in_rate = gauge("input_rows_per_second", "Rows that arrived, a second.")
        self._out_rate = gauge("processed_rows_per_second", "Rows that were processed, a second of work.")
        self._seconds = gauge("batch_seconds", "Where the time of the last batch went.", ("query", "phase"))

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer scrapes of /metrics on a port of our own; 0 takes a free one. The port."""
        server, _ = start_http_server(port, host, registry=self.registry)
        return int(server.server_port)

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._names[str(event.id)] = event.name or str(event.id)
        self._running.inc()

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
        self._running.dec()
        if event.exception is not None:
            self._failures.labels(self._names.get(str(event.id), str(event.id))).inc()


class ProgressStream(StreamingQueryListener):
    """Appends what happens to queries to a JSON stream, one event each, keyed by query, for a page to follow."""

    def __init__(self, url: str, stream: str, token: str = "") -> None:
        self._client = connect(Connection(url.rstrip("/"), token=token, retry_timeout_s=5.0))
        self._stream = stream
        self._seqs: dict[str, int] = {}

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self._tell(str(event.id), str(event.runId), {"state": "running", "name": event.name, "at": event.timestamp})

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        progress = event.progress
        told = {
            "state": "running",
            "name": progress.name,
            "at": progress.timestamp,
            "batch": progress.batchId,
            "rows": progress.numInputRows,
            "inputRowsPerSecond": progress.inputRowsPerSecond,
            "processedRowsPerSecond": progress.processedRowsPerSecond,
            "milliseconds": dict(progress.durationMs),
            "sources": [
                {"description": source.description, "lag": sum(lags(source.endOffset, source.latestOffset).values())}
                for source in progress.sources
            ],
        }
        self._tell(str(progress.id), str(progress.runId), told)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Nothing new to tell."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        ended = {"state": "failed" if event.exception else "ended", "error": event.exception}
        self._tell(str(event.id), str(event.runId), ended)

    def _tell(self, query: str, run: str, value: dict[str, Any]) -> None:
        seq = self._seqs.get(run, 0)
        operation = "update" if seq else "insert"
        told = {"type": "query", "key": query, "value": value, "headers": {"operation": operation}}
        producer = Source(f"progress-{run}", 0, "driver").producer(self._stream, seq)
        body = json.dumps([told]).encode()
        try:
            try:
                self._client.append(self._stream, body, _JSON, producer)
            except StreamMissing:
                self._client.create(self._stream, _JSON)
                self._client.append(self._stream, body, _JSON, producer)
            self._seqs[run] = seq + 1
        except HeadwaterError as error:
            log.warning("progress of query %s could not be told: %s", query, error)


def lags(end: str | None, latest: str | None) -> dict[str, int]:
    """Messages between where a batch ended and where the streams end, by stream. Empty for sources of other kinds."""
    try:
        ends, tails = json.loads(end or "{}"), json.loads(latest or "{}")
        return {
            stream: max(0, tail["position"] - ends.get(stream, {"position": 0})["position"])
            for stream, tail in tails.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
