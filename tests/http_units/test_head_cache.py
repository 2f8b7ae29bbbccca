"""The head cache: a lookup gives the same request as parsing, or nothing."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headwater.http.head_cache import HEAD_MAX_BYTES, KNOWN_MAX, HeadCache
from headwater.http.request import Request


class Parsed:
    """All requests that the parser finds in some bytes."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[Request] = []
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._body = b""
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = b"", {}, b""

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.requests.append(
            Request(
                self._parser.get_method(),
                self._target,
                self._headers,
                self._body,
                self._parser.get_http_version() == "1.0",
                self._parser.should_keep_alive(),
            )
        )


def one(data: bytes) -> Request:
    [request] = Parsed(data).requests
    return request


def found(heads: HeadCache, data: bytes) -> Request | None:
    known = heads.find(data)
    return known.request_with(data[len(known.head) :]) if known is not None else None


def facts(request: Request | None) -> tuple[object, ...] | None:
    if request is None:
        return None
    return (request.method, request.target, request.headers, request.body, request.http_1_0, request.keep_alive)


def post(body: bytes, *headers: str, target: str = "/v1/stream/a", version: str = "1.1") -> bytes:
    lines = [f"POST {target} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def remembering(*requests: bytes) -> HeadCache:
    heads = HeadCache()
    for data in requests:
        heads.remember(data, one(data))
    return heads


def test_unseen_head_is_not_cached() -> None:
    assert HeadCache().find(post(b"abc")) is None


def test_the_same_head_with_another_body_is_the_same_request() -> None:
    heads = remembering(post(b"abc", "Content-Type: text/plain"))
    data = post(b"xyz", "Content-Type: text/plain")
    assert facts(found(heads, data)) == facts(one(data))


def test_head_without_a_body_is_cached() -> None:
    data = b"GET /v1/stream/a HTTP/1.1\r\nHost: x\r\n\r\n"
    assert facts(found(remembering(data), data)) == facts(one(data))


@pytest.mark.parametrize(
    "data",
    [
        post(b"abcd"),
        post(b"abc")[:-1],
        post(b"abc") + b"x",
        post(b"abc") + post(b"abc"),
        post(b"abc") + b"\r\n",
        b"\r\n" + post(b"abc"),
        post(b"abc").replace(b"Host: x", b"Host: y"),
        post(b"abc").replace(b"Host: x", b"host: x"),
        post(b"abc").replace(b"POST", b"PUT"),
        post(b"abc").replace(b"1.1", b"1.0"),
        post(b"abc").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        b"",
        b"\r\n\r\n",
        b"\r\n\r\nabc",
    ],
)
def test_anything_else_goes_to_the_parser(data: bytes) -> None:
    assert remembering(post(b"abc")).find(data) is None


@pytest.mark.parametrize(
    "data",
    [
        post(b"abc", version="1.0"),
        post(b"abc", "Connection: close"),
        post(b"abc", target="/v1/stream/a?offset=now"),
        post(b"abc", "Producer-Seq: 5"),
        post(b"abc", "Stream-Seq: 5"),
        post(b"abc", 'If-None-Match: "x"'),
        post(b"abc", "Expect: 100-continue"),
        post(b"abc", f"X-Long: {'x' * HEAD_MAX_BYTES}"),
        b"POST /v1/stream/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
    ids=["1.0", "close", "query", "producer", "seq", "etag", "expect", "long", "chunked"],
)
def test_unrepeatable_and_unusual_heads_are_not_cached(data: bytes) -> None:
    assert remembering(data).find(data) is None


def test_memory_is_bounded_and_the_server_still_works() -> None:
    heads = HeadCache()
    for number in range(KNOWN_MAX + 10):
        data = post(b"abc", target=f"/v1/stream/{number}")
        heads.remember(data, one(data))
        assert facts(found(heads, data)) == facts(one(data))
    assert len(heads._heads) <= KNOWN_MAX


def test_an_empty_line_in_a_body_does_not_move_the_head() -> None:
    body = b"ab\r\n\r\ncd"
    heads = remembering(post(body))
    assert facts(found(heads, post(body))) == facts(one(post(body)))


names = st.sampled_from(["Content-Type", "X-A", "Producer-Id", "Stream-Closed", "Connection", "Origin"])
values = st.sampled_from(["", "a", "true", "keep-alive", "close", "Keep-Alive, x", "a: b", "é"])
requests = st.builds(
    lambda body, headers, target: post(body, *[f"{name}: {value}" for name, value in headers], target=target),
    st.binary(max_size=12) | st.sampled_from([b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"]),
    st.lists(st.tuples(names, values), max_size=3, unique_by=lambda header: header[0]),
    st.sampled_from(["/v1/stream/a", "/v1/stream/a%20b", "/v1/stream/a?x=y"]),
)


@given(st.lists(requests, min_size=1, max_size=5), requests, st.binary(max_size=6))
@example([post(b"")], post(b""), b"GET / ")
def test_cached_head_always_agrees_with_the_parser(seen: list[bytes], data: bytes, rest: bytes) -> None:
    heads = remembering(*seen)
    for asked in (data, data + rest, *seen, *[one_ + rest for one_ in seen]):
        request = found(heads, asked)
        if request is not None:
            assert facts(request) == facts(one(asked))


@given(requests, st.data())
def test_changing_any_byte_of_a_head_is_a_cache_miss(data: bytes, draw: st.DataObject) -> None:
    heads = remembering(data)
    assume(heads.find(data) is not None)
    end = data.find(b"\r\n\r\n") + 4
    at = draw.draw(st.integers(min_value=0, max_value=end - 1))
    byte = draw.draw(st.integers(min_value=0, max_value=255).filter(lambda byte: byte != data[at]))
    assert heads.find(data[:at] + bytes([byte]) + data[at + 1 :]) is None
