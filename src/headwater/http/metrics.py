"""`/metrics`: the server's counters for Prometheus, read when they are requested."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headwater.core import native
from headwater.engine.namespaces import Namespaces
from headwater.http.context import Context
from headwater.http.headers import NO_STORE, OK
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response

_PROCESS: Final = ProcessCollector(registry=None)
"""CPU time, memory, open files and start time, as `process_…`. Empty on systems without /proc."""
_BUILD: Final = {
    "version": metadata.version("headwater"),
    "python": platform.python_version(),
    "build": native.BUILD,
}
_ALERTED: Final = dict.fromkeys(product(("append", "create", "read"), (500, 503, 507)), 0)
"""Counters that alerts watch are there from the start: Prometheus sees no increase in a series that begins above 0."""
_METRICS: Final = NO_STORE + b"Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"


def handle(context: Context, request: Request, address: Address) -> Response:
    return render_metrics(ServerCollector(context))


def render_metrics(collector: Collector) -> Response:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return Response(OK, _METRICS, generate_latest(registry))


def _quotas(namespaces: Namespaces | None) -> Iterator[Metric]:
    """Usage of the namespaces with their own limits, and refusals of all; empty without quotas."""
    if namespaces is None:
        return
    refusals = CounterMetricFamily("headwater_quota_refusals", "Requests refused by a quota.", labels=["limit"])
    for limit, count in namespaces.refusals.items():
        refusals.add_metric([limit], count)
    yield refusals
    for name, text, attribute in (
        ("bytes", "Message bytes of a namespace.", "bytes"),
        ("streams", "Streams of a namespace.", "streams"),
        ("live_readers", "Live readers of a namespace.", "readers"),
        ("connections", "Connections that serve a request of a namespace.", "connections"),
    ):
        family = GaugeMetricFamily(f"headwater_namespace_{name}", text, labels=["namespace"])
        for namespace, usage in namespaces.reported().items():
            family.add_metric([namespace], getattr(usage, attribute))
        yield family


class ServerCollector(Collector):
    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        engine = self._context.engine
        numbers = engine.metrics
        compression = self._context.compression
        requests = CounterMetricFamily("headwater_requests", "Completed requests.", labels=["operation", "status"])
        for (operation, status), count in sorted((_ALERTED | numbers.requests).items()):
            requests.add_metric([operation, str(status)], count)
        yield requests
        for name, text, value in (
            ("appends", "Appends accepted.", numbers.appends),
            ("duplicate_appends", "Appends recognized as duplicates of an earlier one.", numbers.duplicates),
            ("appended_messages", "Messages appended.", numbers.appended_messages),
            ("appended_bytes", "Payload bytes appended.", numbers.append_bytes),
            ("read_bytes", "Payload bytes sent to readers.", numbers.read_bytes),
            ("streams_created", "Streams created.", numbers.created),
            ("streams_deleted", "Streams deleted on request.", numbers.deleted),
            ("streams_expired", "Streams deleted because they expired.", numbers.expired),
            (
                "evicted_producers",
                "Idle producers evicted at the limit of producers.",
                numbers.evicted_producers,
            ),
            (
                "slow_readers",
                "Connections closed because the client did not read its response.",
                numbers.slow_followers,
            ),
            (
                "standby_reads",
                "Reads of other nodes' shards that a standby on this node answered.",
                numbers.standby_reads,
            ),
            ("leases_expired", "Leases of workers that expired.", numbers.leases_expired),
            (
                "writer_leases_expired",
                "Streams ended after their writer was lost.",
                engine.leases.expired,
            ),
            (
                "chunks_compressed",
                "Chunks of streams compressed for readers.",
                compression.compressed if compression else 0,
            ),
            ("retention_errors", "Failed attempts to apply retention to a stream.", engine.retention.errors),
            ("clock_jumps", "Clock jumps that delayed the deletion of expired streams.", engine.clock_guard.jumps),
        ):
            yield CounterMetricFamily(f"headwater_{name}", text, value=value)
        wakes = CounterMetricFamily("headwater_wakes", "Wakes sent to workers of subscriptions.", labels=["kind"])
        calls = CounterMetricFamily("headwater_webhook_calls", "Webhook calls.", labels=["outcome"])
        live = GaugeMetricFamily("headwater_live_readers", "Connected live readers.", labels=["kind"])
        for family, counts in ((wakes, numbers.wakes), (calls, numbers.deliveries), (live, numbers.followers)):
            for label, count in counts.items():
                family.add_metric([label], count)
            yield family
        yield from _quotas(engine.quota.namespaces)
        subscriptions = GaugeMetricFamily(
            "headwater_subscriptions", "Existing subscriptions.", labels=["kind", "phase"]
        )
        census = self._context.census()
        for (kind, phase), count in sorted(census.by_kind_and_phase.items()):
            subscriptions.add_metric([kind, phase], count)
        yield subscriptions
        slow = self._context.connections.slow_readers()
        unread = sum(connection.unread_bytes for connection in slow)
        usage = engine.storage_usage()
        for name, text, value in (
            ("streams", "Existing streams.", len(engine.catalog)),
            ("payload_bytes", "Payload bytes of all streams.", engine.total_bytes),
            ("metadata_bytes", "Estimated memory for the metadata of streams.", engine.quota.metadata_bytes),
            ("storage_memory_bytes", "Payload bytes in memory.", usage.memory_bytes),
            (
                "subscription_streams_pending",
                "Streams with data that a subscription has not acknowledged.",
                census.pending,
            ),
            ("expiry_held_streams", "Expired streams that are kept because of a clock jump.", engine.held_streams),
            ("writer_leases", "Writer leases.", len(engine.leases)),
            ("connections", "Open connections.", len(self._context.connections)),
            ("slow_readers_now", "Connections whose client does not read its response at the moment.", len(slow)),
            ("unread_response_bytes", "Memory for responses that clients have not read.", unread),
            ("request_body_bytes", "Bytes of request bodies and waiting requests.", self._context.budget.held),
            ("ready", "1 if the server accepts writes, otherwise 0.", int(engine.failure is None)),
        ):
            yield GaugeMetricFamily(f"headwater_{name}", text, value=value)
        drift_s = engine.clock_guard.drift_ms / 1000
        yield GaugeMetricFamily("headwater_clock_drift_seconds", "System clock minus server clock.", value=drift_s)
        for name, text, histogram in (
            ("commit_batch_records", "Records per commit.", numbers.batch_sizes),
            ("commit_seconds", "Time to make a commit durable.", numbers.commit_seconds),
            ("loop_lag_seconds", "Delay of timers on the event loop.", numbers.loop_lag_seconds),
            (
                "delivery_lag_seconds",
                "Time from the arrival of messages to their delivery to all live readers that read.",
                numbers.delivery_lag_seconds,
            ),
        ):
            yield HistogramMetricFamily(
                f"headwater_{name}", text, buckets=histogram.cumulative(), sum_value=histogram.total
            )
        durations = HistogramMetricFamily(
            "headwater_request_duration_seconds",
            "Time from a complete request to the start of its response.",
            labels=["operation"],
        )
        for operation, histogram in sorted(numbers.request_seconds.items()):
            durations.add_metric([operation], histogram.cumulative(), histogram.total)
        yield durations
        yield InfoMetricFamily("headwater_build", "Version and build of the server.", value=_BUILD)
        yield from _PROCESS.collect()
