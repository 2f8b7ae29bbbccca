"""What the Spark tests share: one session for the whole run, a server with room, and the official Node server.

Invariant: what is missing fails the tests and says how to get it; and no JVM is left when the run is over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.serving import Server
from tests.vitest_run import node, require_npm_packages

HOW_TO_INSTALL = (
    "Run `make test`, which installs everything, or by hand: `pip install --require-hashes -r requirements/stack.txt`"
    " and a Java 17 or newer (on Debian: apt-get install openjdk-17-jre-headless)."
)

try:
    import pyspark
except ImportError as error:
    raise RuntimeError(f"PySpark is missing. {HOW_TO_INSTALL}") from error

assert pyspark.__version__ == "4.3.0", f"PySpark is {pyspark.__version__}, but 4.3.0 is pinned. {HOW_TO_INSTALL}"

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

from tests.spark.streams import Streams, roomy  # noqa: E402 - what is missing must be said first

REPOSITORY = Path(__file__).resolve().parent.parent.parent
JVM_STOP_TIMEOUT_S = 20.0
SPARK_TEST_TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starting Spark, and the first use of each of its parts, takes long on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TEST_TIMEOUT_S))


def require_java() -> None:
    home = os.environ.get("JAVA_HOME")
    found = (home and Path(home, "bin", "java").exists()) or shutil.which("java")
    assert found, f"Java is missing. {HOW_TO_INSTALL}"


def worker_environment() -> dict[str, str]:
    """What Spark's processes need to run this checkout, whichever Python runs the tests."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """local[2] with the recommended settings, and two attempts of a task; started once, as that alone takes seconds."""
    require_java()
    os.environ.update(worker_environment())
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    from headwater.spark import configure

    scratch = tmp_path_factory.mktemp("spark")
    builder = (
        SparkSession.Builder()
        .master("local[2,2]")
        .appName("headwater-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.local.dir", str(scratch / "local"))
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        .config("spark.ui.showConsoleProgress", "false")
    )
    session = configure(builder).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    gateway = SparkContext._gateway
    session.stop()
    assert gateway is not None
    gateway.shutdown()
    process: subprocess.Popen[bytes] = gateway.proc
    assert process.stdin is not None
    process.stdin.close()
    process.wait(timeout=JVM_STOP_TIMEOUT_S)


@pytest.fixture(scope="session")
def roomy_server() -> Iterator[Server]:
    with roomy() as server:
        yield server


@pytest.fixture
def streams(roomy_server: Server) -> Iterator[Streams]:
    with httpx.Client(timeout=30.0) as http:
        yield Streams(f"{roomy_server.url}/v1/stream", http)


@pytest.fixture(scope="session")
def node_url() -> Iterator[str]:
    """The official Node server, in memory."""
    require_npm_packages()
    with subprocess.Popen(
        [node(), str(REPOSITORY / "bench" / "node_server.mjs"), "--long-poll-timeout-ms", "2000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline().decode()
            assert line.startswith("listening on "), f"the official Node server did not start: {line!r}"
            yield line.removeprefix("listening on ").strip() + "/v1/stream"
        finally:
            child.terminate()


@pytest.fixture
def node_streams(node_url: str) -> Iterator[Streams]:
    with httpx.Client(timeout=30.0) as http:
        yield Streams(node_url, http)
