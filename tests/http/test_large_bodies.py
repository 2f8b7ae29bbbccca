"""Large bodies of known length, which bypass the HTTP parser: content, boundaries and limits."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headwater.http.parser import BULK_AHEAD, BULK_MIN_BYTES, BULK_STEP_BYTES
from tests.http.raw import RawConnection, encode
from tests.http.watching import samples, wait_for_sample
from tests.serving import Server, serve
from tests.waiting import wait_until

TEXT = {"Content-Type": "text/plain"}


@pytest.fixture(scope="module")
def large() -> Iterator[Server]:
    with serve(DS_LIMITS__MAX_MEMORY_BYTES=str(2**29), DS_LIMITS__MAX_STREAM_BYTES="0") as running:
        yield running


def content(connection: RawConnection, name: str) -> bytes:
    found = b""
    offset = "-1"
    while True:
        answer = connection.request("GET", f"/v1/stream/{name}?offset={offset}")
        found += answer.body
        if answer.header("stream-up-to-date") == "true":
            return found
        offset = str(answer.header("stream-next-offset"))


@pytest.mark.parametrize(
    "size",
    [
        BULK_MIN_BYTES + 10_000,
        1024 * 1024,
        BULK_STEP_BYTES + 1,
        2 * BULK_STEP_BYTES + 300_000,
    ],
)
def test_large_body_between_small_requests_is_received_completely(large: Server, size: int) -> None:
    """All in one write: the end of the large body is followed by the next request at once."""
    body = random.Random(size).randbytes(size)
    with RawConnection(large) as connection:
        name = f"whole-{size}"
        connection.request("PUT", f"/v1/stream/{name}", headers=TEXT)
        appends = [b"before", body, b"after", body, b"end"]
        connection.send(b"".join(encode("POST", f"/v1/stream/{name}", headers=TEXT, body=each) for each in appends))
        for _ in appends:
            assert connection.response().status == 204
        assert content(connection, name) == b"".join(appends)


@pytest.mark.parametrize("first", [1, 5_000, BULK_MIN_BYTES // (BULK_AHEAD - 1) + 1, 100_000])
def test_a_body_may_pause_anywhere(large: Server, first: int) -> None:
    body = random.Random(first).randbytes(700_000)
    with RawConnection(large) as connection:
        name = f"paused-{first}"
        connection.request("PUT", f"/v1/stream/{name}", headers=TEXT)
        head = encode("POST", f"/v1/stream/{name}", headers=TEXT, body=body)[: -len(body)]
        connection.send(head)
        at = 0
        for step in (first, 150_000, 1, 200_000):
            connection.send(body[at : at + step])
            at += step
            time.sleep(0.02)  # Part of what is tested: the server sees the pieces apart.
        connection.send(body[at:] + encode("POST", f"/v1/stream/{name}", headers=TEXT, body=b"!"))
        assert connection.response().status == 204
        assert connection.response().status == 204
        assert content(connection, name) == body + b"!"


def test_incomplete_body_is_refused_and_its_memory_is_freed() -> None:
    with serve(moving_time=True, DS_SERVER__READ_TIMEOUT_SECS="1000") as server:
        with RawConnection(server) as connection:
            connection.request("PUT", "/v1/stream/stopped", headers=TEXT)
            sent = encode("POST", "/v1/stream/stopped", headers=TEXT, body=bytes(5_000_000))[:1_000_000]
            connection.send(sent)
            wait_until(lambda: samples(server)["headwater_request_body_bytes"] > 0, what="the body")
            server.pass_time(1001)
            assert connection.response().status == 408
            with suppress(OSError):
                # What still arrives of it is discarded until the connection is closed.
                connection.send(bytes(100_000))
        for _ in range(3):
            with RawConnection(server) as connection:
                connection.send(sent)  # And the client goes away in the middle.
        wait_for_sample(server, "request_body_bytes", 0)
        with RawConnection(server) as connection:
            connection.send(encode("POST", "/v1/stream/stopped", headers=TEXT, body=b"x" * 300_000))
            assert connection.response().status == 204
            assert content(connection, "stopped") == b"x" * 300_000


def test_http_1_0_closes_after_a_large_body(large: Server) -> None:
    with RawConnection(large) as connection:
        connection.request("PUT", "/v1/stream/old", headers=TEXT)
        answer = connection.request("POST", "/v1/stream/old", headers=TEXT, body=bytes(400_000), version="1.0")
        assert answer.status == 204
        assert connection.socket.recv(1) == b""
