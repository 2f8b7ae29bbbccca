"""Headers of every answer, including errors: security (protocol §10.7) and CORS."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.http.protocol import Stream, producer, stream_on
from tests.http.raw import RawResponse, connect
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

ORIGIN = "https://app.example.com"

# Headers that a browser client must be able to read and to send.
READABLE = {
    "etag",
    "location",
    "producer-epoch",
    "producer-expected-seq",
    "producer-received-seq",
    "producer-seq",
    "stream-closed",
    "stream-cursor",
    "stream-expires-at",
    "stream-next-offset",
    "stream-sse-data-encoding",
    "stream-ttl",
    "stream-up-to-date",
}
SENDABLE = {
    "content-type",
    "if-none-match",
    "producer-epoch",
    "producer-id",
    "producer-seq",
    "stream-closed",
    "stream-expires-at",
    "stream-seq",
    "stream-ttl",
}


@pytest.fixture(scope="module")
def restricted() -> Iterator[Server]:
    """A server that allows two origins."""
    with serve(DS_HTTP__CORS_ORIGINS=f"{ORIGIN}, https://admin.example.com") as running:
        yield running


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Server]:
    with serve(DS_HTTP__CORS_ORIGINS="*", DS_SERVER__LONG_POLL_TIMEOUT_SECS="1") as running:
        yield running


def listed(value: str) -> set[str]:
    return {name.strip().lower() for name in value.split(",")}


def every_answer(stream: Stream) -> Iterator[tuple[str, httpx.Response]]:
    """One answer of every kind, by name."""
    yield "created", stream.put("data")
    yield "exists", stream.put()
    yield "config mismatch", stream.put(headers={"Content-Type": "image/png"})
    yield "appended", stream.post("x")
    yield "producer", stream.post("x", headers=producer("p", 0, 0))
    yield "gap", stream.post("x", headers=producer("p", 0, 9))
    yield "bad request", stream.post(b"")
    yield "read", stream.get()
    yield "not modified", stream.get(headers={"If-None-Match": "*"})
    yield "bad offset", stream.get(offset="garbage")
    yield "long-poll", stream.long_poll("-1")
    yield "long-poll timed out", stream.long_poll("now")
    yield "head", stream.head()
    yield "method", stream.http.patch(stream.path)
    yield "preflight", stream.http.options(stream.path)
    yield "closed", stream.close()
    yield "conflict", stream.post("x")
    yield "deleted", stream.delete()
    yield "missing", stream.get()
    yield "missing head", stream.head()
    yield "bad name", stream.http.get("/v1/stream/a//b")
    yield "nowhere", stream.http.get("/nowhere")
    yield "health", stream.http.get("/healthz")


def test_every_response_has_nosniff_and_resource_policy_headers(stream: Stream) -> None:
    for name, answer in every_answer(stream):
        assert answer.headers["x-content-type-options"] == "nosniff", name
        assert answer.headers["cross-origin-resource-policy"] == "cross-origin", name


def test_every_response_is_readable_by_any_origin_if_configured(open_to_all: Server) -> None:
    with stream_on(open_to_all, "open") as stream:
        stream.http.headers["Origin"] = ORIGIN
        for name, answer in every_answer(stream):
            assert answer.headers["access-control-allow-origin"] == "*", name
            assert answer.headers["vary"] == "Origin", name
            assert listed(answer.headers["access-control-expose-headers"]) >= READABLE, name
        assert "http.cors_origins is *" in open_to_all.log()


def test_response_without_an_origin_has_no_cors_headers(stream: Stream) -> None:
    for name, answer in every_answer(stream):
        assert "access-control-allow-origin" not in answer.headers, name
        assert "access-control-expose-headers" not in answer.headers, name
        assert answer.headers["vary"] == "Origin", name


def assert_guarded(answer: RawResponse) -> None:
    assert answer.header("x-content-type-options") == "nosniff"
    assert answer.header("cross-origin-resource-policy") == "cross-origin"
    assert answer.header("access-control-allow-origin") is None


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", 431),
        (b"POST /v1/stream/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n", 413),
    ],
)
def test_responses_to_malformed_requests_have_the_security_headers(
    server: Server, request_bytes: bytes, status: int
) -> None:
    with connect(server) as connection:
        connection.send(request_bytes)
        answer = connection.response()
    assert answer.status == status
    assert_guarded(answer)


def test_event_stream_has_the_security_headers(server: Server, stream: Stream) -> None:
    stream.create()
    with SseReader(server, stream.name) as events:
        assert events.header("x-content-type-options") == "nosniff"
        assert events.header("cross-origin-resource-policy") == "cross-origin"
        assert events.header("access-control-allow-origin") is None


def preflight(http: httpx.Client, path: str, origin: str, method: str, headers: str = "") -> httpx.Response:
    fields = {"Origin": origin, "Access-Control-Request-Method": method}
    return http.options(path, headers=fields | ({"Access-Control-Request-Headers": headers} if headers else {}))


def test_a_preflight_allows_every_method_and_header_of_the_protocol(client: httpx.Client) -> None:
    origin = "http://localhost:5173"
    answer = preflight(client, "/v1/stream/any", origin, "PUT", "content-type, stream-ttl")
    assert answer.status_code in (200, 204)
    assert answer.content == b""
    assert answer.headers["access-control-allow-origin"] == origin
    assert listed(answer.headers["access-control-allow-methods"]) >= {"get", "head", "put", "post", "delete"}
    assert listed(answer.headers["access-control-allow-headers"]) >= SENDABLE
    assert int(answer.headers["access-control-max-age"]) > 0


def test_a_preflight_needs_no_stream(client: httpx.Client, stream_name: Callable[[], str]) -> None:
    assert preflight(client, f"/v1/stream/{stream_name()}", ORIGIN, "POST").status_code in (200, 204)


def test_only_listed_origins_may_read(restricted: Server) -> None:
    with stream_on(restricted, "guarded") as stream:
        stream.create("data")
        for origin in (ORIGIN, "https://admin.example.com"):
            for answer in (stream.get(headers={"Origin": origin}), stream.get({"Origin": origin}, offset="bad")):
                assert answer.headers["access-control-allow-origin"] == origin
                assert "origin" in listed(answer.headers["vary"])
        for origin in ("https://evil.example", "https://app.example.com.evil.example", "http://app.example.com"):
            for answer in (stream.get(headers={"Origin": origin}), stream.get({"Origin": origin}, offset="bad")):
                assert "access-control-allow-origin" not in answer.headers
                assert "origin" in listed(answer.headers["vary"])
        without = stream.get()
        assert without.headers.get("access-control-allow-origin") != "*"
        assert "origin" in listed(without.headers["vary"])


def test_a_preflight_of_an_unlisted_origin_is_not_granted(restricted: Server) -> None:
    with httpx.Client(base_url=restricted.url, verify=False) as http:
        granted = preflight(http, "/v1/stream/x", ORIGIN, "PUT")
        refused = preflight(http, "/v1/stream/x", "https://evil.example", "PUT")
    assert granted.headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in refused.headers


def test_an_event_stream_is_for_listed_origins_only(restricted: Server) -> None:
    with stream_on(restricted, "guarded-events") as stream:
        stream.create()
        with SseReader(restricted, stream.name, headers={"Origin": ORIGIN}) as events:
            assert events.header("access-control-allow-origin") == ORIGIN
        with SseReader(restricted, stream.name, headers={"Origin": "https://evil.example"}) as events:
            assert events.header("access-control-allow-origin") is None
