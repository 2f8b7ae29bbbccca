"""Kill -9 at any moment: the driver with all its processes, its Python workers, the server. Every row once, in order.

The judge is plain HTTP: source and copy are read back and compared message by message. `HEADWATER_KILL_ROUNDS` sets
how often the driver is killed (2 by default, 30 with --long); the seed is in the message of a failure.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serving import Server, serve
from tests.spark.processes import kill_group
from tests.spark.session import REPOSITORY, require_java, worker_environment
from tests.spark.streams import Streams

# Minutes each: real processes are started and killed. Run by `make test-long`.
pytestmark = pytest.mark.long

START_TIMEOUT_S = 300.0
FINISH_TIMEOUT_S = 240.0
FEED_PAUSE_S = 0.2
"""So that a slow machine, on which drivers take a minute to start, is not left with more than it can copy."""
SOURCES = ("one", "two", "three")
SERVER_SETTINGS: dict[str, Any] = {
    "DS_STORAGE__MODE": "file-durable",
    "DS_STORAGE__DATA_DIR": "data",
    "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "5",
}


class Job:
    """A running driver, in a process group of its own with the JVM and the Python workers."""

    def __init__(self, directory: Path, url: str, *, environment: dict[str, str] | None = None, **more: Any) -> None:
        job = {
            "url": url,
            "master": "local[2,20]",
            "scratch": str(directory / "scratch"),
            "checkpoint": str(directory / "checkpoint"),
            "source": {"streams": ",".join(SOURCES), "maxRowsPerBatch": "1000", "splitBytes": "30000"},
            "sink": {"maxRequestBytes": "4000"},
        } | more
        self._log = (directory / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.copy_job", json.dumps(job)],
            cwd=REPOSITORY,
            env=environment or os.environ | worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self._said = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line == b"running\n":
                self._said.set()

    def wait_until_running(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._said.wait(0.1):
            assert self.process.poll() is None, f"the driver ended with {self.process.returncode}"
            assert time.monotonic() < deadline, "the driver did not start"

    def kill_workers(self, rng: random.Random) -> int:
        """Kill some of the Python processes below the JVM; how many."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
            workers = [one for one in below if any("daemon" in word for word in one.cmdline())]
        except psutil.Error:
            return 0
        killed = 0
        for worker in workers:
            if rng.random() < 0.5:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
                    killed += 1
        return killed

    def kill(self) -> None:
        """Everything at once: SIGKILL to the whole group."""
        kill_group(self.process)
        self._listener.join(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


class RestartingServer:
    """A durable server that is killed and started again on its port and data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: Any = None
        self.server: Server | None = None
        self.port = 0
        self.kills = 0
        self.start()

    def start(self) -> None:
        self._running = serve(directory=self._directory, port=self.port, **SERVER_SETTINGS)
        self.server = self._running.__enter__()
        assert self.server is not None
        self.port = self.server.port

    def kill_and_restart(self, pause_s: float) -> None:
        assert self.server is not None
        self.server.kill()
        self.kills += 1
        time.sleep(pause_s)
        self.start()

    def stop(self) -> None:
        self._running.__exit__(None, None, None)


@contextmanager
def restarting_server(directory: Path) -> Iterator[RestartingServer]:
    directory.mkdir()
    server = RestartingServer(directory)
    try:
        yield server
    finally:
        server.stop()


class Feeder(threading.Thread):
    """Appends to the sources all the while, through every restart of the server, each message once."""

    def __init__(self, root: str, rng: random.Random) -> None:
        super().__init__(name="feeder", daemon=True)
        self._root = root
        self._rng = rng
        self._done = threading.Event()
        self.sent = dict.fromkeys(SOURCES, 0)
        self.trouble: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(timeout=10.0) as http:
                seq = 0
                while not self._done.is_set():
                    self._feed(http, seq)
                    seq += 1
                    time.sleep(FEED_PAUSE_S)
        except BaseException as error:
            self.trouble = error

    def stop(self) -> None:
        self._done.set()
        self.join(timeout=60)
        assert self.trouble is None, f"the feeder failed: {self.trouble!r}"

    def _feed(self, http: httpx.Client, seq: int) -> None:
        for source in SOURCES:
            first = self.sent[source]
            count = self._rng.randrange(1, 20)
            body = json.dumps([{"source": source, "n": n, "pad": "x" * (n % 60)} for n in range(first, first + count)])
            headers = {
                "Content-Type": "application/json",
                "Producer-Id": f"feeder-{source}",
                "Producer-Epoch": "0",
                "Producer-Seq": str(seq),
            }
            while True:
                try:
                    answer = http.post(f"{self._root}/{source}", content=body, headers=headers)
                    if answer.status_code < 300:
                        break
                    assert answer.status_code >= 500, answer.text
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
            self.sent[source] = first + count


def copies_are_complete(streams: Streams, sent: dict[str, int]) -> bool:
    for source, count in sent.items():
        if not streams.exists(f"copy-of-{source}") or len(streams.raw(f"copy-of-{source}")) < count:
            return False
    return True


def judge(streams: Streams, sent: dict[str, int], what: str) -> None:
    for source, count in sent.items():
        original, copy = streams.messages(source), streams.messages(f"copy-of-{source}")
        assert [one["n"] for one in original] == list(range(count)), f"the source itself is wrong; {what}"
        numbers = [one["n"] for one in copy]
        assert len(numbers) == len(set(numbers)), f"{source}: messages twice; {what}"
        assert set(numbers) == set(range(count)), f"{source}: messages lost; {what}"
        assert copy == original, f"{source}: out of order; {what}"


@pytest.mark.timeout(3600)
def test_kill_driver_workers_and_server(tmp_path: Path, long: bool) -> None:
    require_java()
    rounds = int(os.environ.get("HEADWATER_KILL_ROUNDS", "30" if long else "2"))
    seed = int(os.environ.get("HEADWATER_KILL_SEED", str(random.randrange(2**32))))
    rng = random.Random(seed)
    workers_killed = 0
    with restarting_server(tmp_path / "server") as server, httpx.Client(timeout=30.0) as http:
        streams = Streams(f"http://127.0.0.1:{server.port}/v1/stream", http)
        for source in SOURCES:
            streams.create(source)
        feeder = Feeder(streams.root, random.Random(seed + 1))
        feeder.start()
        try:
            for _ in range(rounds):
                job = Job(tmp_path, streams.root)
                try:
                    job.wait_until_running()
                    for _ in range(rng.randrange(1, 4)):
                        time.sleep(rng.uniform(0.5, 4.0))
                        if rng.random() < 0.5:
                            workers_killed += job.kill_workers(rng)
                        else:
                            server.kill_and_restart(rng.uniform(0.0, 1.0))
                finally:
                    job.kill()
        finally:
            feeder.stop()
        job = Job(tmp_path, streams.root)
        try:
            job.wait_until_running()
            deadline = time.monotonic() + FINISH_TIMEOUT_S
            while not copies_are_complete(streams, feeder.sent):
                log = (tmp_path / "driver.log").read_text()[-3000:]
                assert job.process.poll() is None, f"the last driver failed; seed {seed}:\n{log}"
                assert time.monotonic() < deadline, f"not everything was copied in {FINISH_TIMEOUT_S} s; seed {seed}"
                time.sleep(0.5)
        finally:
            job.kill()
        what = f"seed {seed}, {rounds} drivers, {server.kills} servers and {workers_killed} workers killed"
        judge(streams, feeder.sent, what)
        assert sum(feeder.sent.values()) > 100
