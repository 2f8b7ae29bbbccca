"""The pipeline's jobs: the last status of each, read from the server's status stream.

Invariant: reading changes nothing, and a field that a job does not report stays empty.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.client import BEGINNING, NO_RETRY, Client, OffsetGoneError, Stream, StreamNotFoundError

STATUS_STREAM: Final = "__pipeline__"
_SILENT_AFTER_S: Final = 60.0
"""A job reports its status at least every ten seconds, unless it is busy with one batch."""
_TIMEOUT_S: Final = 5.0


class JobStatus(msgspec.Struct):
    """One job, as it last reported."""

    name: str = ""
    status: str = ""
    source: str = ""
    target: str = ""
    rows: int | None = None
    processed_rows_per_s: float | None = None
    batch_ms: float | None = None
    lag_messages: int | None = None
    restarts: int | None = None
    error: dict[str, Any] | None = None
    updated_at_ms: int = 0

    @property
    def updated_at(self) -> float:
        return self.updated_at_ms / 1000

    @property
    def problem(self) -> str:
        return str((self.error or {}).get("message", ""))


class _JobEvent(msgspec.Struct):
    type: str = ""
    key: str = ""
    value: JobStatus | None = None


_EVENTS: Final = msgspec.json.Decoder(list[_JobEvent])


def pipeline_jobs(servers: Iterable[str], ca_file: Path | None = None) -> list[JobStatus]:
    """List the jobs of these servers by name. Raises `ClientError` when a server does not respond."""
    jobs: dict[str, JobStatus] = {}
    for server in servers:
        trusted = ca_file if server.startswith("https:") else None
        with Client(server, timeout_s=_TIMEOUT_S, ca_file=trusted, retry=NO_RETRY) as client:
            for event in _events(client.stream(STATUS_STREAM)):
                if event.type == "query" and event.value is not None:
                    jobs[event.key] = event.value
                elif event.type == "query":
                    jobs.pop(event.key, None)
    now = time.time()
    for name, job in jobs.items():
        job.name = job.name or name
        if job.status in {"starting", "running", "waiting"} and now - job.updated_at > _SILENT_AFTER_S:
            job.status = "silent"
    return [jobs[name] for name in sorted(jobs)]


def _events(stream: Stream) -> Iterator[_JobEvent]:
    offset: str | None = BEGINNING
    while offset is not None:
        try:
            for batch in stream.read(offset).batches():
                for body in batch.bodies:
                    yield from _EVENTS.decode(body)
            return
        except StreamNotFoundError:
            return
        except OffsetGoneError as error:
            # Retention moved on while we read.
            offset = error.earliest_offset
            if offset is None:
                raise
