"""The application behind `headwater sync`: supervise every job, watch the slots, publish status and readiness."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from headwater.pipeline.endpoint import Endpoint
from headwater.pipeline.job import Job
from headwater.pipeline.probe import Probe
from headwater.pipeline.session import spark_session
from headwater.pipeline.settings import PipelineSettings
from headwater.pipeline.slot_monitor import SlotMonitor
from headwater.pipeline.status import QueryStatus, StatusMetrics
from headwater.pipeline.supervisor import POLL_S, JobSupervisor, RestartPolicy, SupervisedJob, stop_on_signals
from headwater.pipeline.to_postgres import ToPostgres
from headwater.postgres.connections import display_address
from headwater.spark.status import StatusStream

log = logging.getLogger("headwater.pipeline")

Show = Callable[[list[QueryStatus], dict[str, dict[str, Any]]], None]


@dataclass(slots=True)
class Application:
    """`run()` returns after `stop()` or a signal, or when every job has ended."""

    settings: PipelineSettings
    show: Show = lambda _, __: None
    """Called at each poll with the status of queries and slots, for a terminal."""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _stop: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> int:
        """Run until stopped; return the exit code, which is 1 if a job failed permanently."""
        settings, general = self.settings, self.settings.pipeline
        jobs = settings.jobs()
        metrics = StatusMetrics(self.registry)
        with (
            Endpoint(general.metrics_host, general.metrics_port, self.registry) as endpoint,
            stop_on_signals(self._stop),
            _metrics_export(settings, self.registry),
            spark_session(
                "headwater-sync",
                general.master,
                {"spark.sql.streaming.metricsEnabled": "false", **general.spark},
                local_checkpoints="://" not in general.checkpoints,
                log_level="ERROR",
                archives_classes=True,
            ) as spark,
        ):
            log.info("metrics and readiness on http://%s:%d", general.metrics_host, endpoint.port)
            log.info(
                "Spark %s on %s; database %s",
                spark.version,
                spark.sparkContext.master,
                display_address(general.postgres),
            )
            policy = RestartPolicy(general.restart_wait, general.restart_wait_max)
            supervisor = JobSupervisor(
                spark, settings.environment, jobs, policy, lambda name: metrics.failures.labels(name).inc()
            )
            probe = Probe(spark, settings.environment) if general.probe and _has_table(jobs) else None
            status = _status_stream(settings)
            with closing(SlotMonitor(general.postgres, supervisor)) as slots:
                try:
                    while not self._stop.is_set() and not supervisor.is_finished:
                        supervisor.poll()
                        slots.poll()
                        endpoint.not_ready = why_not_ready(supervisor.supervised, probe)
                        metrics.ready.set(not endpoint.not_ready)
                        self._publish(supervisor.statuses, slots.values, metrics, status)
                        self._stop.wait(POLL_S)
                finally:
                    if probe is not None:
                        probe.stop()
                    supervisor.stop()
                    self._publish(supervisor.statuses, slots.values, metrics, status)
                    if status is not None:
                        status.close()
        return 1 if any(one.status == "failed" for one in supervisor.statuses) else 0

    def _publish(
        self,
        queries: list[QueryStatus],
        slots: dict[str, dict[str, Any]],
        metrics: StatusMetrics,
        stream: StatusStream | None,
    ) -> None:
        metrics.set(queries, slots)
        self.show(queries, slots)
        if stream is not None:
            for query in queries:
                stream.publish("query", query.name, asdict(query))
            for name, value in slots.items():
                stream.publish("slot", name, value)


def _metrics_export(settings: PipelineSettings, registry: CollectorRegistry) -> AbstractContextManager[object]:
    """Export the metrics through OpenTelemetry, if that is enabled."""
    general = settings.pipeline
    if not general.otel_endpoint:
        return nullcontext()
    from headwater.otel.periodic import PeriodicMetrics  # noqa: PLC0415  (needs an extra)

    return PeriodicMetrics(general.otel_endpoint, general.otel_metrics_interval, registry.collect)


def _status_stream(settings: PipelineSettings) -> StatusStream | None:
    general = settings.pipeline
    if not general.status_stream:
        return None
    return StatusStream(
        general.server,
        general.status_stream,
        token=general.token,
        ca_file=general.ca_file,
        repeat_s=general.status_interval,
    )


def why_not_ready(jobs: Sequence[SupervisedJob], probe: Probe | None) -> str:
    """Why the pipeline is not ready, or an empty string if it is ready.

    The probe starts when every job runs and none writes its own events to a table: these show the same, and a third
    query would delay them.
    """
    reasons = [_reason(one.status) for one in jobs if not one.status.is_healthy]
    if probe is None or reasons:
        return "; ".join(reasons)
    to_tables = [one for one in jobs if isinstance(one.job, ToPostgres)]
    if not probe.has_begun and any(one.status.rows for one in to_tables):
        probe.skip()
    elif probe.has_begun or not any(one.is_processing for one in to_tables):
        probe.poll()
    return probe.not_ready


def _reason(status: QueryStatus) -> str:
    error = f": {status.error['message']}" if status.error else ""
    return f"{status.name} is {status.status}{error}"


def _has_table(jobs: list[Job]) -> bool:
    return any(isinstance(job, ToPostgres) for job in jobs)
