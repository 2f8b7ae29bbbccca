"""A server whose event loop counts its CPU time and blocking calls per iteration.

    METER_FILE=… python -m tests.pressure.metered [FAULT] serve --port 0

The loop is asyncio's own, because uvloop has no hook around an iteration. On SIGUSR1 the worst iteration since the last
one is written to METER_FILE as JSON. CPU time is that of the loop's thread: it is independent of other programs on the
machine, and includes garbage collection but not waiting.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from asyncio import events
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from headwater.cli import main


@dataclass
class Worst:
    """The maximum of each number over all iterations so far."""

    iterations: int = 0
    cpu_ms: float = 0.0
    callback: str = ""
    """The longest callback in the iteration with the most CPU time."""
    callback_cpu_ms: float = 0.0
    syncs: int = 0
    read_bytes: int = 0


class Meter:
    def __init__(self) -> None:
        self.worst = Worst()
        self._thread = threading.get_ident()
        self._longest = (0, "")
        self._syncs = 0
        self._read_bytes = 0

    def begin(self) -> None:
        self._longest = (0, "")
        self._syncs = self._read_bytes = 0

    def ran(self, handle: Any, spent_ns: int) -> None:
        if spent_ns > self._longest[0]:
            self._longest = (spent_ns, repr(getattr(handle, "_callback", handle)))

    def end(self, spent_ns: int) -> None:
        worst = self.worst
        worst.iterations += 1
        worst.syncs = max(worst.syncs, self._syncs)
        worst.read_bytes = max(worst.read_bytes, self._read_bytes)
        if spent_ns / 1e6 > worst.cpu_ms:
            worst.cpu_ms = spent_ns / 1e6
            worst.callback_cpu_ms, worst.callback = self._longest[0] / 1e6, self._longest[1]

    def report(self, *_: object) -> None:
        path = Path(os.environ["METER_FILE"])
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self.worst)))
        part.replace(path)
        self.worst = Worst()

    def watch_calls(self) -> None:
        """Count blocking system calls of the loop's thread: syncs, and bytes read from files."""

        def counting(call: Callable[..., Any], count: Callable[[Any], None]) -> Callable[..., Any]:
            def counted(*args: Any, **more: Any) -> Any:
                result = call(*args, **more)
                if threading.get_ident() == self._thread:
                    count(result)
                return result

            return counted

        def sync(_: object) -> None:
            self._syncs += 1

        def read(data: bytes) -> None:
            self._read_bytes += len(data)

        os.fsync = counting(os.fsync, sync)
        os.fdatasync = counting(os.fdatasync, sync)
        os.pread = counting(os.pread, read)


METER = Meter()


class MeteredLoop(asyncio.SelectorEventLoop):
    def _run_once(self) -> None:
        METER.begin()
        began = time.thread_time_ns()
        super()._run_once()  # type: ignore[misc]
        METER.end(time.thread_time_ns() - began)


def measure_callbacks() -> None:
    run = events.Handle._run

    def measured(self: events.Handle) -> None:
        began = time.thread_time_ns()
        run(self)
        METER.ran(self, time.thread_time_ns() - began)

    events.Handle._run = measured  # type: ignore[method-assign]


def stalls_on_heads() -> None:
    """A fault that the meter must show: every HEAD computes for 80 ms."""
    from headwater.http.connection import Connection

    receive = Connection.data_received

    def slow(self: Connection, data: bytes) -> None:
        if data.startswith(b"HEAD "):
            until = time.thread_time() + 0.08
            while time.thread_time() < until:
                pass
        receive(self, data)

    Connection.data_received = slow  # type: ignore[method-assign]


def blocks_on_heads() -> None:
    """Every HEAD waits for the disk: two syncs and a read of two mebibytes, which need little CPU time."""
    from headwater.http.connection import Connection

    receive = Connection.data_received
    file = tempfile.TemporaryFile()  # noqa: SIM115 - for the life of the process
    file.truncate(2 * 1024 * 1024)

    def blocking(self: Connection, data: bytes) -> None:
        if data.startswith(b"HEAD "):
            os.pread(file.fileno(), 2 * 1024 * 1024, 0)
            os.fsync(file.fileno())
            os.fsync(file.fileno())
        receive(self, data)

    Connection.data_received = blocking  # type: ignore[method-assign]


FAULTS = {"stalls_on_heads": stalls_on_heads, "blocks_on_heads": blocks_on_heads}


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] in FAULTS:
        FAULTS[arguments.pop(0)]()
    measure_callbacks()
    METER.watch_calls()
    signal.signal(signal.SIGUSR1, METER.report)
    uvloop.new_event_loop = MeteredLoop  # type: ignore[assignment]
    main(arguments)
