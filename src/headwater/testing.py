"""A real server for tests of programs that use streams: in the test process, on a free port, in memory.

In a `conftest.py`:

    pytest_plugins = ["headwater.testing"]

A test can then use the fixture `headwater_server`, one server for the whole run, or `headwater_stream`, a new stream on
it. Without pytest, use the context manager `running_server()`.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.client import Stream
from headwater.server import Server

_numbers = itertools.count()


@contextmanager
def running_server(
    data_dir: str | Path | None = None, *, port: int = 0, settings: Mapping[str, Any] | None = None
) -> Iterator[Server]:
    """Run a server on its own event loop in a thread for the duration of the block. The arguments are `Server`'s."""
    server = Server(data_dir, port=port, settings=settings)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="headwater-server", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result()
        try:
            yield server
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="session")
def headwater_server() -> Iterator[Server]:
    """A server in memory, shared by all tests of the run."""
    with running_server(settings={"server.long_poll_timeout_secs": 1}) as server:
        yield server


@pytest.fixture
def headwater_stream(headwater_server: Server, request: pytest.FixtureRequest) -> Iterator[Stream]:
    """A new JSON stream that no other test uses."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name).strip("-")
    with Stream(headwater_server.stream_url(f"tests/{name}-{next(_numbers)}")) as stream:
        stream.create()
        yield stream
