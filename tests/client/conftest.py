"""Fixtures of the client's tests: the official Node server, and the two APIs of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.servers import official_node

from tests.client.faces import ASYNC, SYNC


@pytest.fixture(scope="session")
def node() -> Iterator[str]:
    """The URL of the official Node server, shared by the whole run. Tests use their own stream names."""
    with official_node() as running:
        yield running.url


@pytest.fixture(scope="module", params=[SYNC, ASYNC])
def face(request: pytest.FixtureRequest) -> str:
    """The API that a test uses; each test runs with both."""
    return str(request.param)
