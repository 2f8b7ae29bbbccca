"""The application behind `headwater sync`: runs every job, starts again what failed, and tells how all of them are.

Invariant: one job's failure stops no other. A failed query is started again from its checkpoint, with growing waits,
unless its reason is one that starting again cannot cure; then it stays down, and says why.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import psycopg
from prometheus_client import CollectorRegistry

from headwater.pipeline.endpoint import Endpoint
from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.job import Job
from headwater.pipeline.probe import Probe
from headwater.pipeline.settings import PipelineSettings
from headwater.pipeline.status import QueryStatus, StatusMetrics, StatusTeller, described, failure, slot_value
from headwater.pipeline.to_postgres import ToPostgres
from headwater.postgres import slots, snapshots
from headwater.postgres.connecting import Connection, connect, named
from headwater.spark.status import StatusStream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("headwater.pipeline")

_TICK_S: Final = 0.25
_SLOTS_EVERY_S: Final = 5.0
_REASON_MAX: Final = 500
_HOPELESS: Final = ("SlotLost", "SetUpWrong")
"""What only an operator can change: named in the text that Spark makes of our errors."""


@dataclass(slots=True)
class _Run:
    """A job and its present query."""

    job: Job
    status: QueryStatus
    query: StreamingQuery | None = None
    wait_s: float = 0.0
    start_at: float = 0.0
    begun_at: float = 0.0
    batch_seen: tuple[str, int] | None = None
    is_over: bool = False
    """It ended by itself, or cannot be helped."""


@dataclass(slots=True)
class Application:
    """`run()` returns when it was told to stop, or when every job is over."""

    settings: PipelineSettings
    show: Callable[[list[QueryStatus], dict[str, dict[str, Any]]], None] = lambda _, __: None
    """Called every moment, for a terminal."""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    _stop: threading.Event = field(default_factory=threading.Event)
    _slots: dict[str, dict[str, Any]] = field(default_factory=dict)
    _slots_at: float = 0.0
    _database: Connection | None = None

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> int:
        """The exit code: 1 if a job ended with an error that cannot be helped."""
        jobs = self.settings.jobs()
        general = self.settings.pipeline
        metrics = StatusMetrics(self.registry)
        runs = [_Run(job, described(job), wait_s=general.restart_wait) for job in jobs]
        teller = (
            StatusTeller(
                StatusStream(general.server, general.status_stream, token=general.token, ca_file=general.ca_file),
                general.status_interval,
            )
            if general.status_stream
            else None
        )
        with (
            Endpoint(general.metrics_host, general.metrics_port, self.registry) as endpoint,
            self._signals(),
            _session(self.settings) as spark,
        ):
            log.info("metrics and readiness on http://%s:%d", general.metrics_host, endpoint.port)
            probe = Probe(spark, self.settings.surroundings) if general.probe and _has_table(jobs) else None
            try:
                while not self._stop.is_set() and not all(run.is_over for run in runs):
                    for run in runs:
                        self._attend(spark, run, metrics)
                    self._look_at_slots(runs)
                    troubles = [_trouble(run.status) for run in runs if not run.status.is_well]
                    if probe is not None and not troubles:
                        probe.attend()
                        troubles = [probe.trouble] if probe.trouble else []
                    endpoint.trouble = "; ".join(troubles)
                    metrics.ready.set(not endpoint.trouble)
                    self._tell(runs, metrics, teller)
                    self._stop.wait(_TICK_S)
            finally:
                if probe is not None:
                    probe.stop()
                self._end(runs)
                self._tell(runs, metrics, teller)
                if teller is not None:
                    teller.close()
        return 1 if any(run.status.status == "failed" for run in runs) else 0

    # -- one job -------------------------------------------------------------------------------------------------

    def _attend(self, spark: SparkSession, run: _Run, metrics: StatusMetrics) -> None:
        if run.is_over:
            return
        if run.query is None:
            if time.monotonic() >= run.start_at:
                self._start(spark, run, metrics)
            return
        if not run.query.isActive:
            self._ended(run, metrics)
            return
        progress = run.query.lastProgress
        if progress is not None:
            seen = (str(progress.runId), progress.batchId)
            if seen != run.batch_seen:
                run.batch_seen = seen
                run.status.take(progress)
                run.wait_s = self.settings.pipeline.restart_wait
        if run.status.status == "starting" and (progress is not None or _has_planned(run.query)):
            run.status.status = "running"
        if run.status.status == "running" and run.status.error and time.monotonic() - run.begun_at > 30:
            run.status.error = None

    def _start(self, spark: SparkSession, run: _Run, metrics: StatusMetrics) -> None:
        try:
            run.query = run.job.start(spark, self.settings.surroundings)
        except Exception as error:
            self._failed(run, metrics, error)
            return
        run.begun_at = time.monotonic()
        run.status.status = "starting"
        log.info("%s: %s -> %s", run.job.name, run.status.source, run.status.target)

    def _ended(self, run: _Run, metrics: StatusMetrics) -> None:
        assert run.query is not None
        error = run.query.exception()
        run.query = None
        if error is None:
            run.status.status = "stopped"
            run.is_over = True
            return
        self._failed(run, metrics, error)

    def _failed(self, run: _Run, metrics: StatusMetrics, error: Exception) -> None:
        reason = why(error)
        run.status.error = failure(reason)
        metrics.failures.labels(run.job.name).inc()
        if any(name in str(error) or name == type(error).__name__ for name in _HOPELESS):
            run.status.status = "failed"
            run.is_over = True
            log.error("%s stopped, and starting it again would not help: %s", run.job.name, reason)
            return
        run.status.status = "waiting"
        run.status.restarts += 1
        run.start_at = time.monotonic() + run.wait_s
        log.error("%s failed, and is started again in %.0f s: %s", run.job.name, run.wait_s, reason)
        run.wait_s = min(run.wait_s * 2, self.settings.pipeline.restart_wait_max)

    def _end(self, runs: list[_Run]) -> None:
        for run in runs:
            if run.query is not None and run.query.isActive:
                try:
                    run.query.stop()
                except Exception as error:  # The others must be stopped too.
                    log.warning("%s did not stop cleanly: %s", run.job.name, why(error))
            if run.status.status != "failed":
                run.status.status = "stopped"
        if self._database is not None:
            self._database.close()

    # -- slots ---------------------------------------------------------------------------------------------------

    def _look_at_slots(self, runs: list[_Run]) -> None:
        followers = [run for run in runs if isinstance(run.job, FromPostgres)]
        now = time.monotonic()
        if not followers or now - self._slots_at < _SLOTS_EVERY_S:
            return
        self._slots_at = now
        try:
            if self._database is None or self._database.closed:
                self._database = connect(self.settings.pipeline.postgres)
            for run in followers:
                assert isinstance(run.job, FromPostgres)
                self._look_at(self._database, run, run.job)
        except psycopg.Error as error:
            log.warning("the slots cannot be looked at: %s", " ".join(str(error).split()))
            if self._database is not None:
                self._database.close()

    def _look_at(self, connection: Connection, run: _Run, job: FromPostgres) -> None:
        found = slots.state(connection, job.slot)
        if found is None:
            self._slots.pop(job.slot, None)
            return
        trouble = None
        if job.lag_bytes_warn and found.lag_bytes > job.lag_bytes_warn:
            trouble = failure(f"Postgres keeps {found.lag_bytes >> 20} MiB of its log for this slot.")
            log.warning("slot %s: %s", job.slot, trouble["message"])
        self._slots[job.slot] = slot_value(found, trouble)
        if job.lag_bytes_max and found.lag_bytes > job.lag_bytes_max and not run.is_over:
            self._give_up(connection, run, job, found.lag_bytes)

    def _give_up(self, connection: Connection, run: _Run, job: FromPostgres, lag_bytes: int) -> None:
        """The database's disk is worth more than our place in its log."""
        reason = (
            f"the slot {job.slot} kept {lag_bytes >> 20} MiB, more than lag_bytes_max; it was dropped so that the disk"
            " does not fill. Remove the job's checkpoint to begin with a new snapshot."
        )
        if run.query is not None and run.query.isActive:
            run.query.stop()
        run.query = None
        slots.drop(connection, job.slot)
        snapshots.forget(connection, job.slot)
        self._slots.pop(job.slot, None)
        run.status.status = "failed"
        run.status.error = failure(reason)
        run.is_over = True
        log.error("%s stopped: %s", job.name, reason)

    # -- telling -------------------------------------------------------------------------------------------------

    def _tell(self, runs: list[_Run], metrics: StatusMetrics, teller: StatusTeller | None) -> None:
        statuses = [run.status for run in runs]
        metrics.take(statuses, self._slots)
        self.show(statuses, self._slots)
        if teller is not None:
            entities = [("query", status.name, asdict(status)) for status in statuses]
            entities += [("slot", name, value) for name, value in self._slots.items()]
            teller.tell(entities)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C end it in order; where signals cannot be had (not the main thread) `stop()` does."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, lambda *_: self._stop.set())
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def why(error: Exception) -> str:
    """The last line that says something, out of the pages that Spark makes of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("at ", "File ", "Traceback", "^", "SQLSTATE", "JVM stack"))]
    # A Python error within Spark's text is "package.Class: sentence".
    ours = [line for line in said if ": " in line and ("headwater." in line or "psycopg." in line)]
    chosen = (ours or said or [type(error).__name__])[-1 if ours else 0]
    return chosen[:_REASON_MAX]


def _trouble(status: QueryStatus) -> str:
    reason = f": {status.error['message']}" if status.error else ""
    return f"{status.name} is {status.status}{reason}"


@contextmanager
def _session(settings: PipelineSettings) -> Iterator[SparkSession]:
    """The session that runs all jobs; one that is there already (spark-submit, a test) is used and left."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - starting Spark takes seconds

    from headwater.spark import configure  # noqa: PLC0415

    there = SparkSession.getActiveSession()
    if there is not None:
        yield there
        return
    general = settings.pipeline
    if general.master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.Builder().appName("headwater-sync")
    if not _is_submitted():
        builder = builder.master(general.master)
    builder = (
        builder.config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.metricsEnabled", "false")
    )
    for name, value in general.spark.items():
        builder = builder.config(name, value)
    session = configure(builder, local_checkpoints="://" not in general.checkpoints).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    log.info("Spark %s on %s; database %s", session.version, session.sparkContext.master, named(general.postgres))
    try:
        yield session
    finally:
        session.stop()


def _has_planned(query: StreamingQuery) -> bool:
    """Whether a query is past its first look at its source: it waits for data, or works on some."""
    now = query.status
    return str(now["message"]).startswith("Waiting") or bool(now["isTriggerActive"] and now["isDataAvailable"])


def _has_table(jobs: list[Job]) -> bool:
    return any(isinstance(job, ToPostgres) for job in jobs)


def _is_submitted() -> bool:
    """Whether spark-submit started us, and has said where to run."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
