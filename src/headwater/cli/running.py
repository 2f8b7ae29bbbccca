"""Running a job of the pipeline from the command line: its session, its progress on the terminal, its end.

Invariant: stdout stays empty; what is meant for eyes goes to stderr, a line that is written over on a terminal and one
line a batch elsewhere. A job that is told to stop (Ctrl-C, SIGTERM) ends cleanly, and goes on where it was next time.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.remote import STREAM_ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.streaming.query import StreamingQuery

    from headwater.pipeline.job import Job, Surroundings

RESTARTS_MAX: Final = 5
"""In a row, without a batch between them."""
_PASSING: Final = ("OffsetGone", "failed to connect back")
"""What starting again cures. A lost executor took rows with it that a snapshot has replaced meanwhile: planned anew,
the batch finds it. And Spark gives its Python processes ten seconds to start, which a busy machine may not have."""
_LOOK_S: Final = 1

Once = Annotated[bool, typer.Option("--once", help="End when everything that is there now is done.")]
Master = Annotated[str, typer.Option("--master", metavar="URL", help="The Spark master.")]
Checkpoints = Annotated[
    str, typer.Option("--checkpoints", metavar="DIR", help="Where jobs keep their places; any address Spark can write.")
]
Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="Tell of each batch.", show_default="on a terminal")
]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", metavar="PORT", min=0, help="Serve Prometheus metrics there.")
]
Streams = Annotated[
    list[str] | None, typer.Argument(metavar="[STREAM]...", help="Their names; none is all of the bucket.")
]
JobName = Annotated[str, typer.Option("--name", help="Of the job: its checkpoint and metrics go by it.")]
Tasks = Annotated[int, typer.Option("--tasks", min=1, help="Spark tasks per batch.")]
Bucket = Annotated[str, typer.Option("--bucket", metavar="ID", help="Of this bucket (/ds/ID/…), not of /v1/stream/.")]
Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="All whose names begin so, later ones too.")]


def stream_root(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"--url: {url!r} does not begin with http:// or https://", USAGE)
    return url.rstrip("/") + STREAM_ROOT.rstrip("/")


def configured(make: Callable[[], Any]) -> Any:
    """A job from its flags, or the one line that says what is wrong with them."""
    from pydantic import ValidationError

    try:
        return make()
    except ValidationError as error:
        said = "; ".join(str(one["msg"]).removeprefix("Value error, ") for one in error.errors())
        raise CommandError(said, USAGE) from None


def run_job(
    job: Job, surroundings: Surroundings, master: str, progress: bool | None, metrics_port: int | None = None
) -> None:
    """Start it, tell of it, and see it to its end."""
    from headwater.pipeline.session import NoSpark, spark_session
    from headwater.pipeline.status import described
    from headwater.spark.progress import Flow, ProgressMetrics, ProgressStream

    status = described(job)
    flows = {job.name: Flow(status.source, status.target)}
    try:
        with (
            spark_session(f"headwater {job.name}", master) as spark,
            closing(
                ProgressStream(
                    surroundings.streams, token=surroundings.token, ca_file=surroundings.ca_file, flows=flows
                )
            ) as told,
        ):
            spark.streams.addListener(told)
            if metrics_port is not None:
                metrics = ProgressMetrics()
                spark.streams.addListener(metrics)
                _say(f"metrics on http://127.0.0.1:{metrics.serve(metrics_port)}/metrics")
            previous = signal.signal(signal.SIGTERM, _interrupt)
            try:
                supervise(lambda: job.start(spark, surroundings), Line(job.name, progress))
            finally:
                signal.signal(signal.SIGTERM, previous)
    except NoSpark as error:
        raise CommandError(str(error)) from None
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None


def supervise(start: Callable[[], StreamingQuery], line: Line) -> None:
    """Run a query to its end, or until it is told to stop; start it again where that helps."""
    restarts = 0
    while True:
        query = start()
        try:
            batches = line.follow(query)
        except KeyboardInterrupt:
            query.stop()
            return
        finally:
            line.close()
        error = query.exception()
        if error is None:
            return
        reason = reason_of(error)
        restarts = 0 if batches else restarts
        if not any(sign in str(error) for sign in _PASSING) or restarts >= RESTARTS_MAX:
            raise CommandError(reason)
        restarts += 1
        _say(f"starting again: {reason}")
        time.sleep(2**restarts)


class Line:
    """What a query does, told on stderr."""

    def __init__(self, name: str, wanted: bool | None) -> None:
        self._name = name
        self._overwrites = sys.stderr.isatty()
        self._shown = wanted if wanted is not None else self._overwrites
        self._rows = 0
        self._open = False

    def follow(self, query: StreamingQuery) -> int:
        """Until it ends, well or badly; how many batches were seen."""
        from pyspark.errors import StreamingQueryException

        seen = -1
        count = 0
        began = time.monotonic()
        while True:
            try:
                ended = query.awaitTermination(_LOOK_S)
            except StreamingQueryException:
                ended = True
            for told in query.recentProgress:
                batch = told["batchId"]
                if batch > seen and told["numInputRows"]:
                    seen, count = batch, count + 1
                    self._rows += told["numInputRows"]
                    self._tell(told, time.monotonic() - began)
            if ended:
                return count

    def close(self) -> None:
        if self._open:
            sys.stderr.write("\n")
            self._open = False

    def _tell(self, told: Any, elapsed_s: float) -> None:
        if not self._shown:
            return
        from headwater.spark.progress import lags

        behind = sum(sum(lags(source["endOffset"], source["latestOffset"]).values()) for source in _sources(told))
        rate = self._rows / max(elapsed_s, 0.001)
        text = (
            f"{self._name}: batch {told['batchId']}, {self._rows:,} messages in {elapsed_s:.0f} s"
            f" ({rate:,.0f}/s), {behind:,} behind"
        )
        sys.stderr.write(f"\r\x1b[K{text}" if self._overwrites else f"{text}\n")
        sys.stderr.flush()
        self._open = self._overwrites


def _sources(told: Any) -> list[dict[str, Any]]:
    import json

    sources: list[dict[str, Any]] = json.loads(told.json)["sources"] if hasattr(told, "json") else told["sources"]
    for source in sources:
        for key in ("endOffset", "latestOffset"):
            if not isinstance(source[key], str | None):
                source[key] = json.dumps(source[key])
    return sources


def reason_of(error: Exception) -> str:
    """The sentence within what Spark makes of an error."""
    text = str(error).strip()
    for line in reversed(text.splitlines()):
        name, colon, said = line.strip().partition(": ")
        if colon and (name.startswith("headwater.") or name.endswith(("Trouble", "Error"))) and said:
            return said
    return text.splitlines()[0][:500] if text else type(error).__name__


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    sys.stderr.write(f"headwater: {text}\n")
