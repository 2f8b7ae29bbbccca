"""Limits on stored data: requests beyond them are 413, and expired or deleted data is freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem, offset, producer
from tests.http.watching import wait_for_sample
from tests.serving import Server, serve

STREAM_BYTES = 100_000
MEMORY_BYTES = 300_000


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    """A separate server with 100 kB per stream, 300 kB in total and five producers per stream."""
    with limited() as server, httpx.Client(base_url=server.url, verify=False) as client:
        yield client


def limited(**more: Any) -> AbstractContextManager[Server]:
    return serve(
        DS_LIMITS__MAX_STREAM_BYTES=str(STREAM_BYTES),
        DS_LIMITS__MAX_MEMORY_BYTES=str(MEMORY_BYTES),
        DS_LIMITS__MAX_PRODUCERS_PER_STREAM="5",
        **more,
    )


def fill(http: httpx.Client, *names: str) -> list[Stream]:
    """Create streams with 90 kB each."""
    return [Stream(http, name).create(b"x" * 90_000) for name in names]


def test_a_stream_over_its_limit_is_413_and_unchanged(http: httpx.Client) -> None:
    stream = Stream(http, "full").create(b"x" * 60_000)
    assert_problem(stream.post(b"y" * 50_000), 413, "stream_full")
    assert stream.tail() == offset(1, 60_000)
    stream.append(b"y" * 40_000)
    assert_problem(stream.post(b"z"), 413, "stream_full")
    # A full stream can still be read and closed.
    assert stream.content() == b"x" * 60_000 + b"y" * 40_000
    assert stream.close().status_code == 204


def test_initial_content_over_the_limit_creates_nothing(http: httpx.Client) -> None:
    stream = Stream(http, "too-large")
    assert_problem(stream.put(b"x" * (STREAM_BYTES + 1)), 413, "stream_full")
    assert not stream.exists()
    stream.create(b"x" * STREAM_BYTES)


def test_a_refused_append_changes_neither_producer_nor_sequence_nor_closure(http: httpx.Client) -> None:
    stream = Stream(http, "refused").create(b"x" * 90_000)
    headers = {**producer("p", 0, 0), "Stream-Seq": "1"}
    assert_problem(stream.close(b"y" * 20_000, headers=headers), 413, "stream_full")
    assert "stream-closed" not in stream.head().headers
    assert stream.post(b"y" * 10_000, headers=headers).status_code == 200


def test_memory_over_the_limit_is_413_for_every_stream(http: httpx.Client) -> None:
    fill(http, "a", "b", "c")
    other = Stream(http, "d")
    assert_problem(other.put(b"x" * 40_000), 413, "memory_full")
    assert not other.exists()
    other.create(b"x" * 10_000)
    assert_problem(other.post(b"x" * 40_000), 413, "memory_full")
    assert other.content() == b"x" * 10_000


def test_t10_deletion_frees_the_bytes(http: httpx.Client) -> None:
    for _ in range(20):
        for stream in fill(http, "a", "b", "c"):
            assert stream.delete().status_code == 204
    fill(http, "a", "b", "c")


def test_t10_expiry_frees_the_bytes_without_a_request() -> None:
    with limited(moving_time=True) as server, httpx.Client(base_url=server.url, verify=False) as http:
        for round_number in range(3):
            for name in ("a", "b", "c"):
                Stream(http, name).create(b"x" * 90_000, headers={"Stream-TTL": "3600"})
            assert_problem(Stream(http, "late").put(b"x" * 90_000), 413, "memory_full")
            server.pass_time(3601)
            wait_for_sample(server, "streams", 0)
            Stream(http, f"late-{round_number}").create(b"x" * 90_000)
            Stream(http, f"late-{round_number}").delete()


def test_t10_refused_requests_do_not_count(http: httpx.Client) -> None:
    streams = fill(http, "a", "b", "c")
    json_stream = Stream(http, "json", "application/json").create()
    for _ in range(50):
        assert streams[0].post(b"x" * 50_000).status_code == 413
        assert json_stream.post(b"{" + b"x" * 1000).status_code == 400
        assert Stream(http, "e").put(b"x" * 50_000).status_code == 413
    streams[0].delete()
    Stream(http, "e").create(b"x" * 90_000)


def test_more_producers_than_allowed_are_413(http: httpx.Client) -> None:
    stream = Stream(http, "producers").create()
    for number in range(5):
        stream.append("x", headers=producer(f"p{number}", 0, 0))
    assert stream.post("x", headers=producer("one too many", 0, 0)).status_code == 413
    assert stream.content() == b"xxxxx"
    stream.append("x", headers=producer("p0", 0, 1))
    stream.append("x")
