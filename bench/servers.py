"""The two servers that the benchmarks compare, as child processes pinned to a core, and the pinning itself.

Invariant: both are started in the same way, on the same core, and both have exited after the `with` block.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.serving import serve

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parent.parent
STORAGE_MODES = ("memory", "file-fast", "file-durable", "acid")

# The server uses the first core, the load generator the last. With one core they share it; the ratio is still fair.
_CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE = _CORES[0]
LOAD_CORE = _CORES[-1]

_START_TIMEOUT_SECS = 20.0


@dataclass(frozen=True, slots=True)
class Running:
    name: str
    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Children started within the block run on this core: they and all their threads inherit the affinity."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far, in steps of the clock tick: it does not depend on other load.

    `workloads.cpu_seconds` is finer, for short measurements, but leaves out threads that have ended.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_turns(servers: Sequence[Running], rounds: int, run: Callable[[Running, int], T]) -> list[T]:
    """Run each round on one server after the other, so that other load on the machine affects them equally."""
    return [run(server, number) for number in range(1, rounds + 1) for server in servers]


@contextmanager
def headwater(mode: str = "memory", **settings: Any) -> Iterator[Running]:
    """Our server, without size limits, because the official one has none."""
    unlimited = {"DS_LIMITS__MAX_STREAM_BYTES": "0", "DS_LIMITS__MAX_MEMORY_BYTES": str(8 * 2**30)}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as directory:
        with on_core(SERVER_CORE):
            # A command, so that it is a new process, as users start it, and not a fork of a loaded one.
            starting = serve(
                directory=Path(directory), command=("env",), DS_STORAGE__MODE=mode, **(unlimited | settings)
            )
            server = starting.__enter__()
        try:
            yield Running("headwater", server.url, server.pid)
        finally:
            starting.__exit__(None, None, None)


@contextmanager
def official_node(mode: str = "memory", *, arguments: tuple[str, ...] = ()) -> Iterator[Running]:
    """The official Node server. It has two modes: in memory, and files with an fsync per append."""
    node = shutil.which("node")
    if node is None:
        raise SystemExit("Node.js is missing; on Debian: apt-get install nodejs npm")
    with tempfile.TemporaryDirectory(prefix="node-bench-") as directory:
        command = [node, str(REPOSITORY / "bench" / "node_server.mjs"), *arguments]
        if mode != "memory":
            command += ["--data-dir", directory]
        with on_core(SERVER_CORE):
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            yield Running("official node", _listening_url(child), child.pid)
        finally:
            child.terminate()
            child.communicate(timeout=_START_TIMEOUT_SECS)


def _listening_url(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline().decode()
    if not line.startswith("listening on "):
        raise SystemExit(f"the official Node server did not start: {line!r}. Run `npm ci` in tests/npm.")
    return line.removeprefix("listening on ").strip()
