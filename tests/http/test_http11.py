"""HTTP/1.1: framing, keep-alive, pipelining, and malformed or truncated requests (RFC 9112)."""

from __future__ import annotations

import random

import pytest

from tests.http.protocol import Stream, offset
from tests.http.raw import RawConnection, chunked, connect, encode
from tests.http.watching import samples
from tests.serving import Server, serve
from tests.waiting import wait_until

TEXT = {"Content-Type": "text/plain"}
CHUNKED = {**TEXT, "Transfer-Encoding": "chunked"}


def refused(server: Server, request: bytes) -> int:
    """Return the status of the refusal, after which the server must close the connection."""
    with connect(server) as connection:
        connection.send(request)
        answer = connection.response()
        assert answer.header("content-type") == "application/problem+json"
        assert connection.ends()
        return answer.status


# --- connections


def test_a_connection_serves_many_requests(server: Server, stream: Stream) -> None:
    with connect(server) as connection:
        assert connection.request("PUT", stream.path, headers=TEXT).status == 201
        for number in range(50):
            assert connection.request("POST", stream.path, headers=TEXT, body=b"x").status == 204
            assert len(connection.request("GET", stream.path).body) == number + 1
            assert connection.request("HEAD", stream.path).status == 200


def test_connection_close_is_honoured(server: Server) -> None:
    with connect(server) as connection:
        answer = connection.request("GET", "/healthz", headers={"Connection": "close"})
        assert (answer.status, answer.header("connection")) == (200, "close")
        assert connection.ends()


def test_http_1_0_connection_is_closed_unless_keep_alive_is_requested(server: Server) -> None:
    with connect(server) as connection:
        assert connection.request("GET", "/healthz", version="1.0").body == b"ok"
        assert connection.ends()
    with connect(server) as connection:
        for _ in range(3):
            answer = connection.request("GET", "/healthz", version="1.0", headers={"Connection": "keep-alive"})
            assert (answer.body, str(answer.header("connection")).lower()) == (b"ok", "keep-alive")


def test_http_1_0_response_is_never_chunked(server: Server, stream: Stream) -> None:
    stream.create("data" * 1000)
    with connect(server) as connection:
        answer = connection.request("GET", stream.path, version="1.0")
        assert answer.header("transfer-encoding") is None
        assert answer.body == b"data" * 1000


def test_pipelined_requests_are_answered_in_order(server: Server, stream: Stream) -> None:
    stream.create()
    requests = b""
    for number in range(200):
        requests += encode("POST", stream.path, headers=TEXT, body=b"%03d;" % number)
        requests += encode("GET", f"{stream.path}?offset={offset(number, number * 4)}")
    with connect(server) as connection:
        connection.send(requests)
        for number in range(200):
            assert connection.response().header("stream-next-offset") == offset(number + 1, (number + 1) * 4)
            assert connection.response().body == b"%03d;" % number


@pytest.mark.one_process
def test_pipelined_responses_larger_than_any_buffer_are_complete(server: Server, stream: Stream) -> None:
    large = bytes(range(256)) * 8000
    stream.create(large)
    with connect(server) as connection:
        connection.send(encode("GET", stream.path) * 5)
        wait_until(lambda: samples(server)["headwater_slow_readers_now"] >= 1)
        assert all(connection.response().body == large for _ in range(5))


@pytest.mark.one_process
def test_half_closed_connection_still_gets_its_response(server: Server, stream: Stream) -> None:
    with connect(server) as connection:
        connection.send(encode("PUT", stream.path, headers=TEXT, body=b"data"))
        connection.half_close()
        assert connection.response().status == 201
        assert connection.ends()


