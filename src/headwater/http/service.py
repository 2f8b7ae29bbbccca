"""Pages for operators: is the process alive, does it take writes, what has it done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headwater.http.request import Request
from headwater.http.response import NO_STORE, OK, SERVICE_UNAVAILABLE

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection

_TEXT: Final = NO_STORE + b"Content-Type: text/plain; charset=utf-8\r\n"
_METRICS: Final = NO_STORE + b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"


def health(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "health"
    connection.reply(OK, _TEXT, b"ok")


def ready(app: App, connection: Connection, request: Request, target: Target) -> None:
    """Ready means: takes writes. A server that drains or whose storage failed still answers reads."""
    connection.operation = "ready"
    if app.draining:
        connection.reply(SERVICE_UNAVAILABLE, _TEXT, b"draining")
    elif app.engine.failure is not None:
        connection.reply(SERVICE_UNAVAILABLE, _TEXT, b"storage does not take writes")
    else:
        connection.reply(OK, _TEXT, b"ready")


def metrics(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "metrics"
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(app))
    connection.reply(OK, _METRICS, generate_latest(registry))


class ServerCollector(Collector):
    """The server's counters as Prometheus metrics, read at the moment they are asked for."""

    def __init__(self, app: App) -> None:
        self._app = app

    def collect(self) -> Iterator[Metric]:
        engine = self._app.engine
        numbers = engine.metrics
        requests = CounterMetricFamily("headwater_requests", "Requests answered.", labels=["operation", "status"])
        for (operation, status), count in sorted(numbers.requests.items()):
            requests.add_metric([operation, str(status)], count)
        yield requests
        for name, text, value in (
            ("appends", "Appends accepted.", numbers.appends),
            ("duplicate_appends", "Appends answered as repeats of an earlier one.", numbers.duplicates),
            ("appended_messages", "Messages appended.", numbers.appended_messages),
            ("appended_bytes", "Payload bytes appended.", numbers.append_bytes),
            ("read_bytes", "Payload bytes sent to readers.", numbers.read_bytes),
            ("streams_created", "Streams created.", numbers.created),
            ("streams_deleted", "Streams deleted on request.", numbers.deleted),
            ("streams_expired", "Streams removed because their time was up.", numbers.expired),
            ("slow_readers", "Connections cut because their reader made no progress.", numbers.slow_followers),
            ("leases_expired", "Leases of workers that ran out.", numbers.leases_expired),
        ):
            yield CounterMetricFamily(f"headwater_{name}", text, value=value)
        wakes = CounterMetricFamily("headwater_wakes", "Wakes of subscriptions.", labels=["kind"])
        calls = CounterMetricFamily("headwater_webhook_calls", "Webhooks called.", labels=["outcome"])
        live = GaugeMetricFamily("headwater_live_readers", "Live readers connected now.", labels=["kind"])
        for family, counts in ((wakes, numbers.wakes), (calls, numbers.deliveries), (live, numbers.followers)):
            for label, count in counts.items():
                family.add_metric([label], count)
            yield family
        standing = GaugeMetricFamily("headwater_subscriptions", "Subscriptions now.", labels=["kind", "phase"])
        census = self._app.census()
        for (kind, phase), count in sorted(census.standing.items()):
            standing.add_metric([kind, phase], count)
        yield standing
        paused = sum(connection.paused for connection in self._app.connections)
        usage = engine.storage_usage()
        for name, text, value in (
            ("streams", "Streams that exist now.", len(engine.catalog)),
            ("payload_bytes", "Payload bytes held by all streams.", engine.total_bytes),
            ("storage_memory_bytes", "Payload bytes held in memory.", usage.memory_bytes),
            (
                "subscription_streams_pending",
                "Streams that a subscription must still ack.",
                census.pending,
            ),
            ("connections", "Connections open now.", len(self._app.connections)),
            ("slow_readers_now", "Connections that wait for their reader now.", paused),
            ("ready", "1 while writes are taken.", int(engine.failure is None)),
        ):
            yield GaugeMetricFamily(f"headwater_{name}", text, value=value)
        for name, text, histogram in (
            ("commit_batch_records", "Records per commit.", numbers.batch_sizes),
            ("commit_seconds", "Time to make a commit durable.", numbers.commit_seconds),
        ):
            yield HistogramMetricFamily(
                f"headwater_{name}", text, buckets=histogram.cumulative(), sum_value=histogram.total
            )
