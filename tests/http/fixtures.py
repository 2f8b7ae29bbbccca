"""New streams of the shared server, for the directories whose `client` is connected to it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from tests.http.protocol import Stream


@pytest.fixture
def stream(client: httpx.Client, stream_name: Callable[[], str]) -> Stream:
    """A text stream that no other test uses, not yet created."""
    return Stream(client, stream_name())


@pytest.fixture
def json_stream(client: httpx.Client, stream_name: Callable[[], str]) -> Stream:
    """A JSON stream that no other test uses, not yet created."""
    return Stream(client, stream_name(), "application/json")
