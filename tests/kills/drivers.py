"""A driver of a trial: a separate process group with the JVM and the Python workers, to be killed and suspended."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import psutil

from tests.ports import free_port
from tests.spark.processes import kill_group
from tests.spark.session import REPOSITORY, require_java, worker_environment

SHARE_OF_WORKERS = 0.4


class Driver:
    """`directory` has the settings file, checkpoints and log: drivers with the same directory share checkpoints."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        require_java()
        port = free_port()
        self._endpoint = f"http://127.0.0.1:{port}"
        given = {name: value for name, value in os.environ.items() if not name.startswith("DS_")}
        with (directory / "driver.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kills.application", str(directory / "pipeline.toml")],
                cwd=REPOSITORY,
                env=given | worker_environment() | {"DS_PIPELINE__METRICS_PORT": str(port)} | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait_until_ready(self, limit_s: float) -> bool:
        """Wait until every job runs; False if that takes longer, or the driver exits before."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and not self.has_ended:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self._endpoint}/readyz", timeout=5.0).status_code == 200:
                    return True
            time.sleep(0.2)
        return False

    def kill_workers(self, rng: random.Random) -> int:
        """Kill some of Spark's Python processes, which plan and run tasks; return how many."""
        killed = 0
        for process in self._below():
            with suppress(psutil.Error):
                is_python = any("pyspark" in word or "prefork" in word for word in process.cmdline())
                is_worker = is_python and "java" not in process.name()
                if is_worker and rng.random() < SHARE_OF_WORKERS:
                    process.kill()
                    killed += 1
        return killed

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver and all its descendants."""
        with suppress(psutil.Error):
            for member in [psutil.Process(self.process.pid), *self._below()]:
                with suppress(psutil.NoSuchProcess):
                    member.send_signal(number)

    def kill(self) -> None:
        kill_group(self.process)

    def _below(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []
