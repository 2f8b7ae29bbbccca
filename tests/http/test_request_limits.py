"""Limits on the size and duration of a request, enforced while it is read."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from tests.http.protocol import Stream, stream_on
from tests.http.raw import RawConnection, chunked, connect, encode
from tests.http.watching import samples, wait_for_live_readers, wait_for_sample
from tests.serving import Server, serve
from tests.waiting import wait_until

TEXT = {"Content-Type": "text/plain"}
CHUNKED = {**TEXT, "Transfer-Encoding": "chunked"}
BODY_BYTES = 10_000
HEADER_BYTES = 4_096
URL_BYTES = 1_024
READ_S, IDLE_S, WRITE_S, POLL_S = 1000, 2000, 3000, 8000


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """A server with small limits and a manual clock."""
    with serve(
        moving_time=True,
        DS_HTTP__MAX_BODY_BYTES=str(BODY_BYTES),
        DS_HTTP__MAX_HEADER_BYTES=str(HEADER_BYTES),
        DS_HTTP__MAX_URL_BYTES=str(URL_BYTES),
        DS_SERVER__READ_TIMEOUT_SECS=str(READ_S),
        DS_SERVER__IDLE_TIMEOUT_SECS=str(IDLE_S),
        DS_SERVER__WRITE_TIMEOUT_SECS=str(WRITE_S),
        DS_SERVER__LONG_POLL_TIMEOUT_SECS=str(POLL_S),
    ) as running:
        yield running


@pytest.fixture
def stream(strict: Server, stream_name: Callable[[], str]) -> Iterator[Stream]:
    with stream_on(strict, stream_name()) as one:
        yield one


def send_slowly(server: Server, connection: RawConnection, data: bytes) -> None:
    """Send one byte at a time, ten within the time for a request, until the server ends the connection."""
    for byte in data[:25]:
        try:
            connection.send(bytes([byte]))
        except OSError:
            return
        server.pass_time(READ_S / 10)


def test_body_of_exactly_the_limit_is_accepted(stream: Stream) -> None:
    stream.create()
    stream.append(b"x" * BODY_BYTES)
    assert stream.content() == b"x" * BODY_BYTES


def test_t31_a_body_over_the_limit_is_413_before_it_is_sent(strict: Server, stream: Stream) -> None:
    stream.create()
    with connect(strict) as connection:
        connection.send(encode("POST", stream.path, headers={**TEXT, "Content-Length": str(BODY_BYTES + 1)}))
        answer = connection.response()
        assert answer.status == 413
        assert b'"payload_too_large"' in answer.body
        assert connection.ends()
    assert stream.content() == b""


def test_t31_expect_100_continue_with_too_large_a_body_is_413_without_100(strict: Server, stream: Stream) -> None:
    stream.create()
    headers = {**TEXT, "Content-Length": str(BODY_BYTES * 100), "Expect": "100-continue"}
    with connect(strict) as connection:
        connection.send(encode("POST", stream.path, headers=headers))
        assert connection.response().status == 413


def test_t31_an_endless_chunked_body_is_413_while_it_is_read(strict: Server, stream: Stream) -> None:
    stream.create()
    with connect(strict) as connection:
        connection.send(encode("POST", stream.path, headers=CHUNKED))
        piece = b"%x\r\n%s\r\n" % (1000, b"x" * 1000)
        sent = 0
        with suppress(OSError):
            # No more than this, so that a server that reads on does not answer.
            while sent < 40_000 and connection.quiet(for_secs=0.01):
                connection.send(piece)
                sent += 1000
        assert connection.response().status == 413
        assert sent >= BODY_BYTES
    assert stream.content() == b""


def test_a_chunked_body_may_be_many_small_chunks(stream: Stream, strict: Server) -> None:
    stream.create()
    with connect(strict) as connection:
        answer = connection.request("POST", stream.path, headers=CHUNKED, body=chunked(*[b"x"] * 5_000))
        assert answer.status == 204
    assert stream.content() == b"x" * 5_000


def test_a_client_that_sends_all_of_too_large_a_body_can_read_the_413(strict: Server, stream: Stream) -> None:
    """The answer must not be lost in a connection reset while the client is still sending."""
    stream.create()
    for _ in range(5):
        with connect(strict) as connection:
            with suppress(OSError):
                connection.send(encode("POST", stream.path, headers=TEXT, body=b"x" * 2_000_000))
            assert connection.response().status == 413


def test_t31_a_url_over_the_limit_is_414(strict: Server) -> None:
    with connect(strict) as connection:
        connection.send(encode("GET", "/v1/stream/" + "x" * URL_BYTES))
        assert connection.response().status == 414
        assert connection.ends()


def test_t31_an_endless_url_is_414_while_it_is_read(strict: Server) -> None:
    with connect(strict) as connection:
        connection.send(b"GET /v1/stream/")
        assert_cut_off(connection, b"x" * 500, 414, at_most_bytes=20_000)


def test_t31_headers_over_the_limit_are_431(strict: Server) -> None:
    for headers in (
        {"X-Large": "x" * HEADER_BYTES},
        {f"X-{number}": "y" * 20 for number in range(200)},
        {"X" * HEADER_BYTES: "name"},
    ):
        with connect(strict) as connection:
            connection.send(encode("GET", "/healthz", headers=headers))
            assert connection.response().status == 431
            assert connection.ends()


def test_t31_an_endless_header_is_431_while_it_is_read(strict: Server) -> None:
    with connect(strict) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ")
        assert_cut_off(connection, b"x" * 500, 431, at_most_bytes=40_000)


def test_t31_endless_header_lines_are_431_while_they_are_read(strict: Server) -> None:
    with connect(strict) as connection:
        connection.send(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        assert_cut_off(connection, b"X: y\r\n" * 50, 431, at_most_bytes=40_000)


def test_endless_trailers_are_refused_while_they_are_read(strict: Server, stream: Stream) -> None:
    stream.create()
    with connect(strict) as connection:
        connection.send(encode("POST", stream.path, headers=CHUNKED) + b"4\r\ndata\r\n0\r\n")
        assert_cut_off(connection, b"X: y\r\n" * 50, 431, at_most_bytes=40_000)
    assert stream.content() == b""


def assert_cut_off(connection: RawConnection, piece: bytes, status: int, *, at_most_bytes: int) -> None:
    """The server answers after so many bytes at most: no more are sent, so one that reads on would not answer."""
    sent = 0
    with suppress(OSError):
        while sent < at_most_bytes and connection.quiet(for_secs=0.005):
            connection.send(piece)
            sent += len(piece)
    assert connection.response().status == status


def test_limits_apply_to_each_request_separately(strict: Server) -> None:
    request = encode("GET", "/healthz", headers={"X": "x" * (HEADER_BYTES - 500)})
    with connect(strict) as connection:
        connection.send(request * 10)
        assert [connection.response().status for _ in range(10)] == [200] * 10


@pytest.mark.parametrize("part", ["request line", "header", "body", "chunk size"])
def test_slow_loris_is_408_and_disconnected(strict: Server, stream: Stream, part: str) -> None:
    stream.create()
    whole = encode("POST", stream.path, headers={**TEXT, "X-Padding": "y" * 200, "Content-Length": "200"})
    begin = {
        "request line": b"",
        "header": whole[: whole.index(b"X-Padding")],
        "body": whole,
        "chunk size": encode("POST", stream.path, headers=CHUNKED),
    }[part]
    rest = whole if part == "request line" else (b"y" * 200 if part != "chunk size" else b"0" * 200)
    with connect(strict) as connection:
        connection.send(begin)
        send_slowly(strict, connection, rest)
        answer = connection.response()
        assert answer.status == 408
        assert b'"request_timeout"' in answer.body
        assert connection.ends()
    assert stream.content() == b""


def test_connection_without_a_request_is_closed(strict: Server) -> None:
    with connect(strict) as connection:
        wait_until(lambda: samples(strict)["headwater_connections"] >= 2)
        strict.pass_time(IDLE_S / 2)
        assert connection.has_nothing()
        strict.pass_time(IDLE_S)
        assert connection.ends()


def test_idle_connection_is_closed_without_a_response(strict: Server) -> None:
    with connect(strict) as connection:
        connection.request("GET", "/healthz")
        strict.pass_time(IDLE_S / 2)
        assert connection.has_nothing()
        strict.pass_time(IDLE_S)
        assert connection.ends()


def test_a_connection_in_use_is_not_idle(strict: Server) -> None:
    with connect(strict) as connection:
        for _ in range(6):
            strict.pass_time(IDLE_S / 3)
            assert connection.request("GET", "/healthz").status == 200


def test_long_poll_is_not_limited_by_the_read_timeout(strict: Server, stream: Stream) -> None:
    """The timeouts apply to the client: a long-poll that takes longer than all of them is answered."""
    stream.create("data")
    with connect(strict) as connection:
        connection.send(encode("GET", f"{stream.path}?offset=now&live=long-poll"))
        wait_for_live_readers(strict, "long-poll", 1)
        strict.pass_time(POLL_S - READ_S)
        assert connection.has_nothing()
        strict.pass_time(READ_S)
        assert connection.response().status == 204


def test_reader_that_reads_nothing_is_disconnected(strict: Server, stream: Stream) -> None:
    stream.create()
    for _ in range(300):
        stream.append(b"x" * BODY_BYTES)
    with connect(strict) as connection:
        connection.send(encode("GET", stream.path) * 20)
        wait_for_sample(strict, "slow_readers_now", 1)
        strict.pass_time(WRITE_S + 1)
        wait_for_sample(strict, "slow_readers_now", 0)
        received = 0
        while True:
            try:
                piece = connection.socket.recv(1 << 20)
            except ConnectionResetError:
                break
            if not piece:
                break
            received += len(piece)
        assert received < 20 * 300 * BODY_BYTES


def test_more_connections_than_allowed_are_503() -> None:
    with serve(DS_SERVER__MAX_CONNECTIONS="5") as server:
        held = [RawConnection(server) for _ in range(5)]
        try:
            for connection in held:
                assert connection.request("GET", "/healthz").status == 200
            with connect(server) as extra:
                extra.send(encode("GET", "/healthz"))
                answer = extra.response()
                assert answer.status == 503
                assert b'"too_many_connections"' in answer.body
                assert answer.header("retry-after") == "1"
                assert extra.ends()
        finally:
            for connection in held:
                connection.socket.close()

        def is_served() -> bool:
            with connect(server) as again:
                return again.request("GET", "/healthz").status == 200

        wait_until(is_served)


def test_refused_connections_do_not_use_up_the_descriptors() -> None:
    """Clients that keep a refused connection open would otherwise leave none for the answer to the next one."""
    with serve(DS_SERVER__MAX_CONNECTIONS="5") as server, ExitStack() as held:
        for _ in range(5):
            assert held.enter_context(connect(server)).request("GET", "/healthz").status == 200
        used = max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd"))  # noqa: PTH208 - in memory
        _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used + 40, hard))
        for _ in range(120):
            late = held.enter_context(connect(server))
            late.send(encode("GET", "/healthz"))
            answer = late.response()
            assert answer.status == 503
            assert answer.header("retry-after") == "1"
