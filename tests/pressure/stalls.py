"""The worst stall of each operation: a probe on its own connection every 5 ms while the operation runs.

    python -m tests.pressure.stalls [OPERATION …] [--share 1.0] [--json FILE]

It measures wall-clock time against the real server, so run it on a quiet machine. `cpu_of` measures CPU time per
iteration of the server's loop instead, which is independent of other load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.pressure.load import Load, Operation
from tests.pressure.metered import Worst
from tests.pressure.operations import BY_NAME, OPERATIONS
from tests.serving import Server, serve

PROBE_EVERY_S = 0.005
STALL_MAX_MS = 50.0


class Probe:
    """A separate process, so that the driver's work does not delay it."""

    def __init__(self, server: Server) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.pressure.probe", str(server.port), str(server.pid), str(PROBE_EVERY_S)],
            cwd=Path(__file__).resolve().parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "probing\n"

    def stop(self) -> dict[str, float]:
        """The median, 99th percentile and maximum response time in milliseconds; during the longest, how long the
        server had no CPU and what the host took; and the number of responses."""
        out, _ = self._process.communicate("stop\n", timeout=60)
        found: dict[str, float] = json.loads(out)
        return found


def wall_of(operation: Operation, share: float, program: tuple[str, ...] = ("headwater",)) -> dict[str, Any]:
    """What another client sees while the operation runs."""
    settings: dict[str, Any] = {"DS_STORAGE__MODE": operation.mode, **operation.settings}
    with ExitStack() as opened:
        directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        settings |= _written(directory, [operation], share)
        server = opened.enter_context(serve(program=program, **settings))
        load = Load(server, share)
        operation.prepare(load)
        time.sleep(0.3)
        quiet = Probe(server)
        time.sleep(1.0)
        before = quiet.stop()
        probe = Probe(server)
        began = time.monotonic()
        operation.drive(load)
        seconds = time.monotonic() - began
        found = probe.stop()
    return {
        "operation": operation.name,
        "input": operation.worst,
        "mode": operation.mode,
        "share": share,
        "seconds": round(seconds, 2),
        "worst_ms": round(found["worst_ms"], 1),
        "worst_waited_ms": round(found["worst_waited_ms"], 1),
        "worst_stolen_ms": round(found["worst_stolen_ms"], 1),
        "worst_own_ms": round(found["worst_own_ms"], 1),
        "p99_ms": round(found["p99_ms"], 1),
        "probes": int(found["probes"]),
        "quiet_worst_ms": round(before["worst_ms"], 1),
    }


def cpu_of(operations: Sequence[Operation], fault: str | None = None) -> dict[str, Worst]:
    """By operation, the worst iteration of the loop while it runs at its quick size. All must have one mode."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "meter.json"
        settings: dict[str, Any] = {"DS_STORAGE__MODE": operations[0].mode, "METER_FILE": str(path)}
        for operation in operations:
            settings |= operation.settings
        settings |= _written(Path(directory), operations)
        found = {}
        with serve(program=("tests.pressure.metered", *([fault] if fault else [])), **settings) as server:
            for operation in operations:
                load = Load(server, operation.share)
                operation.prepare(load)
                _report(load, path)
                operation.drive(load)
                found[operation.name] = _report(load, path)
        return found


def _written(directory: Path, operations: Sequence[Operation], share: float | None = None) -> dict[str, str]:
    """Write the data that these operations start with, for a share or their own; returns the settings to open it."""
    writing = [operation for operation in operations if operation.write_store is not None]
    for operation in writing:
        assert operation.write_store is not None
        operation.write_store(directory / "data", operation.share if share is None else share)
    return {"DS_STORAGE__DATA_DIR": str(directory / "data")} if writing else {}


def _report(load: Load, path: Path) -> Worst:
    # The response to this is sent in a later iteration, so the operation's iterations are complete.
    load.must("GET", "/healthz")
    path.unlink(missing_ok=True)
    os.kill(load.server.pid, signal.SIGUSR1)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, "the meter does not report"
        time.sleep(0.01)
    return Worst(**json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", choices=[*BY_NAME, []])
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--cpu", action="store_true", help="CPU time per iteration instead, at each one's quick size")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for operation in [BY_NAME[name] for name in chosen.operations] or OPERATIONS:
        try:
            row = vars(cpu_of([operation])[operation.name]) if chosen.cpu else wall_of(operation, chosen.share)
        except Exception as error:
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        row = {"operation": operation.name, **row}
        rows.append(row)
        print(json.dumps(row), flush=True)  # noqa: T201
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