@pytest.mark.parametrize("live", ["long-poll", "sse"])
def test_half_closed_live_reader_is_disconnected_at_once(stream: Stream, live: str) -> None:
    """A disconnected client looks like a half-closed one, so waiting for more data would keep it forever."""
    with (
        serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="3600", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as server,
        connect(server) as connection,
    ):
        connection.request("PUT", stream.path, headers=TEXT)
        connection.send(encode("GET", f"{stream.path}?offset=now&live={live}"))
        if live == "sse":
            assert connection.response_head()[1] == 200
        connection.half_close()
        while connection.socket.recv(4096):
            pass


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
def test_upgrade_offer_is_ignored(server: Server, stream: Stream, protocol: str) -> None:
    """Java's client and `curl --http2` offer h2c with their first request; body and connection must still work."""
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    with connect(server) as connection:
        created = connection.request("PUT", stream.path, headers=TEXT | offer, body=b"hello ")
        assert (created.status, created.header("stream-next-offset")) == (201, offset(1, 6))
        appended = connection.request("POST", stream.path, headers=CHUNKED | offer, body=chunked(b"wor", b"ld"))
        assert (appended.status, appended.header("stream-next-offset")) == (204, offset(2, 11))
        assert connection.request("GET", stream.path, headers=offer).body == b"hello world"


def test_connection_close_is_honoured_with_an_upgrade_offer(server: Server, stream: Stream) -> None:
    offer = {"Connection": "close, Upgrade", "Upgrade": "h2c"}
    with connect(server) as connection:
        answer = connection.request("PUT", stream.path, headers=TEXT | offer)
        assert (answer.status, answer.header("connection")) == (201, "close")
        assert connection.ends()


def test_http_1_0_request_with_an_upgrade_offer_stays_http_1_0(server: Server, stream: Stream) -> None:
    """So it needs no Host, its response is not chunked, and the connection ends after it."""
    stream.create("one", headers=TEXT)
    with connect(server) as connection:
        target = f"{stream.path}?offset=-1&live=sse".encode()
        connection.send(b"GET %b HTTP/1.0\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n" % target)
        _, status, fields = connection.response_head()
        assert (status, dict(fields).get("transfer-encoding")) == (200, None)
    with connect(server) as connection:
        offer = {"Connection": "Upgrade", "Upgrade": "h2c"}
        assert connection.request("GET", stream.path, headers=offer, version="1.0").body == b"one"
        assert connection.ends()


@pytest.mark.parametrize(
    "target", ["http://localhost{}", "HTTPS://LOCALHOST:1{}?x=http://a", "http://[::1]{}?offset=-1"]
)
def test_target_may_be_a_complete_url(server: Server, stream: Stream, target: str) -> None:
    stream.create("one", headers=TEXT)
    with connect(server) as connection:
        assert connection.request("GET", target.format(stream.path)).body == b"one"


