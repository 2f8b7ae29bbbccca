"""Access control by Host, by Origin and by the static token."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from headwater.http.origins import Hosts
from tests.http.protocol import Stream, stream_on
from tests.http.raw import connect, encode
from tests.ports import free_port
from tests.serving import Server, serve

EVIL = "https://evil.example"
TOKEN = "a-token-of-enough-length"
TEXT = {"Content-Type": "text/plain"}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serve(DS_AUTH__TOKEN=TOKEN, DS_SERVER__PUBLIC_URL="https://streams.example.com") as running:
        yield running


@pytest.fixture(scope="module")
def named() -> Iterator[Server]:
    with serve(DS_SERVER__ALLOWED_HOSTS="streams.example.com", DS_HTTP__LOOPBACK_ORIGINS="false") as running:
        yield running


# -- Origin


@pytest.mark.parametrize(
    "origin", [EVIL, "null", "https://localhost.evil.example", "file://", "chrome-extension://abc"]
)
@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_a_page_of_another_site_cannot_change_anything(stream: Stream, method: str, origin: str) -> None:
    """This includes simple requests, which a browser sends without a preflight."""
    stream.create("kept")
    answer = stream.http.request(method, stream.path, headers={"Origin": origin, **TEXT}, content=b"x")
    assert answer.status_code == 403
    assert answer.json()["code"] == "origin_not_allowed"
    assert stream.content() == b"kept"


def test_page_of_another_site_cannot_read_responses(stream: Stream) -> None:
    stream.create("secret")
    answer = stream.get(headers={"Origin": EVIL})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:5173",
        "http://127.0.0.1:3000",
        "https://localhost",
        "http://[::1]:8000",
        "http://app.localhost",
    ],
)
def test_page_on_a_loopback_address_can_use_the_api(stream: Stream, origin: str) -> None:
    stream.create("x")
    answer = stream.post("y", headers={"Origin": origin})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == origin


def test_own_pages_can_use_the_api_also_behind_a_tls_proxy(named: Server) -> None:
    with stream_on(named, "own") as stream:
        stream.create()
        for origin, host in (
            ("https://streams.example.com", "streams.example.com"),
            ("http://streams.example.com:80", "streams.example.com"),
            ("http://streams.example.com:8080", "streams.example.com:8080"),
        ):
            assert stream.post("x", headers={"Origin": origin, "Host": host}).status_code == 204
        for origin in ("https://streams.example.com:8443", "http://localhost:5173"):
            answer = stream.post("x", headers={"Origin": origin, "Host": "streams.example.com"})
            assert answer.status_code == 403, "loopback origins are off here, and another port is another origin"


# -- Host


@pytest.mark.parametrize("target", ["http://evil.example/v1/stream/{}", "http://localhost@evil.example/v1/stream/{}"])
def test_host_in_the_target_takes_precedence_over_the_header(guarded: Server, server: Server, target: str) -> None:
    with connect(server) as connection:
        connection.send(encode("PUT", target.format("named"), headers=TEXT))
        assert connection.response().status == 421
    with stream_on(guarded, "named") as stream, connect(guarded) as connection:
        headers = {"Authorization": f"Bearer {TOKEN}", **TEXT}
        answer = connection.request("PUT", f"http://localhost{stream.path}", headers=headers)
        assert answer.header("location") == f"https://streams.example.com{stream.path}"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4437", "localhost.evil.example", "127.0.0.1.evil.example", "a b"]
)
def test_a_foreign_name_that_resolves_to_this_machine_is_refused(server: Server, stream: Stream, host: str) -> None:
    stream.create("secret")
    with connect(server) as connection:
        answer = connection.request("GET", stream.path, headers={"Host": host})
        assert answer.status == 421
        assert b"secret" not in answer.body
        assert b"server.allowed_hosts" in answer.body


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:4437", "127.0.0.1", "127.1.2.3:1", "[::1]:4437", "app.localhost"]
)
def test_loopback_names_are_accepted_by_a_server_on_loopback(server: Server, stream: Stream, host: str) -> None:
    stream.create("x")
    with connect(server) as connection:
        assert connection.request("GET", stream.path, headers={"Host": host}).status == 200


def test_allowed_hosts_are_accepted(named: Server) -> None:
    with connect(named) as connection:
        assert connection.request("GET", "/healthz", headers={"Host": "Streams.Example.com:443"}).status == 200
    with connect(named) as connection:
        assert connection.request("GET", "/healthz", headers={"Host": "other.example.com"}).status == 421


@pytest.mark.parametrize(
    ("port", "host", "allowed"),
    [
        (4437, "streams.example.com", True),
        (4437, "streams.example.com:8080", True),
        (4437, "localhost:4437", True),
        (4437, "server:4437", True),
        (4437, "evil.example:4437", False),
        (4437, "evil.example:x", False),
        (80, "evil.example", False),
        (80, "evil.example:80", False),
        (80, "streams.example.com:8080", True),
    ],
)
def test_names_that_a_proxy_passes_on_are_refused_on_the_own_port(port: int, host: str, *, allowed: bool) -> None:
    """A foreign page that reaches the server without the proxy, which checks tokens, must use the server's port."""
    for listens_on_loopback in (True, False):
        hosts = Hosts(("proxied", "server"), listens_on_loopback=listens_on_loopback, port=port)
        assert hosts.allows(host.encode()) is allowed


