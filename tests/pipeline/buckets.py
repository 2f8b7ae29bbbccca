"""A bucket for a test, and running a job to its end, for the tests of folds, archives and queries."""

from __future__ import annotations

import httpx
from pyspark.sql import SparkSession

from headwater.client import Stream
from headwater.pipeline.archive.job import Archive
from headwater.pipeline.fold.job import Fold
from headwater.pipeline.fold.state import FoldState
from headwater.pipeline.job import JobEnvironment
from headwater.pipeline.supervisor import COMMAND, POLL_S, JobSupervisor
from tests.pipeline.waiting import PATIENCE_S
from tests.serving import Server
from tests.spark.streams import Streams
from tests.waiting import wait_until


class Bucket(Streams):
    """A bucket that no other test uses."""

    def __init__(self, server: Server, http: httpx.Client, name: str) -> None:
        super().__init__(f"{server.url}/ds/{name}", http)
        self.name = name
        http.put(self.root).raise_for_status()

    def snapshot_offset(self, name: str) -> str | None:
        found: str | None = self.http.head(f"{self.root}/{name}").headers.get("Stream-Snapshot-Offset")
        return found

    def snapshot(self, name: str) -> bytes:
        return self.http.get(f"{self.root}/{name}/snapshot", follow_redirects=True).raise_for_status().content

    def bootstrapped(self, name: str) -> FoldState:
        """The state that a client gets from a bootstrap of the stream."""
        return bootstrapped(f"{self.root}/{name}")


def bootstrapped(url: str) -> FoldState:
    with Stream(url) as stream, stream.bootstrap() as bootstrap:
        first, *rest = [part.read() for part in bootstrap.parts]
        state = FoldState.decoded(first) if bootstrap.info.has_snapshot else FoldState()
        return state.apply_all(rest)


def run(spark: SparkSession, configured: Archive | Fold, environment: JobEnvironment) -> None:
    """Run a job until it has processed everything, as the command does."""
    job = configured.model_copy(update={"once": True})
    supervisor = JobSupervisor(spark, environment, [job], COMMAND)

    def finished() -> bool:
        supervisor.poll()
        return supervisor.is_finished

    wait_until(finished, limit_s=PATIENCE_S, every_s=POLL_S)
    (status,) = supervisor.statuses
    assert status.status == "stopped", status.error
