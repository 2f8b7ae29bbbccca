"""OpenTelemetry of a server process: spans of requests and webhook calls, and its metrics at an interval."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

import prometheus_client

from headwater.otel.export import TelemetryExport
from headwater.otel.spans import CallSpans, RequestSpans

log = logging.getLogger("headwater.otel")

SERVICE: Final = "headwater"

Collect = Callable[[], Iterable[prometheus_client.Metric]]
"""Returns the current metrics; called on the event loop."""


class ServerTelemetry:
    def __init__(self, endpoint: str, sample_ratio: float, interval_s: float) -> None:
        self._export = TelemetryExport(endpoint, SERVICE, sample_ratio)
        self._interval_s = interval_s
        self._sending: asyncio.Task[None] | None = None
        self._collect: Collect | None = None
        self.requests: Final = RequestSpans(self._export.tracer)
        self.begin_call: Final = CallSpans(self._export.tracer).begin

    def start(self, collect: Collect) -> None:
        """Begin to send metrics."""
        self._collect = collect
        self._sending = asyncio.create_task(self._send_repeatedly())

    async def close(self) -> None:
        """Send the last values and the queued spans; takes seconds at most."""
        families: list[prometheus_client.Metric] = []
        if self._sending is not None and self._collect is not None:
            self._sending.cancel()
            families = list(self._collect())
        await asyncio.to_thread(self._export.close, families)

    async def _send_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self._send()
            except Exception:
                log.exception("metrics were not sent; they are sent again after the interval")

    async def _send(self) -> None:
        assert self._collect is not None
        families = list(self._collect())
        await asyncio.to_thread(self._export.send_metrics, families)
