"""How a stack looks while it starts and runs: a table that keeps itself up to date, or plain lines off a terminal.

Invariant: a line is written once for each change of a part's state, so that a log of the start reads as what happened.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TextIO

from headwater.printable import printable
from headwater.stack.state import PartStatus, StackStatus

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

# A job's words for what parts are, too; one that waits is about to be started again.
_JOB_MARKS: Final = {**_MARKS, "running": _MARKS["up"], "waiting": _MARKS["restarting"], "silent": _MARKS["unready"]}


class Lines:
    """One line for each change."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._seen: dict[str, str] = {}
        self._phase = ""

    def __call__(self, status: StackStatus) -> None:
        for part in status.parts:
            if part.state != self._seen.get(part.name) and part.state != "waiting":
                self._out.write(f"{part.name}: {described(part)}\n")
            self._seen[part.name] = part.state
        if status.phase != self._phase:
            self._phase = status.phase
            if status.phase == "up":
                self._out.write(f"the stack is up (profile {status.profile})\n")
            elif status.phase == "stopped":
                self._out.write("the stack is down\n")
        self._out.flush()

    def close(self) -> None:
        """Nothing to put away."""


class Screen:
    """A table on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415

        self._live: Live = Live(console=Console(stderr=True), refresh_per_second=8, transient=False)
        self._live.start()

    def __call__(self, status: StackStatus) -> None:
        self._live.update(table_of(status))

    def close(self) -> None:
        self._live.stop()


def table_of(status: StackStatus) -> Table:
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    title = f"headwater: {status.phase}, profile {status.profile}"
    if status.shards > 1:
        title += f", {status.shards} shards"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("", "part", "state", "since", "process", "port", "restarts", "address or trouble", "log"):
        table.add_column(column, no_wrap=column != "address or trouble")
    for part in status.parts:
        mark, style = _MARKS[part.state]
        table.add_row(
            Text(mark, style),
            part.name,
            Text(part.state, style),
            age(part.since),
            str(part.pid or ""),
            str(part.port or ""),
            str(part.restarts or ""),
            Text(printable(part.detail or part.address)),
            Text(part.log, "dim"),
        )
    return table


def jobs_table(jobs: list[JobStatus]) -> Table:
    """The pipeline's jobs, as they last told of themselves."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(title="pipeline", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("", "job", "state", "told", "rows", "behind", "batch", "restarts", "from → to, or trouble"):
        table.add_column(column, no_wrap=not column.startswith("from"))
    for job in jobs:
        mark, style = _JOB_MARKS.get(job.status, _MARKS["unready"])
        table.add_row(
            Text(mark, style),
            Text(printable(job.name)),
            Text(printable(job.status), style),
            age(job.told_at),
            _count(job.rows),
            _count(job.lag_messages),
            "" if job.batch_ms is None else f"{job.batch_ms:,.0f} ms",
            str(job.restarts or ""),
            Text(printable(job.trouble or f"{job.source} → {job.target}".strip(" →"))),
        )
    return table


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def described(part: PartStatus) -> str:
    words: list[str] = [part.state]
    if part.state == "up":
        words += [f"at {part.address}"] if part.address else []
        words.append(f"(process {part.pid}, log {part.log})")
    if part.restarts:
        words.append(f"after {part.restarts} restarts" if part.restarts > 1 else "after 1 restart")
    told = " ".join(words)
    return f"{told}: {part.detail}" if part.detail and part.state != "starting" else told


def age(since: float) -> str:
    seconds = max(0, int(time.time() - since))
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
