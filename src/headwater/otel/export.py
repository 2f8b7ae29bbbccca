"""Send spans and metrics of one process to an OTLP/HTTP receiver, from threads, with bounded queues.

Invariant: a receiver that is slow or gone costs spans, never requests: the queue drops what does not fit. What is not a
setting follows the standard variables, such as `OTEL_EXPORTER_OTLP_HEADERS` and `OTEL_BSP_SCHEDULE_DELAY`.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterable
from importlib import metadata
from typing import Final

import prometheus_client
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer

from headwater.otel.metric_data import metrics_data

log = logging.getLogger("headwater.otel")

SCOPE: Final = "headwater"
EXPORT_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 2.0
REPORT_EVERY_S: Final = 60.0
_EXPORTERS: Final = (OTLPSpanExporter.__module__, OTLPMetricExporter.__module__)
_ERROR: Final = re.compile(r"\[Errno -?\d+\] ([^\])\"']+)")


class FailureReport(logging.Filter):
    """Replaces what the exporters log about each attempt by one line per minute, with the receiver and the cause."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._next_s = 0.0

    def install(self) -> None:
        for name in _EXPORTERS:
            logging.getLogger(name).addFilter(self)

    def remove(self) -> None:
        for name in _EXPORTERS:
            logging.getLogger(name).removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        # At the end the exporters warn that they have been shut down.
        if record.levelno >= logging.WARNING and "shutdown" not in text.lower() and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + REPORT_EVERY_S
            cause = _ERROR.search(text)
            why = cause[1] if cause is not None else text[:200]
            log.warning(
                "cannot send traces and metrics to %s: %s; they are dropped until it responds (check otel.endpoint)",
                self._endpoint,
                why,
            )
        return False


class TelemetryExport:
    """The exporters of one process. `close` sends what is queued."""

    def __init__(self, endpoint: str, service: str, sample_ratio: float) -> None:
        self._began_ns = time.time_ns()
        self._report = FailureReport(endpoint)
        self._report.install()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME") or service,
                "service.version": metadata.version("headwater"),
                "service.instance.id": str(uuid.uuid4()),
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)), resource=self._resource, shutdown_on_exit=False
        )
        self._spans = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(self._spans))
        self._metrics = OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics", timeout=EXPORT_TIMEOUT_S)

    @property
    def tracer(self) -> Tracer:
        return self._provider.get_tracer(SCOPE)

    def send_metrics(self, families: Iterable[prometheus_client.Metric]) -> None:
        """Send the current values. Blocks for as long as the receiver takes, at most the timeout."""
        self._metrics.export(metrics_data(families, self._resource, SCOPE, self._began_ns))

    def close(self, families: Iterable[prometheus_client.Metric] = ()) -> None:
        """Send the last metrics and the queued spans. If the receiver does not take them in time, they are dropped."""
        give_up = threading.Timer(CLOSE_TIMEOUT_S, self._stop_retries)
        give_up.daemon = True
        give_up.start()
        try:
            if families:
                self.send_metrics(families)
            self._provider.force_flush(int(CLOSE_TIMEOUT_S * 1000))
        finally:
            give_up.cancel()
            self._stop_retries()
            self._provider.shutdown()
            self._report.remove()

    def _stop_retries(self) -> None:
        with self._lock:
            if not self._is_stopped:
                self._is_stopped = True
                self._metrics.shutdown()
                self._spans.shutdown()  # type: ignore[no-untyped-call]
