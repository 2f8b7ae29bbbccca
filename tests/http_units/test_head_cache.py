"""The head cache: a lookup gives the same request as parsing, or nothing."""

from __future__ import annotations

from contextlib import suppress

import httptools
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from headwater.core.errors import InvalidProducer
from headwater.core.producers import ProducerHeaders, parse_producer
from headwater.http.head_cache import HEAD_MAX_BYTES, KNOWN_MAX, PRODUCER_HEADERS, HeadCache
from headwater.http.request import Request
from headwater.http.responses import Repeat


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
        name, value = name.lower(), value.strip(b" \t")
        self._headers[name] = self._headers[name] + b", " + value if name in self._headers else value

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
    assert len(heads.heads) <= KNOWN_MAX


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


# -- headers of appends, cached separately from the request line


def repeat_of(name: str, producer: ProducerHeaders | None) -> Repeat | None:
    """How an append to a stream is processed: the name and the producer show what was recognised."""
    assert not name.startswith("/")
    return (
        Repeat(lambda _body, _done: None, repr((name, producer)).encode(), lambda _result: b"")
        if name in NAMES
        else None
    )


NAMES = frozenset(("a", "b", "a/b", "a:b@c", "x" * 200))


def knowing(*requests: bytes) -> HeadCache:
    """A cache that has seen the answers to these appends; those with an invalid producer were refused."""
    heads = HeadCache()
    for data in requests:
        known = heads.remember(data, one(data))
        if known is not None:
            with suppress(InvalidProducer):
                producer_of(known.request)
                heads.remember_headers(known, repeat_of)
    return heads


def producer_of(request: Request) -> ProducerHeaders | None:
    return parse_producer(*(request.header(header) for header in PRODUCER_HEADERS))


def recognised(heads: HeadCache, data: bytes) -> bytes | None:
    known = heads.find(data)
    return known.repeat.beginning if known is not None and known.repeat is not None else None


def produced(id_: str, epoch: int | str, seq: int | str, *more: str, target: str = "/v1/stream/a") -> bytes:
    lines = (f"Producer-Id: {id_}", f"Producer-Epoch: {epoch}", f"Producer-Seq: {seq}")
    return post(b"abc", *lines, *more, target=target)


def test_headers_of_an_append_are_known_for_other_streams() -> None:
    heads = knowing(post(b"abc", "Content-Type: text/plain"))
    for name in ("b", "a/b", "a:b@c", "x" * 200):
        data = post(b"xyz", "Content-Type: text/plain", target=f"/v1/stream/{name}")
        assert recognised(heads, data) == repr((name, None)).encode()
        assert facts(found(heads, data)) == facts(one(data))


@pytest.mark.parametrize(
    "target",
    [
        "//a",
        "/c",
        "/a%62",
        "/a?live=lease",
        "/a#b",
        "/__ds/subscriptions/x/ack",
        "/",
        "",
        "/a//b",
        "/a/",
        "/" + "x" * 201,
    ],
)
def test_other_paths_are_parsed(target: str) -> None:
    assert knowing(post(b"abc")).find(post(b"abc", target=f"/v1/stream{target}")) is None


@pytest.mark.parametrize(
    "data",
    [
        post(b"abcd", target="/v1/stream/b"),
        post(b"abc", target="/v1/stream/b") + b"x",
        post(b"abc", target="/v1/stream/b")[:-1],
        post(b"abc", "Origin: http://x", target="/v1/stream/b"),
        post(b"abc", target="/v1/stream/b", version="1.0"),
        post(b"abc", target="/v1/stream/b").replace(b"POST", b"PUT"),
        post(b"abc", target="/v1/stream/b").replace(b"POST ", b"POST  "),
        b"\r\n" + post(b"abc", target="/v1/stream/b"),
        produced("p", 0, 0),
    ],
)
def test_other_headers_are_parsed(data: bytes) -> None:
    assert knowing(post(b"abc")).find(data) is None


def test_values_of_a_producer_are_read_from_each_request() -> None:
    heads = knowing(produced("p", 0, 0, "X-A: b"))
    for name, id_, epoch, seq in (("a", "p", 0, 1), ("b", "other", 7, 123456789012345), ("a/b", "p", 0, 0)):
        data = produced(id_, epoch, seq, "X-A: b", target=f"/v1/stream/{name}")
        assert recognised(heads, data) == repr((name, ProducerHeaders(id_, epoch, seq))).encode()
        assert facts(found(heads, data)) == facts(one(data))
    assert not heads.heads


