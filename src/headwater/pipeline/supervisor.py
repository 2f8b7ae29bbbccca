"""Start jobs, watch their queries, and restart the ones that fail.

Invariant: the failure of one job does not stop another. A failed query restarts from its checkpoint after a wait, which
doubles each time. If the policy says that restarting cannot help, the job stays stopped and its status has the reason.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from headwater.pipeline.job import Job, JobEnvironment
from headwater.pipeline.status import QueryStatus, describe_job, error_state
from headwater.spark.query_errors import error_sentence

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("headwater.pipeline")

POLL_S: Final = 0.25
_ERROR_SHOWN_S: Final = 30.0
_PERMANENT: Final = ("SlotLostError", "PostgresSetupError")
"""Errors that only an operator can fix, by the class names in Spark's error text."""
_TRANSIENT: Final = ("DataGoneError", "failed to connect back")
"""Errors that a restart fixes. `DataGoneError`: an executor was lost, and a snapshot has replaced its rows; the new
plan reads the snapshot. `failed to connect back`: Spark gives its Python processes ten seconds to start, which is too
short on a busy machine."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Which failures lead to a restart, and when."""

    wait_s: float
    wait_max_s: float
    restarts_max: int | None = None
    """In a row, without a batch between them; None means no limit."""
    only_transient: bool = False
    """Restart only after errors known to be transient; otherwise after all except those known to be permanent."""

    def allows(self, error: BaseException, restarts: int) -> bool:
        text = f"{type(error).__name__}: {error}"
        if any(name in text for name in _PERMANENT):
            return False
        if self.only_transient and not any(name in text for name in _TRANSIENT):
            return False
        return self.restarts_max is None or restarts < self.restarts_max


SERVICE: Final = RestartPolicy(wait_s=1.0, wait_max_s=60.0)
COMMAND: Final = RestartPolicy(wait_s=2.0, wait_max_s=32.0, restarts_max=5, only_transient=True)
"""For a command that a person started: an error ends it, unless a restart is known to help."""


@dataclass(slots=True)
class SupervisedJob:
    """A job, its current query and its status."""

    job: Job
    status: QueryStatus
    query: StreamingQuery | None = None
    wait_s: float = 0.0
    start_at: float = 0.0
    started_at: float = 0.0
    restarts_in_a_row: int = 0
    counted_at: str = ""
    """The timestamp of the last progress that was counted; ISO 8601, so it compares as text."""
    next_batch: int = -1
    is_finished: bool = False
    """The query ended normally or failed permanently."""

    @property
    def is_processing(self) -> bool:
        """Whether the query processes a batch with data."""
        return self.query is not None and _is_processing(self.query.status)


@dataclass(slots=True)
class JobSupervisor:
    """Call `poll()` regularly from the thread that has the Spark session; it never waits."""

    spark: SparkSession
    environment: JobEnvironment
    jobs: Sequence[Job]
    policy: RestartPolicy = SERVICE
    on_failure: Callable[[str], None] = lambda _: None
    """Called with the job's name at each failure."""
    supervised: list[SupervisedJob] = field(init=False)

    def __post_init__(self) -> None:
        self.supervised = [SupervisedJob(job, describe_job(job), wait_s=self.policy.wait_s) for job in self.jobs]

    @property
    def is_finished(self) -> bool:
        return all(one.is_finished for one in self.supervised)

    @property
    def statuses(self) -> list[QueryStatus]:
        return [one.status for one in self.supervised]

    def poll(self) -> None:
        for one in self.supervised:
            if one.is_finished:
                continue
            if one.query is None:
                if time.monotonic() >= one.start_at:
                    self._start(one)
            elif one.query.isActive:
                self._observe(one, one.query)
            else:
                self._end(one, one.query)

    def stop(self) -> None:
        """Stop every query."""
        for one in self.supervised:
            if one.query is not None and one.query.isActive:
                try:
                    one.query.stop()
                except Exception as error:  # The other queries must be stopped too.
                    log.warning("%s did not stop cleanly: %s", one.job.name, error_sentence(error))
            if one.status.status != "failed":
                one.status.status = "stopped"

    def fail(self, one: SupervisedJob, reason: str) -> None:
        """Stop a job permanently."""
        if one.query is not None and one.query.isActive:
            one.query.stop()
        one.query = None
        one.status.status = "failed"
        one.status.error = error_state(reason)
        one.is_finished = True
        log.error("%s stopped: %s", one.job.name, reason)

    def _start(self, one: SupervisedJob) -> None:
        try:
            one.query = one.job.start(self.spark, self.environment)
        except Exception as error:
            self._on_error(one, error)
            return
        one.started_at = time.monotonic()
        one.next_batch = -1
        one.status.status = "starting"
        log.info("%s: %s -> %s", one.job.name, one.status.source, one.status.target)

    def _observe(self, one: SupervisedJob, query: StreamingQuery) -> None:
        progress = query.lastProgress
        if progress is not None:
            self._count(one, query, progress)
        if one.status.status == "starting" and (progress is not None or _has_planned(query)):
            one.status.status = "running"
        if one.status.status == "running" and one.status.error and time.monotonic() - one.started_at > _ERROR_SHOWN_S:
            one.status.error = None

    def _count(self, one: SupervisedJob, query: StreamingQuery, latest: Any) -> None:
        """Add every batch since the last poll. The recent history is slow to fetch, so only if batches were missed."""
        if latest.timestamp == one.counted_at:
            return
        passed = [latest] if latest.batchId <= one.next_batch else query.recentProgress
        for progress in passed:
            if progress.timestamp > one.counted_at:
                one.status.update(progress)
        one.counted_at = latest.timestamp
        # The progress of an idle query has the number of its next batch.
        one.next_batch = latest.batchId + (1 if latest.numInputRows else 0)
        one.wait_s = self.policy.wait_s
        one.restarts_in_a_row = 0

    def _end(self, one: SupervisedJob, query: StreamingQuery) -> None:
        progress = query.lastProgress
        if progress is not None:
            self._count(one, query, progress)
        error = query.exception()
        one.query = None
        if error is None:
            one.status.status = "stopped"
            one.is_finished = True
        else:
            self._on_error(one, error)

    def _on_error(self, one: SupervisedJob, error: Exception) -> None:
        reason = error_sentence(error)
        self.on_failure(one.job.name)
        if not self.policy.allows(error, one.restarts_in_a_row):
            self.fail(one, reason)
            return
        one.status.error = error_state(reason)
        one.status.status = "waiting"
        one.status.restarts += 1
        one.restarts_in_a_row += 1
        one.start_at = time.monotonic() + one.wait_s
        log.error("%s failed and restarts in %.0f s: %s", one.job.name, one.wait_s, reason)
        one.wait_s = min(one.wait_s * 2, self.policy.wait_max_s)


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` on SIGTERM and Ctrl-C. Outside the main thread, where Python has no signals, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_planned(query: StreamingQuery) -> bool:
    """Whether a query has asked its source for data at least once: it is waiting for data or processing it."""
    now = query.status
    return str(now["message"]).startswith("Waiting") or _is_processing(now)


def _is_processing(status: dict[str, Any]) -> bool:
    return bool(status["isTriggerActive"] and status["isDataAvailable"])
