"""What the protocol tests share: one client, and fresh streams on the shared server."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.http.bucketed import Bucket, BucketStream
from tests.http.protocol import Stream
from tests.serving import Server

_bucket_numbers = itertools.count()


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


@pytest.fixture
def bucket_id(request: pytest.FixtureRequest) -> str:
    """A bucket id that no other test uses."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40]
    return f"{stem}-{next(_bucket_numbers)}"


@pytest.fixture
def bucket(client: httpx.Client, bucket_id: str) -> Bucket:
    """A bucket of the test's own on the shared server."""
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