def test_the_connect_method_is_refused(server: Server) -> None:
    with connect(server) as connection:
        connection.send(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n")
        assert connection.response().status in (400, 405, 501)


def test_empty_lines_before_a_request_do_not_matter(server: Server) -> None:
    with connect(server) as connection:
        connection.send(b"\r\n\r\n" + encode("GET", "/healthz"))
        assert connection.response().body == b"ok"


def test_header_names_match_in_any_case(server: Server, stream: Stream) -> None:
    with connect(server) as connection:
        headers = {"cOnTeNt-TyPe": "text/plain", "STREAM-TTL": "60", "stream-CLOSED": "true"}
        assert connection.request("PUT", stream.path, headers=headers).header("stream-closed") == "true"
    assert stream.head().headers["stream-ttl"] == "60"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE"])
def test_every_response_has_a_date_and_one_framing(server: Server, stream: Stream, method: str) -> None:
    with connect(server) as connection:
        answer = connection.request(method, stream.path, headers=TEXT, body=b"x" if method == "POST" else b"")
    assert answer.header("date") is not None
    if answer.status == 204:
        assert answer.header("content-length") is None
        assert answer.header("transfer-encoding") is None
    elif method != "HEAD":
        assert str(answer.header("content-length")).isdigit()


# --- split at every byte


def splittable(stream: Stream) -> bytes:
    put = encode("PUT", stream.path, headers=TEXT, body=b"first;")
    post = encode("POST", stream.path, headers=CHUNKED, body=chunked(b"sec", b"ond;"))
    return put + post + encode("GET", f"{stream.path}?offset=-1") + encode("DELETE", stream.path)


def assert_splittable_answers(connection: RawConnection) -> None:
    assert connection.response().status == 201
    assert connection.response().status == 204
    assert connection.response().body == b"first;second;"
    assert connection.response().status == 204


def test_request_may_be_sent_byte_by_byte(server: Server, stream: Stream) -> None:
    with connect(server) as connection:
        for byte in splittable(stream):
            connection.send(bytes([byte]))
        assert_splittable_answers(connection)


def test_requests_may_be_split_at_any_byte(server: Server, stream: Stream) -> None:
    requests = splittable(stream)
    with connect(server) as connection:
        for cut in range(1, len(requests)):
            connection.send(requests[:cut])
            # The server has to see two reads, not one.
            stream.head()
            connection.send(requests[cut:])
            assert_splittable_answers(connection)


def test_requests_may_be_sent_in_random_pieces(server: Server, stream: Stream) -> None:
    rng = random.Random(31)
    requests = splittable(stream) * 20
    with connect(server) as connection:
        position = 0
        while position < len(requests):
            size = rng.choice((1, 2, 3, 7, 50, 500))
            connection.send(requests[position : position + size])
            position += size
        for _ in range(20):
            assert_splittable_answers(connection)


def test_repeated_head_works_with_any_body_in_any_pieces(server: Server, stream: Stream) -> None:
    """Repeat one head with different bodies, split differently, or directly followed by the next request."""
    stream.create()
    head = encode("POST", stream.path, headers={**TEXT, "Content-Length": "4"})
    expected = b""
    with connect(server) as connection:
        for number in range(5):
            body = b"%04d" % number
            connection.send(head + body)
            assert connection.response().status == 204
            expected += body
        for cut in range(len(head) - 2, len(head) + 5):
            body = b"c%03d" % cut
            request = head + body
            connection.send(request[:cut])
            stream.head()
            connection.send(request[cut:])
            assert connection.response().status == 204
            expected += body
        for tail in range(len(head) + 4):
            # A complete request and the beginning of the next one in one packet.
            first, second = b"f%03d" % tail, b"s%03d" % tail
            connection.send(head + first + (head + second)[:tail])
            connection.send((head + second)[tail:])
            assert [connection.response().status, connection.response().status] == [204, 204]
            expected += first + second
        # A body that looks like a head, or ends like one, is still a body.
        for body in (b"\r\n\r\n", b"POST", b"\n\r\n\r"):
            connection.send(head + body)
            assert connection.response().status == 204
            expected += body
    assert stream.content() == expected


def test_repeated_head_follows_changes_of_the_stream(server: Server, stream: Stream) -> None:
    post = encode("POST", stream.path, headers=TEXT, body=b"data")
    statuses = []
    with connect(server) as connection:
        for change in (None, "PUT", None, "DELETE", None, "PUT", None):
            if change is None:
                connection.send(post)
                statuses.append(connection.response().status)
            else:
                connection.request(change, stream.path, headers=TEXT)
    assert statuses == [404, 204, 404, 204]


# --- bodies


def test_trailers_are_never_used_as_headers(server: Server, stream: Stream) -> None:
    """A trailer must not change what a proxy checked in the head (RFC 9110 §6.5.1)."""
    stream.create()
    body = b"4\r\ndata\r\n0\r\nStream-Closed: true\r\nStream-Seq: 9\r\nContent-Type: image/png\r\n\r\n"
    with connect(server) as connection:
        answer = connection.request("POST", stream.path, headers=CHUNKED, body=body)
    assert (answer.status, answer.header("stream-closed")) == (204, None)
    stream.append("more", headers={"Stream-Seq": "1"})
    assert stream.content() == b"datamore"


def test_chunk_extensions_and_trailers_are_skipped(server: Server, stream: Stream) -> None:
    stream.create()
    body = b'4;name=value\r\ndata\r\n3;q="x"\r\n!!!\r\n0\r\nX-Trailer: 1\r\nProducer-Id: sneaky\r\n\r\n'
    with connect(server) as connection:
        assert connection.request("POST", stream.path, headers=CHUNKED, body=body).status == 204
        assert connection.request("GET", stream.path).body == b"data!!!"


def test_chunk_sizes_may_be_in_either_case_and_padded(server: Server, stream: Stream) -> None:
    stream.create()
    body = b"0000A\r\n0123456789\r\na\r\n9876543210\r\n0\r\n\r\n"
    with connect(server) as connection:
        assert connection.request("POST", stream.path, headers=CHUNKED, body=body).status == 204
    assert stream.content() == b"01234567899876543210"


@pytest.mark.parametrize(
    "body",
    [b"xyz\r\ndata\r\n0\r\n\r\n", b"-4\r\ndata\r\n0\r\n\r\n", b"4\r\ndataX\r\n0\r\n\r\n", b"FFFFFFFFFFFFFFFFF\r\n"],
    ids=["no number", "negative", "too long a chunk", "overflow"],
)
def test_a_broken_chunk_is_refused_and_appends_nothing(server: Server, stream: Stream, body: bytes) -> None:
    stream.create()
    assert refused(server, encode("POST", stream.path, headers=CHUNKED, body=body)) in (400, 413)
    assert stream.content() == b""


def test_expect_100_continue_is_answered_before_the_body(server: Server, stream: Stream) -> None:
    stream.create()
    with connect(server) as connection:
        connection.send(encode("POST", stream.path, headers={**TEXT, "Content-Length": "4", "Expect": "100-continue"}))
        assert connection.response().status == 100
        connection.send(b"data")
        assert connection.response().status == 204
        # With a chunked body, and in another case, the same.
        connection.send(encode("POST", stream.path, headers={**CHUNKED, "expect": "100-Continue"}))
        assert connection.response().status == 100
        connection.send(chunked(b"more"))
        assert connection.response().status == 204
    assert stream.content() == b"datamore"


def test_expect_100_continue_with_the_body_already_sent(server: Server, stream: Stream) -> None:
    stream.create()
    with connect(server) as connection:
        connection.send(encode("POST", stream.path, headers={**TEXT, "Expect": "100-continue"}, body=b"data"))
        first = connection.response()
        final = connection.response() if first.status == 100 else first
        assert final.status == 204
        assert connection.request("GET", "/healthz").status == 200


@pytest.mark.parametrize("cut", ["content-length", "chunked", "chunked between chunks", "head"])
def test_t31_a_truncated_request_changes_nothing(server: Server, stream: Stream, cut: str) -> None:
    stream.create("kept")
    requests = {
        "content-length": encode("POST", stream.path, headers={**TEXT, "Content-Length": "10"}) + b"half",
        "chunked": encode("POST", stream.path, headers=CHUNKED) + b"a\r\nhalf",
        "chunked between chunks": encode("POST", stream.path, headers=CHUNKED) + b"4\r\nhalf\r\n",
        "head": encode("POST", stream.path, headers=TEXT)[:-2],
    }
    with connect(server) as connection:
        connection.send(requests[cut])
        connection.half_close()
        # Either a refusal or a closed connection; never a success.
        with_answer = not connection.ends()
        if with_answer:
            assert connection.response().status == 400
    with connect(server) as vanishing:
        vanishing.send(requests[cut])
    assert stream.content() == b"kept"


# --- smuggling and malformed heads


def test_t31_content_length_with_transfer_encoding_is_refused(server: Server, stream: Stream) -> None:
    stream.create("kept")
    smuggled = encode("DELETE", stream.path)
    both = {**CHUNKED, "Content-Length": str(len(smuggled) + 5)}
    swapped = {**TEXT, "Content-Length": str(len(smuggled) + 5), "Transfer-Encoding": "chunked"}
    for headers in (both, swapped):
        assert refused(server, encode("POST", stream.path, headers=headers, body=b"0\r\n\r\n" + smuggled)) == 400
    assert stream.content() == b"kept"


@pytest.mark.parametrize(
    "fields",
    [
        "Content-Length: 4\r\nContent-Length: 5",
        "Content-Length: 4, 5",
        "Content-Length: -4",
        "Content-Length: +4",
        "Content-Length: 4.0",
        "Content-Length: 0x4",
        "Content-Length: four",
        "Content-Length: ",
        "Content-Length: 99999999999999999999999",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip",
        "Transfer-Encoding : chunked",
        "Content-Length : 4",
        "Bad Name: x\r\nContent-Length: 4",
        "X: a\x00b\r\nContent-Length: 4",
        "X: a\rb\r\nContent-Length: 4",
        ": no name\r\nContent-Length: 4",
        "no colon at all\r\nContent-Length: 4",
    ],
)
def test_t31_ambiguous_or_malformed_framing_is_refused(server: Server, stream: Stream, fields: str) -> None:
    stream.create("kept")
    request = f"POST {stream.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n{fields}\r\n\r\ndata"
    assert refused(server, request.encode("latin-1")) in (400, 413, 501)
    assert stream.content() == b"kept"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GARBAGE\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /healthz FTP/1.1\r\nHost: localhost\r\n\r\n",
        b"get /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
        b"\x00" * 32,
        bytes(range(256)),
    ],
    ids=lambda request_bytes: repr(request_bytes)[2:40],
)
def test_malformed_request_is_refused(server: Server, request_bytes: bytes) -> None:
    with connect(server) as connection:
        connection.send(request_bytes)
        connection.half_close()
        if not connection.ends():
            assert connection.response().status in (400, 405, 501, 505)
            assert connection.ends()
    with connect(server) as connection:
        assert connection.request("GET", "/healthz").body == b"ok"


