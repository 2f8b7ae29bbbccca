"""Start of `headwater sync`: seconds from the start of the process to each step, and to the first event both ways.

    python -m bench.spark_startup [--rounds N] [--processes]

One event waits in the stream `session-events` and one row in the table `items` before the process starts. Each round
has its own server, database and checkpoints; `again` is the same start with the checkpoints of the first one. The CPU
time of a process that ends between two looks is counted in part only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import psycopg
from tests.ports import free_port

from bench.servers import headwater
from headwater.stack.database import LocalPostgres

JSON = {"Content-Type": "application/json"}
LIMIT_S = 300.0
LOOK_S = 0.1


class Start:
    """One start of the command, with the time of every step."""

    def __init__(self, directory: Path, server: str, database: str) -> None:
        self.steps: dict[str, float] = {}
        self.children: dict[int, tuple[float, str]] = {}
        self.cpu: dict[int, tuple[str, float]] = {}
        """By process: its kind, and the CPU seconds that it had used when it was last seen."""
        port = free_port()
        self._endpoint = f"http://127.0.0.1:{port}"
        own = {
            "DS_SERVER_URL": server,
            "POSTGRES_URL": database,
            "DS_PIPELINE__METRICS_PORT": str(port),
            "DS_PIPELINE__CHECKPOINTS": str(directory / "checkpoints"),
        }
        self.log = directory / "sync.log"
        self._began = time.time()
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headwater", "sync"],
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=directory,
            )

    def watch(self, looks: dict[str, Callable[[], bool]]) -> None:
        """Record when each look succeeds for the first time."""
        threads = [threading.Thread(target=self._watch, args=one, daemon=True) for one in looks.items()]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and self.process.poll() is None:
            self._note_children()
            time.sleep(LOOK_S)
        if self.process.poll() is not None:
            raise SystemExit(f"headwater sync ended:\n{self.log.read_text()[-4000:]}")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self._endpoint}/readyz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)

    def _watch(self, name: str, look: Callable[[], bool]) -> None:
        while time.time() - self._began < LIMIT_S:
            if look():
                self.steps[name] = time.time() - self._began
                return
            time.sleep(LOOK_S)

    def _note_children(self) -> None:
        driver = psutil.Process(self.process.pid)
        for child in [driver, *driver.children(recursive=True)]:
            with suppress(psutil.Error):
                words = child.cmdline()
                kind = "Python" if child != driver and "java" not in child.name() else child.name()
                used = child.cpu_times()
                self.cpu[child.pid] = ("driver" if child == driver else kind, used.user + used.system)
                if child.pid not in self.children:
                    name = " ".join(words[:1] + words[-2:])[-100:]
                    self.children[child.pid] = (child.create_time() - self._began, name)

    def cpu_seconds(self) -> dict[str, float]:
        """The CPU time until the last step, by kind of process."""
        sums: dict[str, float] = {}
        for kind, used in self.cpu.values():
            sums[kind] = sums.get(kind, 0.0) + used
        return sums


def one_start(directory: Path, server: str, database: str, number: int, *, processes: bool) -> Start:
    with httpx.Client(base_url=f"{server}/v1/stream") as http, psycopg.connect(database, autocommit=True) as sql:
        if number == 0:
            http.put("/session-events", headers=JSON).raise_for_status()
            sql.execute("CREATE TABLE items (id serial PRIMARY KEY, name text)")
        sql.execute("INSERT INTO items (name) VALUES (%s)", [f"row-{number}"])
        body = b'[{"type":"message","key":"event-%d","operation":"set","value":1}]' % number
        http.post("/session-events", content=body, headers=JSON).raise_for_status()
        start = Start(directory, server, database)

        def is_row_there() -> bool:
            if sql.execute("SELECT to_regclass('session_events')").fetchone() == (None,):
                return False
            found = sql.execute("SELECT count(*) FROM session_events").fetchone()
            return found is not None and found[0] > number

        def is_message_there() -> bool:
            answer = http.get("/pg-items", params={"offset": "-1"})
            return answer.status_code == 200 and f"row-{number}" in answer.text

        try:
            start.watch({"row": is_row_there, "message": is_message_there, "ready": start.is_ready})
        finally:
            start.stop()
    if processes:
        for began, name in sorted(start.children.values()):
            print(f"    {began:6.2f} s  {name}")
    return start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", action="store_true", help="print the start of every process")
    chosen = parser.parse_args()
    print("seconds from the start of the process to: row in Postgres, message in the stream, ready")
    for _ in range(chosen.rounds):
        directory = Path(tempfile.mkdtemp(prefix="startup-bench-"))
        directory.chmod(0o755)
        try:
            with headwater() as server, LocalPostgres(directory / "pg", sync=False) as database:
                for number, name in enumerate(("first", "again")):
                    start = one_start(directory, server.url, database.url, number, processes=chosen.processes)
                    shown = "  ".join(
                        f"{step} {start.steps.get(step, float('nan')):5.1f}" for step in ("row", "message", "ready")
                    )
                    used = "  ".join(f"{kind} {seconds:.1f}" for kind, seconds in start.cpu_seconds().items())
                    print(f"{name:6} {shown}   CPU seconds: {used}   load {os.getloadavg()[0]:.1f}", flush=True)
                if chosen.processes:
                    print((directory / "sync.log").read_text())
        finally:
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
