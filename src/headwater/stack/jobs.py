"""The pipeline's jobs as they tell of themselves: the last state of each, out of the server's status stream.

Invariant: reading changes nothing, and a field that a job does not tell is left open, not made up.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

STATUS_STREAM: Final = "__pipeline__"
_SILENT_AFTER_S: Final = 60.0
"""A job tells of itself at least every ten seconds, unless it is busy with one batch."""
_TIMEOUT_S: Final = 5.0


class JobStatus(msgspec.Struct):
    """One job, as it last told of itself."""

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
    def told_at(self) -> float:
        return self.updated_at_ms / 1000

    @property
    def trouble(self) -> str:
        return str((self.error or {}).get("message", ""))


class _Event(msgspec.Struct):
    type: str = ""
    key: str = ""
    value: JobStatus | None = None


_EVENTS: Final = msgspec.json.Decoder(list[_Event])


def jobs_told(servers: Iterable[str], ca_file: Path | None = None) -> list[JobStatus]:
    """The jobs of all these servers, by name. Raises `httpx.HTTPError` where one does not answer."""
    jobs: dict[str, JobStatus] = {}
    for server in servers:
        trust = ssl.create_default_context(cafile=ca_file) if server.startswith("https:") else True
        with httpx.Client(base_url=f"{server}/v1/stream", timeout=_TIMEOUT_S, verify=trust) as http:
            for event in _events(http):
                if event.type == "query" and event.value is not None:
                    jobs[event.key] = event.value
                elif event.type == "query":
                    jobs.pop(event.key, None)
    now = time.time()
    for name, job in jobs.items():
        job.name = job.name or name
        if job.status in {"starting", "running", "waiting"} and now - job.told_at > _SILENT_AFTER_S:
            job.status = "silent"
    return [jobs[name] for name in sorted(jobs)]


def _events(http: httpx.Client) -> Iterator[_Event]:
    offset = "-1"
    while True:
        answer = http.get(f"/{STATUS_STREAM}", params={"offset": offset})
        if answer.status_code == httpx.codes.NOT_FOUND:
            return
        if answer.status_code == httpx.codes.GONE and "Stream-Earliest-Offset" in answer.headers:
            offset = answer.headers["Stream-Earliest-Offset"]
            continue
        answer.raise_for_status()
        yield from _EVENTS.decode(answer.content)
        offset = answer.headers["Stream-Next-Offset"]
        if answer.headers.get("Stream-Up-To-Date") == "true":
            return
