"""Send one event through the whole pipeline, so that "ready" means that a change can flow.

Spark starts a query quickly, but its first batch starts Python processes, plans and compiles, which takes a minute on a
busy machine. The probe sends one event through its own stream and table, with the same kind of job that user streams
have. It sends none if a job delivers its own events at the start. Invariant: the probe leaves no table, no rows and
no checkpoint; its stream expires.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import time
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.server import JSON, client
from headwater.pipeline.to_postgres import ToPostgres
from headwater.postgres.catalog import table_name
from headwater.postgres.connections import connect
from headwater.spark.errors import ServerRefusedError
from headwater.spark.protocol import Producer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger("headwater.pipeline")

_STREAM_TTL_S: Final = 600
_ATTEMPT_S: Final = 240.0
_WAIT_S: Final = 5.0
_REASON_MAX: Final = 300
_DENIED: Final = frozenset((401, 403))
_CLEANED_UP: Final = (
    "DELETE FROM headwater.batches WHERE job = %s",
    "DELETE FROM headwater.dead_letters WHERE job = %s",
)


class Probe:
    """Call `poll` regularly; `not_ready` becomes empty when the event has arrived. Everything runs in the caller's
    thread, because Spark looks up data sources in the session of the thread."""

    def __init__(self, spark: SparkSession, environment: JobEnvironment) -> None:
        self.not_ready = "the first event has not arrived yet"
        self._spark = spark
        self._surroundings = environment
        self._wait_max_s = _ATTEMPT_S
        self._begun_at = 0.0
        self._next_at = 0.0
        self._job: ToPostgres | None = None
        self._query: StreamingQuery | None = None

    @property
    def has_begun(self) -> bool:
        return self._begun_at > 0.0

    def skip(self) -> None:
        """Send no event: those of a job have arrived."""
        self.not_ready = ""

    def poll(self) -> None:
        if not self.not_ready or time.monotonic() < self._next_at:
            return
        try:
            if self._query is None:
                self._begin()
            elif self._has_arrived(self._query):
                self.stop()
                self.not_ready = ""
                log.info("the first event arrived in its table after %.1f s", time.monotonic() - self._begun_at)
        except Exception as error:
            self.stop()
            if isinstance(error, psycopg.errors.InsufficientPrivilege) or _is_denied(error):
                log.warning("probe skipped: the role or token is not allowed to create its stream or table: %s", error)
                self.not_ready = ""
                return
            self.not_ready = f"the first event did not arrive: {' '.join(str(error).split())[:_REASON_MAX]}"
            log.warning("%s; retrying", self.not_ready)
            self._next_at = time.monotonic() + _WAIT_S

    def stop(self) -> None:
        """Stop the query and remove what it created."""
        query, self._query = self._query, None
        job, self._job = self._job, None
        if query is not None:
            query.stop()
        if job is None:
            return
        try:
            with connect(self._surroundings.postgres) as connection:
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(table_name(job.table).quoted))
                for statement in _CLEANED_UP:
                    connection.execute(statement, [job.name])
        except psycopg.Error as error:
            log.warning("cannot remove the probe's table %s: %s", job.table, error)
        if "://" not in self._surroundings.checkpoints:
            shutil.rmtree(self._surroundings.checkpoint(job.name), ignore_errors=True)

    def _begin(self) -> None:
        tag = secrets.token_hex(4)
        stream = f"__pipeline__probe/{tag}"
        name, table = f"probe-{tag}", f"headwater.probe_{tag}"
        self._job = ToPostgres(name=name, table=table, streams=(stream,), wait_max=self._wait_max_s)
        self._begun_at = time.monotonic()
        server = client(self._surroundings)
        server.create(stream, JSON, {"Stream-TTL": str(_STREAM_TTL_S)})
        server.append(stream, b'[{"type":"probe"}]', JSON, Producer(self._job.name, 0, 0))
        self._query = self._job.start(self._spark, self._surroundings)

    def _has_arrived(self, query: StreamingQuery) -> bool:
        if not query.isActive:
            raise query.exception() or RuntimeError("its query ended")
        if time.monotonic() - self._begun_at > _ATTEMPT_S:
            raise TimeoutError(f"no row within {_ATTEMPT_S:.0f} s")
        if not any(progress.numInputRows for progress in query.recentProgress):
            # If the query is stopped before its batch is committed, Spark logs errors although nothing is wrong.
            return False
        assert self._job is not None
        count = sql.SQL("SELECT count(*) FROM {}").format(table_name(self._job.table).quoted)
        with connect(self._surroundings.postgres) as connection:
            return connection.execute(count).fetchone() != (0,)


def _is_denied(error: Exception) -> bool:
    return isinstance(error, ServerRefusedError) and error.status in _DENIED
