"""Spark processes for tests: a standalone cluster, a Connect server, and the package installed from a wheel.

Invariant: processes that are started here end with their `with` block, including their children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pyspark

from tests.ports import free_port
from tests.spark.session import JAVA_OPTIONS, REPOSITORY, require_java, worker_environment
from tests.waiting import wait_until

SPARK_HOME = Path(pyspark.__file__).parent
START_TIMEOUT_S = 300.0


def environment(package: Path) -> dict[str, str]:
    """Only `package` (and the tests) on the path, as on a node where a wheel was installed."""
    paths = os.pathsep.join([str(package), str(REPOSITORY)])
    return os.environ | worker_environment() | {"PYTHONPATH": paths, "SPARK_HOME": str(SPARK_HOME)}


def installed_wheel(directory: Path) -> Path:
    """Build the wheel of this checkout and install it into a separate directory."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index"]
    wheels = directory / "wheels"
    subprocess.run(
        [*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(wheels), str(REPOSITORY)],
        check=True,
        timeout=120,
    )
    (wheel,) = wheels.glob("*.whl")
    target = directory / "installed"
    subprocess.run([*pip, "install", *offline, "--target", str(target), str(wheel)], check=True, timeout=120)
    assert (target / "pyspark_headwater.py").exists(), "the wheel lacks the module that Spark looks for"
    return target


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a process group, and to its Python daemons, which are in separate groups."""
    members = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(timeout=60)


def kill_tree(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


@contextmanager
def running(
    command: Sequence[str], env: dict[str, str], log: Path, is_ready: Callable[[], bool]
) -> Iterator[psutil.Popen]:
    with log.open("wb") as output:
        process = psutil.Popen(
            command, env=env, cwd=log.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:

        def look() -> bool:
            assert process.poll() is None, f"{command[1:3]} ended:\n{log.read_text()[-3000:]}"
            return is_ready()

        wait_until(look, what=f"{command[1:3]} is ready", limit_s=START_TIMEOUT_S, every_s=0.2)
        yield process
    finally:
        kill_tree(process)
        process.wait(timeout=60)


@dataclass(frozen=True, slots=True)
class Cluster:
    master: str
    workers: tuple[psutil.Popen, ...]

    def executors(self) -> list[psutil.Process]:
        """The JVMs that run tasks."""
        return [
            process
            for worker in self.workers
            for process in worker.children(recursive=True)
            if "java" in process.name() and any("CoarseGrainedExecutorBackend" in word for word in process.cmdline())
        ]


@contextmanager
def standalone_cluster(directory: Path, package: Path) -> Iterator[Cluster]:
    """A master and two workers of one core each, from the PySpark package.

    Each worker has its own address, because Spark starts a speculative attempt only on another host.
    """
    require_java()
    port, page = free_port(), free_port()
    env = environment(package) | {
        "SPARK_WORKER_DIR": str(directory / "work"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
    }
    spark_class = str(SPARK_HOME / "bin" / "spark-class")
    master = f"spark://127.0.0.1:{port}"

    def alive_workers() -> int:
        try:
            return int(httpx.get(f"http://127.0.0.1:{page}/json/", timeout=60).json()["aliveworkers"])
        except (httpx.HTTPError, ValueError, KeyError):
            return -1

    with contextlib.ExitStack() as stack:
        stack.enter_context(
            running(
                [
                    *(spark_class, "org.apache.spark.deploy.master.Master"),
                    *("--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page)),
                ],
                env,
                directory / "master.log",
                lambda: alive_workers() >= 0,
            )
        )
        workers = tuple(
            stack.enter_context(
                running(
                    [
                        *(spark_class, "org.apache.spark.deploy.worker.Worker"),
                        *("--host", f"127.0.0.{number + 1}", "--webui-port", "0", "-c", "1", "-m", "1g", master),
                    ],
                    env,
                    directory / f"worker-{number}.log",
                    lambda number=number: alive_workers() > number,  # type: ignore[misc]
                )
            )
            for number in range(2)
        )
        yield Cluster(master, workers)


@contextmanager
def connect_server(directory: Path, package: Path) -> Iterator[str]:
    """Run a Spark Connect server on local[2]; yields its address."""
    require_java()
    port = free_port()

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    command = [
        str(SPARK_HOME / "bin" / "spark-submit"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--master", "local[2]"),
        *("--conf", f"spark.connect.grpc.binding.port={port}"),
        *("--conf", "spark.connect.grpc.binding.address=127.0.0.1"),
        *("--conf", "spark.ui.enabled=false"),
        *("--conf", f"spark.local.dir={directory}"),
        *("--conf", f"spark.sql.warehouse.dir={directory}/warehouse"),
    ]
    with running(command, environment(package), directory / "connect.log", listens):
        yield f"sc://127.0.0.1:{port}"
