"""A real `headwater sync` for a test: a child process with Spark, stopped at the end of the `with` block.

Invariant: all its processes have exited afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.ports import free_port
from tests.spark.processes import kill_tree
from tests.spark.session import require_java, worker_environment
from tests.waiting import wait_until

READY_TIMEOUT_S = 280.0
STOP_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Sync:
    process: subprocess.Popen[bytes]
    log_file: Path
    endpoint: str

    def log(self) -> str:
        return self.log_file.read_text("utf-8", "replace")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.endpoint}/readyz", timeout=60).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_until_ready(self) -> None:
        def look() -> bool:
            assert self.process.poll() is None, f"headwater sync ended:\n{self.log()[-4000:]}"
            return self.is_ready()

        wait_until(look, what=f"headwater sync is ready:\n{self.log()[-4000:]}", limit_s=READY_TIMEOUT_S, every_s=0.1)

    def metrics(self) -> str:
        return httpx.get(f"{self.endpoint}/metrics", timeout=60).text

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """Kill all processes at once, as the loss of a machine would."""
        if self.process.poll() is None:
            kill_tree(psutil.Process(self.process.pid))
        self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def syncing(
    directory: Path,
    server: str,
    postgres: str,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    program: Sequence[str] = (sys.executable, "-m", "headwater", "sync"),
) -> Iterator[Sync]:
    """Run it with checkpoints and log in `directory`; pass the same directory again to continue."""
    require_java()
    port = free_port()
    log_file = directory / "sync.log"
    given = {name: value for name, value in os.environ.items() if not name.startswith("DS_")}
    own = {"DS_SERVER_URL": server, "POSTGRES_URL": postgres, "PYTHONUNBUFFERED": "1", "DS_PIPELINE__PROBE": "false"}
    with log_file.open("ab") as output:
        process = subprocess.Popen(
            [
                *(*program, "--metrics-port", str(port)),
                *("--checkpoints", str(directory / "checkpoints"), *arguments),
            ],
            cwd=directory,
            env={**given, **worker_environment(), **own, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    sync = Sync(process, log_file, f"http://127.0.0.1:{port}")
    try:
        yield sync
    finally:
        sync.kill()
