"""The servers of these tests: one for each of the two storage modes, shared by the whole run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx
import pytest

from tests.http.bucketed import Bucket
from tests.http.fixtures import json_stream, stream
from tests.serving import Server, serve

MODES = ("memory", "file-durable")

__all__ = ["json_stream", "stream"]

_bucket_numbers = itertools.count()


@pytest.fixture(scope="session", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """The storage modes that each test runs in."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def server(mode: str) -> Iterator[Server]:
    """A shared server in this mode, with short timeouts. Tests use their own stream names."""
    with serve(
        DS_STORAGE__MODE=mode,
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="1",
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="5",
    ) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as http:
        yield http


@pytest.fixture
def bucket(client: httpx.Client) -> Bucket:
    """A bucket that no other test uses."""
    return Bucket(client, f"conformance-{next(_bucket_numbers)}").create()
