"""Fixtures of the protocol tests: one client, and new streams on the shared server."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.http.bucketed import Bucket, BucketStream
from tests.http.fixtures import json_stream, stream
from tests.http.protocol import Stream, stream_on
from tests.serving import Server, serve

LONG_POLL_S = 10_000
"""How long the long-polls of `moving_server` wait."""

__all__ = ["json_stream", "stream"]

_bucket_numbers = itertools.count()


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[httpx.Client]:
    """One client for the whole run: creating one loads certificates, which takes longer than most tests."""
    with httpx.Client(base_url=server.url, verify=False) as http:
        yield http


@pytest.fixture(scope="session")
def moving_server() -> Iterator[Server]:
    """A shared server with a manual clock; moving it affects all streams on it."""
    with serve(
        moving_time=True,
        DS_STORAGE__MODE="memory",
        DS_LIMITS__MAX_MEMORY_BYTES=str(2**29),
        DS_SERVER__IDLE_TIMEOUT_SECS="600000",
        DS_SERVER__LONG_POLL_TIMEOUT_SECS=str(LONG_POLL_S),
    ) as running:
        yield running


@pytest.fixture(scope="session")
def moving_client(moving_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=moving_server.url, verify=False) as http:
        yield http


@pytest.fixture(scope="session")
def patient() -> Iterator[Server]:
    """A server whose live readers wait longer than any test, so an answer can only be a wake-up."""
    with serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="3600", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as running:
        yield running


@pytest.fixture
def patient_stream(patient: Server, stream_name: Callable[[], str]) -> Iterator[Stream]:
    """A text stream on that server, not yet created."""
    with stream_on(patient, stream_name()) as stream:
        yield stream


@pytest.fixture
def bucket_id(request: pytest.FixtureRequest) -> str:
    """A bucket id that no other test uses."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40]
    return f"{stem}-{next(_bucket_numbers)}"


@pytest.fixture
def bucket(client: httpx.Client, bucket_id: str) -> Bucket:
    """A new bucket on the shared server."""
    return Bucket(client, bucket_id).create()


@pytest.fixture
def log_stream(bucket: Bucket) -> BucketStream:
    """A text stream in a bucket, with the messages `one`, `two` and `three`."""
    stream = bucket.stream("log").create()
    for text in ("one", "two", "three"):
        stream.append(text)
    return stream


@pytest.fixture(params=["file-fast", "file-durable", "acid"])
def persistent_mode(request: pytest.FixtureRequest) -> str:
    """Every storage mode that survives a restart of the server."""
    mode: str = request.param
    return mode
