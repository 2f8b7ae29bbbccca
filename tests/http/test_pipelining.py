"""Many requests on one connection: each gets its own answer, in order, however the bytes are split."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from headwater.http.flow import TURN_BYTES
from tests.http.protocol import Stream, stream_on
from tests.http.raw import RawConnection, connect, encode
from tests.serving import Server, serve

TEXT = {"Content-Type": "text/plain"}
MODES = ("memory", "file-durable")


@pytest.fixture(scope="module", params=MODES)
def running(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve(DS_STORAGE__MODE=request.param, DS_SERVER__LONG_POLL_TIMEOUT_SECS="1") as server:
        yield server


@pytest.fixture
def stream(running: Server, stream_name: Callable[[], str]) -> Iterator[Stream]:
    with stream_on(running, stream_name()) as one:
        yield one


def long_poll(path: str) -> bytes:
    return encode("GET", f"{path}?offset=now&live=long-poll")


@pytest.mark.parametrize("count", [170, 900, 2000])
def test_appends_pipelined_after_a_long_poll_are_answered_and_stored_once(
    running: Server, stream: Stream, count: int
) -> None:
    """A recursion per pipelined request used to end in answers that did not match their requests."""
    stream.create()
    posts = b"".join(encode("POST", stream.path, headers=TEXT, body=b"%06d" % at) for at in range(count))
    with connect(running) as connection:
        connection.send(long_poll(stream.path) + posts)
        statuses = [connection.response().status for _ in range(count + 1)]
        assert statuses == [204] * (count + 1)
        # The connection still works.
        assert connection.request("GET", stream.path).status == 200
    assert stream.content() == b"".join(b"%06d" % at for at in range(count))
    assert "Traceback" not in running.log()


def test_reads_and_errors_pipelined_after_a_durable_append_are_answered_in_order(
    running: Server, stream: Stream
) -> None:
    stream.create("x")
    kinds = [
        (encode("POST", stream.path, headers=TEXT, body=b"y"), 204),
        (encode("GET", f"{stream.path}?offset=garbage"), 400),
        (encode("GET", "/v1/stream/there-is-no-such-stream"), 404),
        (encode("PATCH", stream.path), 405),
        (encode("OPTIONS", stream.path), 204),
    ]
    rounds = 200
    with connect(running) as connection:
        connection.send(b"".join(request for request, _ in kinds) * rounds)
        for _ in range(rounds):
            assert [connection.response().status for _ in kinds] == [status for _, status in kinds]


def test_pipelined_refused_request_is_answered_in_order(running: Server, stream: Stream) -> None:
    stream.create()
    posts = b"".join(encode("POST", stream.path, headers=TEXT, body=b"x") for _ in range(100))
    with connect(running) as connection:
        connection.send(posts + b"GET / HTTP/9.9\r\n\r\n" + encode("DELETE", stream.path))
        assert [connection.response().status for _ in range(100)] == [204] * 100
        assert connection.response().status == 400
        assert connection.ends()
    assert stream.content() == b"x" * 100


@pytest.mark.parametrize("cut", [2, 60], ids=["within the method", "within the headers"])
def test_complete_requests_do_not_count_as_headers_of_the_next_one(running: Server, stream: Stream, cut: int) -> None:
    """A read that begins and ends within a head, with complete requests in between, used to be 431 or 414."""
    stream.create()
    request = encode("POST", stream.path, headers=TEXT, body=b"x" * 100)
    wire = request * 400
    with connect(running) as connection:
        # A request on another connection, answered, separates the reads of the server.
        connection.send(wire[:cut])
        stream.head()
        connection.send(wire[cut : cut - len(request)])
        stream.head()
        connection.send(wire[cut - len(request) :])
        assert {connection.response().status for _ in range(400)} == {204}


def test_a_long_head_in_small_pieces_is_counted_once(running: Server, stream: Stream) -> None:
    stream.create()
    request = encode("GET", stream.path, headers={f"X-Filler-{at}": "v" * 500 for at in range(50)})
    assert 25_000 < len(request) < 32_768, "within the default limit"
    with connect(running) as connection:
        for at in range(0, len(request), 1000):
            connection.send(request[at : at + 1000])
            stream.head()
        assert connection.response().status == 200


def test_upgrade_offers_are_ignored_however_many(running: Server, stream: Stream) -> None:
    stream.create()
    offer = encode("GET", stream.path, headers={"Connection": "Upgrade", "Upgrade": "h2c"})
    with connect(running) as connection:
        connection.send(offer * 3000)
        assert {connection.response().status for _ in range(3000)} == {200}


def test_malformed_data_after_an_upgrade_offer_is_400(running: Server, stream: Stream) -> None:
    stream.create()
    offer = encode("GET", stream.path, headers={"Connection": "Upgrade", "Upgrade": "h2c"})
    with connect(running) as connection:
        connection.send(offer + b"\x00\x01 this is not HTTP\r\n\r\n")
        assert connection.response().status == 200
        assert connection.response().status == 400
        assert connection.ends()
    assert "Traceback" not in running.log()


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "identity", "chunked, chunked"])
def test_a_transfer_coding_that_is_not_supported_is_not_stored_undecoded(
    running: Server, stream: Stream, coding: str
) -> None:
    stream.create()
    with connect(running) as connection:
        head = encode("POST", stream.path, headers={**TEXT, "Transfer-Encoding": coding})
        connection.send(head + b"3\r\nabc\r\n0\r\n\r\n")
        assert connection.response().status in (400, 501)
        assert connection.ends()
    assert stream.content() == b""


def test_http_1_0_has_no_transfer_encoding_and_no_100_continue(running: Server, stream: Stream) -> None:
    stream.create()
    with connect(running) as connection:
        headers = {**TEXT, "Transfer-Encoding": "chunked", "Connection": "keep-alive"}
        connection.send(encode("POST", stream.path, headers=headers, version="1.0") + b"1\r\nx\r\n0\r\n\r\n")
        assert connection.response().status == 400
        assert connection.ends()
    with connect(running) as connection:
        headers = {**TEXT, "Expect": "100-continue", "Content-Length": "1"}
        connection.send(encode("POST", stream.path, headers=headers, version="1.0") + b"x")
        assert connection.response().status == 204


@pytest.mark.parametrize("version", ["0.9", "2.0"])
def test_another_http_version_is_505(running: Server, stream: Stream, version: str) -> None:
    stream.create()
    with connect(running) as connection:
        connection.send(encode("GET", stream.path, version=version))
        assert connection.response().status == 505
        assert connection.ends()


def test_a_body_of_very_many_chunks_is_parsed_in_turns(running: Server, stream: Stream) -> None:
    """A second client is served between the turns."""
    stream.create()
    count = 200_000
    with connect(running) as connection, connect(running) as other:
        head = encode("POST", stream.path, headers={**TEXT, "Transfer-Encoding": "chunked"})
        connection.send(head)
        for _ in range(count // 10_000):
            connection.send(b"1\r\nx\r\n" * 10_000)
            assert other.request("GET", "/healthz").status == 200
        connection.send(b"0\r\n\r\n" + encode("GET", "/healthz"))
        assert connection.response().status == 204
        assert connection.response().status == 200
    assert stream.content() == b"x" * count


def test_repeated_append_is_decided_on_the_current_state_each_time(running: Server, stream: Stream) -> None:
    """The head of a repeated request is not parsed or routed again; everything else is decided again."""
    append = encode("POST", stream.path, headers=TEXT, body=b"x" * 10)
    other = encode("POST", stream.path, headers=TEXT, body=b"y" * 10)

    def answered(connection: RawConnection, data: bytes) -> int:
        connection.send(data)
        return connection.response().status

    stream.create()
    with connect(running) as connection:
        assert [answered(connection, data) for data in (append, other, append, append)] == [204] * 4
        assert connection.request("GET", stream.path).body == b"xxxxxxxxxxyyyyyyyyyyxxxxxxxxxxxxxxxxxxxx"
        assert connection.request("POST", stream.path, headers={"Stream-Closed": "true"}).status == 204
        assert answered(connection, append) == 409
        assert connection.request("DELETE", stream.path).status == 204
        assert answered(connection, append) == 404
        assert connection.request("PUT", stream.path, headers={"Content-Type": "image/png"}).status == 201
        assert answered(connection, append) == 409, "another content type"


def test_response_in_pieces_after_a_whole_response_as_large_as_a_turn_is_complete(
    running: Server, stream: Stream, stream_name: Callable[[], str]
) -> None:
    """The first response used to take the whole turn without asking for the next one."""
    stream.create("x" * TURN_BYTES)
    with stream_on(running, stream_name() + "-larger") as larger, connect(running) as connection:
        larger.create("y" * (TURN_BYTES + 1))
        connection.socket.settimeout(10)
        for _ in range(2):  # The heads of the second requests are known.
            assert len(connection.request("GET", stream.path).body) == TURN_BYTES
            assert len(connection.request("GET", larger.path).body) == TURN_BYTES + 1
