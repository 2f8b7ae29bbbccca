"""The sections of docs/reliability.md about operations that delay other clients."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from scripts.generated_docs.markdown import section

_LIMIT_MS = 50
_REFUSED = re.compile(r"(\d{3}) b?['\"].*\"code\": ?\"(\w+)\"", re.DOTALL)


def loop_cpu(run: dict[str, Any]) -> str:
    return section(
        "The longest iteration of the event loop",
        "The most CPU time that one iteration of the event loop took while a client ran the operation with its worst"
        " legal input: other clients wait at least that long. It does not depend on other programs on the machine."
        f" Commit {run['commit']}, {run['size']} % of the input.",
        "| operation | input | CPU time | |",
        _cpu_rows(run),
    )


def _cpu_rows(run: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in run["counts"]["rows"]:
        measured = f"{row['cpu_ms']} ms" if "cpu_ms" in row else _not_measured(row["failed"])
        yield f"`{row['operation']}`", f"{row['input']} ({row['mode']})", measured, _over(row.get("cpu_ms", 0))


def stalls(run: dict[str, Any]) -> str:
    return section(
        "The worst stall of each operation",
        "A probe requests `/healthz` every 5 ms on its own connection while another client runs the operation with its"
        " worst legal input. The table has the longest response time of the probe, for how much of it the server was"
        " ready to run and had no CPU (the client and the probe run on the same machine), how much CPU time the host of"
        " the virtual machine took meanwhile, and the longest response time without the operation. A measurement over"
        f" {_LIMIT_MS} ms is repeated, because what the server does itself appears each time; the row has the shortest,"
        f" and the last column has all of them. Commit {run['commit']}, {run['cores']} cores, load average"
        f" {run['load_before']} at the start.",
        "| operation | input | worst | of it without a CPU | taken by the host | quiet | |",
        _stall_rows(run),
    )


def _stall_rows(run: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in run["counts"]["rows"]:
        if "failed" in row:
            yield f"`{row['operation']}`", row["input"], "", "", "", "", _not_measured(row["failed"])
            continue
        note = _over(row["worst_ms"])
        if len(row.get("all_ms", ())) > 1:
            note = f"{note} measured: {', '.join(map(str, row['all_ms']))} ms".strip()
        times = ("worst_ms", "worst_waited_ms", "worst_stolen_ms", "quiet_worst_ms")
        waits = (f"{row[key]} ms" if key in row else "" for key in times)
        yield f"`{row['operation']}`", f"{row['input']} ({row['mode']})", *waits, note


def _over(time_ms: float) -> str:
    return f"over {_LIMIT_MS} ms" if time_ms > _LIMIT_MS else ""


def _not_measured(reason: str) -> str:
    """Why there is no measurement, in a few words: a table cell cannot hold the body of a response."""
    refused = _REFUSED.search(reason)
    text = f"{refused[1]} `{refused[2]}`" if refused is not None else " ".join(reason.split())[:80]
    return f"not measured: {text}"