def test_foreign_page_cannot_bypass_the_proxy() -> None:
    port = free_port()
    with (
        serve(port=port, DS_SERVER__ALLOWED_HOSTS="proxied") as server,
        connect(server) as connection,
    ):
        foreign = f"evil.example:{port}"
        answer = connection.request("PUT", "/v1/stream/x", headers={"Host": foreign, "Origin": f"http://{foreign}"})
        assert answer.status == 421


def test_a_head_that_is_refused_has_no_body(server: Server) -> None:
    with connect(server) as connection:
        assert connection.request("HEAD", "/v1/stream/x", headers={"Host": "evil.example"}).status == 421
        assert connection.ends()


# -- the static token


def test_requests_without_the_token_are_401(guarded: Server) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        for method in ("PUT", "POST", "GET", "HEAD", "DELETE"):
            answer = http.request(method, "/v1/stream/x", headers=TEXT)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert http.get("/metrics").status_code == 401
        assert http.get("/ds").status_code == 401
        assert http.get("/v1/stream/__ds/subscriptions").status_code == 401
        for wrong in ("Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer"):
            assert http.get("/v1/stream/x", headers={"Authorization": wrong}).status_code == 401


@pytest.mark.parametrize("action", ["ack", "release", "callback"])
def test_only_actions_of_workers_are_exempt_from_the_token(guarded: Server, action: str) -> None:
    """Their token is that of the wake. A subscription or a linked stream with the name of an action is not exempt."""
    root = "/v1/stream/__ds/subscriptions"
    body = {"type": "pull-wake", "pattern": "**", "wake_stream": "wakes"}
    with httpx.Client(base_url=guarded.url) as http:
        for method in ("PUT", "GET", "DELETE"):
            assert http.request(method, f"{root}/{action}", json=body).json()["code"] == "unauthorized"
        assert http.delete(f"{root}/s/streams/{action}").json()["code"] == "unauthorized"
        assert http.delete(f"{root}/s/streams/x/{action}").json()["code"] == "unauthorized"
        assert http.post(f"{root}/s/{action}", json={}).json().get("code") != "unauthorized"


def test_health_the_page_and_preflights_need_no_token(guarded: Server) -> None:
    with httpx.Client(base_url=guarded.url) as http:
        assert http.get("/healthz").status_code == 200
        assert http.get("/readyz").status_code == 200
        assert http.get("/ui/").status_code == 200
        assert http.get("/", follow_redirects=True).url.path == "/ui/"
        assert http.options("/v1/stream/x").status_code == 204
        assert http.get("/uix").status_code == 401


def test_with_the_token_everything_works(guarded: Server) -> None:
    with httpx.Client(base_url=guarded.url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        created = http.put("/v1/stream/x", headers=TEXT)
        assert created.status_code == 201
        assert created.headers["location"] == "https://streams.example.com/v1/stream/x"
        for _ in range(3):
            assert http.post("/v1/stream/x", headers=TEXT, content=b"y").status_code == 204
    # The head of an accepted request is cached; a different head is not accepted because of it.
    with connect(guarded) as connection:
        request = encode("POST", "/v1/stream/x", headers={**TEXT, "Authorization": f"Bearer {TOKEN}"}, body=b"z")
        for _ in range(3):
            connection.send(request)
            assert connection.response().status == 204
        connection.send(request.replace(TOKEN.encode(), b"b" + TOKEN[1:].encode()))
        assert connection.response().status == 401


def test_a_large_body_without_the_token_is_not_read(guarded: Server) -> None:
    with connect(guarded) as connection:
        connection.send(encode("POST", "/v1/stream/x", headers={**TEXT, "Content-Length": "50000000"}))
        assert connection.response().status == 401


def test_listening_on_every_address_without_authentication_logs_a_warning() -> None:
    with serve(DS_SERVER__HOST="0.0.0.0") as running:
        assert "without authentication" in running.log()
    with serve(DS_SERVER__HOST="0.0.0.0", DS_AUTH__TOKEN=TOKEN) as running:
        assert "without authentication" not in running.log()


@pytest.mark.parametrize("token", [TOKEN, ""], ids=["own token", "tokens of a proxy"])
def test_reads_with_a_token_that_shared_caches_may_keep_are_logged_as_a_warning(token: str) -> None:
    """A proxy may check tokens, which the server does not know."""
    with serve(DS_AUTH__TOKEN=token, DS_HTTP__CACHE_CONTROL="public") as running:
        assert "shared caches may serve data that was read with a token" in running.log()
    with serve(DS_AUTH__TOKEN=TOKEN, DS_HTTP__CACHE_CONTROL="private") as running:
        assert "shared caches" not in running.log()
