"""The probe: ready only after an event has passed from a stream to a table, and nothing of it remains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

import psycopg
from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from headwater.pipeline.application import why_not_ready
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.probe import Probe
from headwater.pipeline.supervisor import JobSupervisor
from headwater.pipeline.to_postgres import ToPostgres
from tests.serving import Server, serve
from tests.spark.streams import Streams
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S = 280.0


def attended(probe: Probe, until: str) -> None:
    def look() -> str:
        probe.poll()
        return probe.not_ready

    wait_until(look, lambda found: until in found if until else not found, limit_s=PATIENCE_S, every_s=0.1)


def test_event_arrives_and_nothing_remains(
    spark: SparkSession, server: Server, postgres_url: str, tmp_path: Path
) -> None:
    environment = JobEnvironment(f"{server.url}/v1/stream", str(tmp_path), postgres=postgres_url)
    probe = Probe(spark, environment)
    assert "has not arrived yet" in probe.not_ready
    attended(probe, "")
    with psycopg.connect(postgres_url) as connection:
        for left in (
            "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'probe%'",
            "SELECT count(*) FROM headwater.batches WHERE job LIKE 'probe%'",
        ):
            assert connection.execute(left).fetchone() == (0,)
    assert list(tmp_path.iterdir()) == []
    assert not [query for query in spark.streams.active if (query.name or "").startswith("probe")]


def test_events_of_a_job_at_the_start_replace_the_probe(
    spark: SparkSession, server: Server, streams: Streams, postgres_url: str, tmp_path: Path
) -> None:
    streams.filled("waiting-at-the-start", [{"key": "one"}])
    environment = JobEnvironment(f"{server.url}/v1/stream", str(tmp_path), postgres=postgres_url)
    jobs = [ToPostgres(name="in", streams=("waiting-at-the-start",))]
    supervisor, probe = JobSupervisor(spark, environment, jobs), Probe(spark, environment)
    seen: set[str] = set()

    def look() -> str:
        supervisor.poll()
        seen.add(reason := why_not_ready(supervisor.supervised, probe))
        return reason

    try:
        wait_until(look, lambda reason: not reason, limit_s=PATIENCE_S, every_s=0.05)
    finally:
        supervisor.stop()
    assert "in is starting" in seen
    assert not probe.has_begun
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT event_key FROM session_events").fetchall() == [("one",)]


class CommittedRows(StreamingQueryListener):
    """Counts the rows of committed batches until its query ends; interrupted batches do not count.

    Its query is the first one that starts; late events of another test's query may arrive, too.
    """

    def __init__(self) -> None:
        self.run: UUID | None = None
        self.rows = 0
        self.rows_at_end: int | None = None

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        self.run = self.run or event.runId

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        if event.progress.runId == self.run:
            self.rows += event.progress.numInputRows

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        pass

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        if event.runId == self.run:
            self.rows_at_end = self.rows


def test_the_probe_stops_after_its_batch_is_committed(
    spark: SparkSession, server: Server, postgres_url: str, tmp_path: Path
) -> None:
    """reference lines 500-502: an interrupted batch is an ERROR with a stack trace in the log of a healthy sync."""
    listener = CommittedRows()
    spark.streams.addListener(listener)
    try:
        attended(Probe(spark, JobEnvironment(f"{server.url}/v1/stream", str(tmp_path), postgres=postgres_url)), "")
        wait_until(lambda: listener.rows_at_end, lambda rows: rows is not None)
    finally:
        spark.streams.removeListener(listener)
    assert listener.rows_at_end == 1


def test_unavailable_database_is_reported_and_retried(spark: SparkSession, server: Server, tmp_path: Path) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/nothing?connect_timeout=1"
    probe = Probe(spark, JobEnvironment(f"{server.url}/v1/stream", str(tmp_path), postgres=nowhere))
    probe._wait_max_s = 0.5
    attended(probe, "did not arrive")
    assert "could not be used" in probe.not_ready


def test_token_without_the_right_to_create_streams_does_not_delay_the_start(tmp_path: Path) -> None:
    with serve(DS_AUTH__TOKEN="the-one-and-only-token") as closed:
        environment = JobEnvironment(f"{closed.url}/v1/stream", str(tmp_path), "another", "postgresql://unused")
        attended(Probe(cast(Any, "no Spark is needed"), environment), "")
