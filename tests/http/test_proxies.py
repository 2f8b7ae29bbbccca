"""Behind a proxy: `Location` and the access log use the headers of trusted proxies only."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.http.raw import RawConnection, encode
from tests.serving import Server, serve

FORWARDED = {
    "X-Forwarded-For": "203.0.113.9",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "streams.example.com",
    "X-Request-Id": "from-the-proxy-1",
}


@pytest.fixture(scope="module")
def trusting() -> Iterator[Server]:
    with serve(DS_SERVER__TRUSTED_PROXIES="127.0.0.1, ::1", DS_LOG__RUST_LOG="debug") as running:
        yield running


def test_location_follows_a_trusted_proxy(trusting: Server) -> None:
    created = httpx.put(trusting.stream_url("forwarded"), headers={"Content-Type": "text/plain", **FORWARDED})
    assert created.headers["location"] == "https://streams.example.com/v1/stream/forwarded"
    standard = {"Content-Type": "text/plain", "Forwarded": "for=203.0.113.9;proto=https;host=other.example.com"}
    created = httpx.put(trusting.stream_url("standard"), headers=standard)
    assert created.headers["location"] == "https://other.example.com/v1/stream/standard"


def test_access_log_has_client_duration_and_request_id(trusting: Server) -> None:
    answer = httpx.get(trusting.stream_url("missing"), headers=FORWARDED)
    assert answer.headers["x-request-id"] == "from-the-proxy-1"
    trusting.wait_for_log("path=/v1/stream/missing")
    (line,) = [line for line in trusting.log().splitlines() if "path=/v1/stream/missing" in line]
    assert "client=203.0.113.9" in line
    assert "request_id=from-the-proxy-1" in line
    assert "status=404" in line
    assert "duration_ms=" in line


def test_every_logged_request_has_an_id_that_the_client_gets(trusting: Server) -> None:
    answer = httpx.get(trusting.stream_url("without-an-id"), headers={"X-Request-Id": "not valid"})
    given = answer.headers["x-request-id"]
    assert given != "not valid"
    trusting.wait_for_log(f"request_id={given}")


def test_refused_request_is_logged_with_its_own_id_and_client(trusting: Server) -> None:
    """It used to have the id of the request before it on the connection, and the address of the proxy."""
    with RawConnection(trusting) as connection:
        assert connection.request("GET", "/healthz", headers=FORWARDED).header("x-request-id") == "from-the-proxy-1"
        refused = {**FORWARDED, "X-Request-Id": "from-the-proxy-2", "Content-Length": "1", "Transfer-Encoding": "gzip"}
        connection.send(encode("POST", "/v1/stream/refused", headers=refused))
        answer = connection.response()
        assert (answer.status, answer.header("x-request-id")) == (400, "from-the-proxy-2")
    trusting.wait_for_log("path=/v1/stream/refused")
    (line,) = [line for line in trusting.log().splitlines() if "path=/v1/stream/refused" in line]
    assert "client=203.0.113.9" in line
    assert "request_id=from-the-proxy-2" in line
    with RawConnection(trusting) as connection:
        assert connection.request("GET", "/healthz", headers=FORWARDED).header("x-request-id") == "from-the-proxy-1"
        connection.send(b"no request\r\n\r\n")
        answer = connection.response()
        assert answer.status == 400
        assert answer.header("x-request-id") not in (None, "from-the-proxy-1")


def test_location_uses_the_public_url_whatever_the_client_and_its_proxy_sent() -> None:
    with (
        serve(
            DS_SERVER__PUBLIC_URL="https://public.example.com:8443",
            DS_SERVER__TRUSTED_PROXIES="127.0.0.1, ::1",
            DS_SERVER__ALLOWED_HOSTS="*",
        ) as running,
        httpx.Client(base_url=running.url, headers={"Content-Type": "text/plain"}) as client,
    ):
        for headers in ({}, {"Host": "named.example.com"}, FORWARDED):
            for path in ("/v1/stream/a", "/v1/stream/a/b%20c", "/ds/bucket", "/ds/bucket/s"):
                client.delete(path)
                created = client.put(path, headers=headers)
                assert created.status_code == 201, created.text
                assert created.headers["location"] == f"https://public.example.com:8443{path}"
            confirmed = client.put("/v1/stream/a?ignored=1", headers=headers)
            assert confirmed.status_code == 200
            assert confirmed.headers["location"] == "https://public.example.com:8443/v1/stream/a"
            client.delete("/ds/bucket/s")
            session = client.post("/v1/stream/__ds/follow", json={"prefix": "a"}, headers=headers)
            url = f"https://public.example.com:8443/v1/stream/__ds/follow/{session.json()['id']}"
            assert (session.headers["location"], session.json()["url"]) == (url, url)


def test_headers_of_other_peers_are_ignored(server: Server, client: httpx.Client) -> None:
    headers = {"Content-Type": "text/plain", **FORWARDED, "Forwarded": "proto=https;host=evil.example.com"}
    created = client.put("/v1/stream/not-forwarded", headers=headers)
    assert created.headers["location"] == f"{server.url}/v1/stream/not-forwarded"
