"""Run one job of the pipeline from the command line, and the options that such commands share.

Invariant: stdout stays empty; progress goes to stderr. Ctrl-C and SIGTERM stop the job cleanly, and the next run
continues from its checkpoint.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.remote import STREAM_ROOT, check_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwater.pipeline.job import Job, JobEnvironment
    from headwater.pipeline.status import QueryStatus

_STATUS_REPEAT_S: Final = 10.0

Once = Annotated[bool, typer.Option("--once", help="Exit after processing everything that exists now.")]
Master = Annotated[str, typer.Option("--master", metavar="URL", help="The Spark master.")]
Checkpoints = Annotated[
    str,
    typer.Option("--checkpoints", metavar="DIR", help="The checkpoint directory, or any URL that Spark can write to."),
]
Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Report each batch.", show_default="on a terminal")
]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", metavar="PORT", min=0, help="Serve Prometheus metrics on this port.")
]
Streams = Annotated[
    list[str] | None, typer.Argument(metavar="[STREAM]...", help="Names of streams; by default all of the bucket.")
]
JobName = Annotated[str, typer.Option("--name", help="The name of the job, its checkpoint and its metrics.")]
Tasks = Annotated[int, typer.Option("--tasks", min=1, help="Spark tasks per batch.")]
Bucket = Annotated[
    str, typer.Option("--bucket", metavar="ID", help="Use streams of this bucket (/ds/ID/…) instead of /v1/stream/.")
]
Prefix = Annotated[
    str, typer.Option("--prefix", metavar="TEXT", help="Streams with this prefix, including later ones.")
]


def stream_root(url: str) -> str:
    check_url(url)
    return url.rstrip("/") + STREAM_ROOT.rstrip("/")


def configured(make: Callable[[], Any]) -> Any:
    """Create a job from its flags; a mistake in them is reported as one line."""
    from pydantic import ValidationError

    from headwater.pipeline.settings import validation_message

    try:
        return make()
    except ValidationError as error:
        raise CommandError(validation_message(error), USAGE) from None


def run_job(
    job: Job, environment: JobEnvironment, master: str, progress: bool | None, metrics_port: int | None = None
) -> None:
    """Run one job until it ends, fails permanently, or is stopped by a signal."""
    from contextlib import ExitStack, closing
    from dataclasses import asdict

    from headwater.pipeline.endpoint import Endpoint, EndpointError
    from headwater.pipeline.session import SparkMissingError, spark_session
    from headwater.pipeline.supervisor import COMMAND, POLL_S, JobSupervisor, stop_on_signals
    from headwater.spark.progress import ProgressMetrics
    from headwater.spark.status import StatusStream

    stop = threading.Event()
    line = ProgressLine(progress)
    try:
        with ExitStack() as stack:
            metrics = ProgressMetrics()
            if metrics_port is not None:
                endpoint = stack.enter_context(Endpoint("127.0.0.1", metrics_port, metrics.registry))
                _say(f"metrics on http://127.0.0.1:{endpoint.port}/metrics")
            spark = stack.enter_context(spark_session(f"headwater {job.name}", master))
            spark.streams.addListener(metrics)
            status = stack.enter_context(
                closing(
                    StatusStream(
                        environment.streams,
                        token=environment.token,
                        ca_file=environment.ca_file,
                        repeat_s=_STATUS_REPEAT_S,
                    )
                )
            )
            stack.enter_context(stop_on_signals(stop))
            supervisor = JobSupervisor(spark, environment, [job], COMMAND)
            (current,) = supervisor.statuses
            try:
                while not stop.is_set() and not supervisor.is_finished:
                    restarts = current.restarts
                    supervisor.poll()
                    if current.restarts > restarts:
                        line.close()
                        _say(f"restarting: {(current.error or {}).get('message')}")
                    line.show(current)
                    status.publish("query", job.name, asdict(current))
                    stop.wait(POLL_S)
            finally:
                line.close()
                supervisor.stop()
                status.publish("query", job.name, asdict(current))
    except (SparkMissingError, EndpointError) as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    if current.status == "failed":
        raise CommandError((current.error or {}).get("message", "the job failed"))


class ProgressLine:
    """The progress of one job on stderr: one line that is overwritten on a terminal, otherwise one line per batch."""

    def __init__(self, wanted: bool | None) -> None:
        self._overwrites = sys.stderr.isatty()
        self._shown = wanted if wanted is not None else self._overwrites
        self._rows = 0
        self._open = False
        self._started_at = time.monotonic()

    def show(self, status: QueryStatus) -> None:
        if not self._shown or status.rows == self._rows:
            return
        self._rows = status.rows
        elapsed_s = time.monotonic() - self._started_at
        text = (
            f"{status.name}: batch {status.batch}, {status.rows:,} messages in {elapsed_s:.0f} s"
            f" ({status.rows / max(elapsed_s, 0.001):,.0f}/s), {status.lag_messages or 0:,} behind"
        )
        sys.stderr.write(f"\r\x1b[K{text}" if self._overwrites else f"{text}\n")
        sys.stderr.flush()
        self._open = self._overwrites

    def close(self) -> None:
        if self._open:
            sys.stderr.write("\n")
            self._open = False


def _say(text: str) -> None:
    sys.stderr.write(f"headwater: {text}\n")
