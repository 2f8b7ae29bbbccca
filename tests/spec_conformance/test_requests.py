"""Requests with unknown parameters, and slow streaming bodies."""

from __future__ import annotations

import pytest

from tests.http.protocol import Stream, assert_problem
from tests.http.raw import connect, encode
from tests.serving import Server, serve

CHUNKED = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}


@pytest.mark.parametrize(
    "query",
    ["x=1&x=2", "x=%FF", "%FF=1", "&".join(f"p{number}=1" for number in range(40)), "x", "x=%zz"],
    ids=["repeated", "invalid UTF-8 value", "invalid UTF-8 name", "many", "no value", "bad escape"],
)
def test_unknown_query_parameters_are_ignored(server: Server, stream: Stream, query: str) -> None:
    """protocol line 440: clients may send extension parameters; a server ignores unknown ones."""
    stream.create("data")
    with connect(server) as connection:
        answer = connection.request("GET", f"{stream.path}?{query}&offset=-1")
    assert (answer.status, answer.body) == (200, b"data")


def test_a_known_parameter_that_is_repeated_is_400(server: Server, stream: Stream) -> None:
    """protocol line 237: invalid parameters are 400; two offsets are ambiguous."""
    stream.create("data")
    assert_problem(stream.http.get(f"{stream.path}?offset=-1&offset=now"), 400, "bad_request")


def test_a_streaming_append_may_take_as_long_as_data_keeps_arriving(mode: str) -> None:
    """protocol lines 101, 110: streaming appends are supported; the timeout applies to silence, not to the total."""
    with (
        serve(moving_time=True, DS_STORAGE__MODE=mode, DS_SERVER__READ_TIMEOUT_SECS="600") as server,
        connect(server) as connection,
    ):
        connection.request("PUT", "/v1/stream/slow", headers={"Content-Type": "text/plain"})
        connection.send(encode("POST", "/v1/stream/slow", headers=CHUNKED))
        piece = b"x" * 4000
        for _ in range(12):
            connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            server.pass_time(100)
        connection.send(b"0\r\n\r\n")
        assert connection.response().status == 204
        assert len(connection.request("GET", "/v1/stream/slow?offset=-1").body) == 48_000


def test_silent_streaming_append_is_ended(mode: str) -> None:
    """protocol line 110: support for streaming bodies does not mean waiting forever."""
    with (
        serve(DS_STORAGE__MODE=mode, DS_SERVER__READ_TIMEOUT_SECS="1") as server,
        connect(server) as connection,
    ):
        connection.request("PUT", "/v1/stream/silent", headers={"Content-Type": "text/plain"})
        connection.send(encode("POST", "/v1/stream/silent", headers=CHUNKED) + b"3\r\nabc\r\n")
        assert connection.response().status == 408
        assert connection.ends()
