"""What the protocol tests share: one client, and fresh streams on the shared server."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.http.protocol import Stream
from tests.serving import Server


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    """One for the whole run: making a client loads certificates, which takes longer than most tests."""
    with httpx.Client(base_url=server.url, timeout=10.0, verify=False) as http:
        yield http


@pytest.fixture
def stream(client: httpx.Client, stream_name: Callable[[], str]) -> Stream:
    """A text stream that no other test uses, not yet created."""
    return Stream(client, stream_name())


@pytest.fixture
def json_stream(client: httpx.Client, stream_name: Callable[[], str]) -> Stream:
    """The same for JSON."""
    return Stream(client, stream_name(), "application/json")