@pytest.mark.parametrize(
    "data",
    [
        produced("p", 0, -1),
        produced("p", 0, "1x"),
        produced("p", 0, "1" * 16),
        produced("p q", 0, 1),
        produced("é", 0, 1),
        produced("", 0, 1),
        produced("p", 0, 1, "Producer-Seq: 2"),
        produced("p", 0, 1, " 2"),
        produced("p", 0, 1, "\t2"),
        produced("p", 0, 1).replace(b"Producer-Seq", b"X"),
        post(b"abc", "Producer-Epoch: 0", "Producer-Id: p", "Producer-Seq: 1"),
        post(b"abc", "Producer-Id: p", "X-A: b", "Producer-Epoch: 0", "Producer-Seq: 1"),
        post(b"abc"),
    ],
)
def test_unusual_headers_of_a_producer_are_parsed(data: bytes) -> None:
    assert knowing(produced("p", 0, 0)).find(data) is None


def test_a_producer_with_repeated_headers_is_not_cached() -> None:
    data = produced("p", 0, 0, "producer-seq: 1")
    assert knowing(data).find(data) is None


def test_long_values_do_not_exceed_the_size_of_a_cached_head() -> None:
    padding = "X-A: " + "x" * (HEAD_MAX_BYTES - 200)
    heads = knowing(produced("p", 0, 0, padding))
    assert heads.find(produced("q", 0, 0, padding)) is not None
    assert heads.find(produced("q" * 200, 0, 0, padding)) is None


def test_heads_of_another_location_are_no_longer_valid() -> None:
    heads = knowing(post(b"abc"), produced("p", 0, 0))
    known = heads.find(post(b"abc", target="/v1/stream/b"))
    assert known is not None
    generation = known.generation
    assert generation.is_current
    heads.clear()
    assert known.generation is generation
    assert [generation.is_current] == [False]
    assert heads.find(post(b"abc", target="/v1/stream/b")) is None
    assert heads.find(produced("p", 0, 1)) is None
    heads.remember_headers(known, repeat_of)
    assert heads.find(post(b"abc", target="/v1/stream/b")) is None


def test_streams_of_other_workers_are_not_found() -> None:
    heads = HeadCache(lambda name: name == "a")
    data = post(b"abc")
    known = heads.remember(data, one(data))
    assert known is not None
    heads.remember_headers(known, repeat_of)
    heads.heads.clear()
    assert recognised(heads, data) is not None
    assert heads.find(post(b"abc", target="/v1/stream/b")) is None


producers = st.builds(
    produced,
    st.sampled_from(["p", "q", "p q", "", "é", "a,b"]),
    st.sampled_from(["0", "3", "03", "-1", "1" * 16]),
    st.sampled_from(["0", "1", "999999999999999", "x", ""]),
    st.sampled_from(["X-A: b", "Producer-Seq: 4", " c", "\tc", "Producer-Id:p", "X-A:  b", "producer-epoch: 1"]),
)
mixed = requests | producers | st.builds(lambda data: data.replace(b"Producer-", b"producer-"), producers)


def parsed_or_none(data: bytes) -> Request | None:
    try:
        return one(data)
    except httptools.HttpParserError:
        return None


@given(st.lists(mixed, min_size=1, max_size=6), mixed, st.sampled_from(sorted(NAMES)))
@example([produced("p", 0, 0)], produced("p", 0, 1, " 2"), "b")
def test_known_headers_always_agree_with_the_parser(seen: list[bytes], data: bytes, name: str) -> None:
    heads = knowing(*(each for each in seen if parsed_or_none(each) is not None))
    for asked in (data, *seen):
        moved = b"POST /v1/stream/%b HTTP/1.1\r\n%b" % (name.encode(), asked.partition(b"\r\n")[2])
        for each in (asked, moved):
            known = heads.find(each)
            if known is None:
                continue
            request = parsed_or_none(each)
            assert request is not None
            assert facts(known.request_with(each[len(known.head) :])) == facts(request)
            if known.repeat is not None:
                expected = (request.target[11:].decode(), producer_of(request))
                assert known.repeat.beginning == repr(expected).encode()
