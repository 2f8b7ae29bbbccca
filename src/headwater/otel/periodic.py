"""Metrics of a process without an event loop, sent from a thread at an interval."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Self

import prometheus_client

from headwater.otel.batches import SERVICE
from headwater.otel.export import TelemetryExport


class PeriodicMetrics:
    """Sends metrics within its `with` block, and the last values at its end."""

    def __init__(
        self, endpoint: str, interval_s: float, collect: Callable[[], Iterable[prometheus_client.Metric]]
    ) -> None:
        self._export = TelemetryExport(endpoint, SERVICE, 1.0)
        self._interval_s = interval_s
        self._collect = collect
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otel-metrics", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._export.close(tuple(self._collect()))

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self._export.send_metrics(self._collect())
