"""Fixtures of the Spark tests: a server without size limits, the official Node server, and long timeouts.

Invariant: missing software fails the tests with a message that says how to install it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import Server
from tests.shared_servers import shared_server
from tests.spark.session import HOW_TO_INSTALL, REPOSITORY
from tests.vitest_run import node, require_npm_packages

try:
    import pyspark
except ImportError as error:
    raise RuntimeError(f"PySpark is missing. {HOW_TO_INSTALL}") from error

assert pyspark.__version__ == "4.3.0", f"PySpark is {pyspark.__version__}, but 4.3.0 is pinned. {HOW_TO_INSTALL}"

from tests.spark.streams import ROOMY, Streams  # noqa: E402 - what is missing must be said first

SPARK_TEST_TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set long timeouts: starting Spark, and the first use of each of its parts, is slow on a busy machine."""
    folder = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(folder) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def roomy_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with shared_server(request.config, **ROOMY) as server:
        yield server


@pytest.fixture
def streams(roomy_server: Server) -> Iterator[Streams]:
    with httpx.Client(timeout=60) as http:
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
    with httpx.Client(timeout=60) as http:
        yield Streams(node_url, http)
