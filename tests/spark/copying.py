"""A separate driver that copies streams (`tests.spark.copy_job`), and a check of its copies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.spark.processes import kill_group
from tests.spark.session import REPOSITORY
from tests.spark.streams import Streams

START_TIMEOUT_S = 300.0
FINISH_TIMEOUT_S = 240.0


class CopyJob:
    """A running driver, in a separate process group with the JVM and the Python workers."""

    def __init__(self, directory: Path, url: str, environment: dict[str, str], **more: Any) -> None:
        job = {
            "url": url,
            "scratch": str(directory / "scratch"),
            "checkpoint": str(directory / "checkpoint"),
            "sink": {"maxRequestBytes": "4000"},
        } | more
        self._log = (directory / "driver.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.copy_job", json.dumps(job)],
            cwd=REPOSITORY,
            env=environment,
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

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        kill_group(self.process)
        self._listener.join(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def copies_are_complete(streams: Streams, sent: dict[str, int]) -> bool:
    for source, count in sent.items():
        if not streams.exists(f"copy-of-{source}") or len(streams.raw(f"copy-of-{source}")) < count:
            return False
    return True
