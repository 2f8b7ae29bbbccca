"""The Spark session of a test run, and the environment of its processes.

It is a plugin of the whole suite, because a fixture that two directories import becomes two fixtures, and each would
stop the session that both use.

Invariant: no JVM remains after the run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOW_TO_INSTALL = (
    "Run `make test`, which installs everything, or by hand: `pip install --require-hashes -r requirements/stack.txt`"
    " and a Java 17 or newer (on Debian: apt-get install openjdk-17-jre-headless)."
)

REPOSITORY = Path(__file__).resolve().parent.parent.parent
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For JVMs that live for seconds: they start faster without the second compiler and with one garbage collector."""
JVM_STOP_TIMEOUT_S = 120.0
LOW_DESCRIPTORS = 32
"""py4j's callback server, which `foreachBatch` needs, uses select(), which takes no descriptor above 1023."""

_reserved: list[int] = []


def use_test_environment() -> None:
    """Set the options of every JVM that this process and its children start for Spark.

    Not in a configuration directory: with one, the JVMs could not use the archive of classes.
    """
    os.environ.pop("SPARK_CONF_DIR", None)
    os.environ["SPARK_SUBMIT_OPTS"] = JAVA_OPTIONS


def pytest_configure() -> None:
    use_test_environment()
    _reserved.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(LOW_DESCRIPTORS))


def require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    found = (home and Path(home, "bin", "java").exists()) or shutil.which("java")
    assert found, f"Java is missing. {HOW_TO_INSTALL}"


def worker_environment() -> dict[str, str]:
    """The environment that Spark's processes need to run this checkout with the Python of the tests."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_SUBMIT_OPTS": JAVA_OPTIONS,
    }


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on local[2] with the recommended settings and two attempts per task; started once, as that is slow."""
    require_java()
    os.environ.update(worker_environment())
    from pyspark import SparkContext

    from headwater.spark.session import start_session

    scratch = tmp_path_factory.mktemp("spark")
    conf = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.local.dir": str(scratch / "local"),
        "spark.ui.showConsoleProgress": "false",
    }
    while _reserved:
        os.close(_reserved.pop())
    session = start_session("headwater-tests", "local[2,2]", conf)
    session.sparkContext.setLogLevel("ERROR")
    gateway = SparkContext._gateway
    assert gateway is not None
    yield session
    session.stop()
    gateway.shutdown()
    process: subprocess.Popen[bytes] = gateway.proc
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=JVM_STOP_TIMEOUT_S)
