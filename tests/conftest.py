"""What every test may use: one shared server in memory mode, a fresh stream name, and the `--long` switch."""

from __future__ import annotations

import gc
import itertools
import re
import signal
import time
from collections.abc import Callable, Generator, Iterator

import httpx
import psutil
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

from tests.serving import Server, default_workers
from tests.shared_servers import shared_server
from tests.waiting import wait_until

pytest_plugins = ["tests.browser", "tests.distribution", "tests.spark.session"]

# The client's own five seconds are too few for an answer on a busy machine.
DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.write = 60.0

# Property tests have no deadline per example: the machine may be busy with something else.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

_counter = itertools.count()
SHARED_SERVERS = {"server", "ui_server", "roomy_server"}
"""The fixtures that are a cluster with --cluster."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help="also run tests marked `long`, at full size")
    parser.addoption("--workers", default="", metavar="N", help="run the servers of the tests with N workers")
    parser.addoption("--cluster", action="store_true", help="run the tests of shared servers on three nodes")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with SIGINT ignored, and so would every program that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    default_workers[:] = [workers] if (workers := config.getoption("--workers")) else []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collections, and exempt them from later ones: they stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What does not run is deselected (and counted as such), never reported as skipped.

    That is `long` tests without --long; with --cluster or --workers, `one_process` tests; with --cluster, those that
    use no shared server.
    """
    with_cluster, with_long = config.getoption("--cluster"), config.getoption("--long")
    with_several = with_cluster or config.getoption("--workers") not in ("", "1")

    def runs(item: pytest.Item) -> bool:
        used = getattr(item, "fixturenames", ())
        if with_cluster and SHARED_SERVERS.isdisjoint(used):
            return False
        if with_several and item.get_closest_marker("one_process"):
            return False
        return bool(with_long) or item.get_closest_marker("long") is None

    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if runs(item)]


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """True under `make test-long`: choose the heavier size of the same test."""
    return bool(request.config.getoption("--long"))


def cpu_share(pid: int, seconds: float = 0.5) -> float:
    """How much of a core a process uses. Other programs on the machine do not raise it."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server shared by the whole run: memory mode, short waits. Use your own stream names on it.

    When all tests have used it, it must become idle: a timer that fires without end would show here.
    """
    with shared_server(
        request.config,
        DS_STORAGE__MODE="memory",
        DS_LIMITS__MAX_MEMORY_BYTES=str(2**29),
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="1",
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="5",
        DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS="true",
    ) as running:
        yield running
        wait_until(lambda: cpu_share(running.pid) < 0.2, what="no work in a server that no test uses any more")


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """An HTTP client whose base address is the shared server."""
    with httpx.Client(base_url=server.url) as http:
        yield http


@pytest.fixture
def stream_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Gives stream names that no other test uses, readable in a log."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")

    def fresh() -> str:
        return f"{stem}-{next(_counter)}"

    return fresh