def test_random_bytes_never_break_the_server(server: Server, stream: Stream) -> None:
    rng = random.Random(2)
    template = splittable(stream)
    for _ in range(200):
        mutated = bytearray(template)
        for _ in range(rng.randint(1, 6)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        with connect(server) as connection:
            connection.send(bytes(mutated))
            connection.half_close()
            while not connection.ends():
                answer = connection.response()
                assert answer.status < 500 or answer.status in (501, 505)
        stream.delete()
    assert "Traceback" not in server.log()


def test_refusal_does_not_lose_earlier_responses(server: Server, stream: Stream) -> None:
    stream.create("data")
    with connect(server) as connection:
        connection.send(encode("GET", stream.path) * 3 + b"GARBAGE\r\n\r\n")
        assert [connection.response().body for _ in range(3)] == [b"data"] * 3
        assert connection.response().status == 400
        assert connection.ends()


def test_connection_reset_does_not_affect_other_clients(server: Server, stream: Stream) -> None:
    import socket
    import struct

    stream.create("x" * 1_000_000)
    for request in (
        encode("GET", stream.path),
        encode("GET", f"{stream.path}?offset=now&live=sse"),
        encode("GET", f"{stream.path}?offset=now&live=long-poll"),
        encode("POST", stream.path, headers={**TEXT, "Content-Length": "100"}) + b"half",
    ):
        for _ in range(5):
            connection = RawConnection(server)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.send(request)
            connection.socket.close()
    stream.append("y")
    assert stream.content() == b"x" * 1_000_000 + b"y"
    assert "Traceback" not in server.log()
