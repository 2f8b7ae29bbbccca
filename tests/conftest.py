"""What every test may use: one shared server in memory mode, a fresh stream name, and the `--long` switch."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.serving import Server, serve

pytest_plugins = ["tests.spark.session"]

# The client's own five seconds are too few for an answer on a busy machine.
DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.write = 60.0

_counter = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", default=False, help="also run tests marked `long`, at full size")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --long, `long` tests are deselected (and counted as such), never reported as skipped."""
    if config.getoption("--long"):
        return
    kept = [item for item in items if item.get_closest_marker("long") is None]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.fixture(scope="session")
def long(request: pytest.FixtureRequest) -> bool:
    """True under `make test-long`: choose the heavier size of the same test."""
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server shared by the whole run: memory mode, short waits. Use your own stream names on it."""
    with serve(
        DS_STORAGE__MODE="memory",
        DS_LIMITS__MAX_MEMORY_BYTES=str(2**29),
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="1",
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="5",
        DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS="true",
    ) as running:
        yield running


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
