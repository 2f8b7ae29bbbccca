"""Show the state of a stack: a live table on a terminal, otherwise one line for each change.

Invariant: each change of a service's state is written once, so that the lines are a log of the startup.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TextIO

from headwater.printable import printable
from headwater.stack.state import ServiceStatus, StackStatus

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from headwater.stack.jobs import JobStatus

_MARKS: Final = {
    "waiting": ("·", "dim"),
    "starting": ("…", "yellow"),
    "up": ("✓", "green"),
    "unready": ("?", "yellow"),
    "restarting": ("↻", "red"),
    "stopped": ("■", "dim"),
    "absent": ("-", "dim"),
    "failed": ("✗", "red"),
}

# Jobs have other states than services; a waiting job is about to be restarted.
_JOB_MARKS: Final = {**_MARKS, "running": _MARKS["up"], "waiting": _MARKS["restarting"], "silent": _MARKS["unready"]}


class LineDisplay:
    """Writes one line for each change."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._seen: dict[str, str] = {}
        self._phase = ""

    def __call__(self, status: StackStatus) -> None:
        for service in status.parts:
            if service.state != self._seen.get(service.name) and service.state != "waiting":
                self._out.write(f"{service.name}: {describe(service)}\n")
            self._seen[service.name] = service.state
        if status.phase != self._phase:
            self._phase = status.phase
            if status.phase == "up":
                self._out.write(f"the stack is up (profile {status.profile})\n")
            elif status.phase == "stopped":
                self._out.write("the stack is down\n")
        self._out.flush()

    def close(self) -> None:
        """Do nothing; lines need no cleanup."""


class TableDisplay:
    """Updates a table on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415

        self._live: Live = Live(console=Console(stderr=True), refresh_per_second=8, transient=False)
        self._live.start()

    def __call__(self, status: StackStatus) -> None:
        self._live.update(stack_table(status))

    def close(self) -> None:
        self._live.stop()


def stack_table(status: StackStatus) -> Table:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    title = f"headwater: {status.phase}, profile {status.profile}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("", "service", "state", "since", "process", "port", "restarts", "address or problem", "log"):
        table.add_column(column, no_wrap=column != "address or problem")
    for service in status.parts:
        mark, style = _MARKS[service.state]
        table.add_row(
            Text(mark, style),
            service.name,
            Text(service.state, style),
            age(service.since),
            str(service.pid or ""),
            str(service.port or ""),
            str(service.restarts or ""),
            Text(printable(service.detail or service.address)),
            Text(service.log, "dim"),
        )
    return table


def jobs_table(jobs: list[JobStatus]) -> Table:
    """The pipeline's jobs with the state that each last reported."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title="pipeline", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("", "job", "state", "updated", "rows", "behind", "batch", "restarts", "from → to, or problem"):
        table.add_column(column, no_wrap=not column.startswith("from"))
    for job in jobs:
        mark, style = _JOB_MARKS.get(job.status, _MARKS["unready"])
        table.add_row(
            Text(mark, style),
            Text(printable(job.name)),
            Text(printable(job.status), style),
            age(job.updated_at),
            _count(job.rows),
            _count(job.lag_messages),
            "" if job.batch_ms is None else f"{job.batch_ms:,.0f} ms",
            str(job.restarts or ""),
            Text(printable(job.problem or f"{job.source} → {job.target}".strip(" →"))),
        )
    return table


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def describe(service: ServiceStatus) -> str:
    words: list[str] = [service.state]
    if service.state == "up":
        words += [f"at {service.address}"] if service.address else []
        words.append(f"(process {service.pid}, log {service.log})")
    if service.restarts:
        words.append(f"after {service.restarts} restarts" if service.restarts > 1 else "after 1 restart")
    line = " ".join(words)
    return f"{line}: {service.detail}" if service.detail and service.state != "starting" else line


def age(since: float) -> str:
    seconds = max(0, int(time.time() - since))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
