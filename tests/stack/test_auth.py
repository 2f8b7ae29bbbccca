"""Authentication: valid tokens, and each kind of invalid one, with a real Envoy in front of a real server."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headwater.stack.keys import Algorithm, KeyRing
from headwater.stack.tokens import TokenFlaw
from tests.http.certificates import make_certificate
from tests.serving import Server, serve
from tests.stack.proxying import Proxied, echoing, proxied
from tests.waiting import wait_until

TEXT = "Content-Type: text/plain"
APP = "https://app.example.com"


@pytest.fixture(scope="module")
def behind() -> Iterator[Server]:
    with serve(
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="4",
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="1",
        DS_HTTP__CORS_ORIGINS=APP,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(behind: Server) -> Iterator[Proxied]:
    with proxied(behind.port, DS_HTTP__CORS_ORIGINS=APP) as running:
        yield running


@pytest.fixture(scope="module")
def echo() -> Iterator[Proxied]:
    with echoing() as port, proxied(port, DS_AUTH__OPEN_RESERVED="true") as running:
        yield running


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_valid_token_of_each_algorithm_is_accepted(proxy: Proxied, algorithm: Algorithm) -> None:
    token = proxy.token(alg=algorithm)
    name = f"/v1/stream/good-{algorithm}"
    assert proxy.raw("PUT", name, TEXT, token=token).status == 201
    assert proxy.raw("POST", name, TEXT, token=token, body=b"hello").status == 204
    assert proxy.raw("GET", name, token=token).body == b"hello"
    assert proxy.raw("DELETE", name, token=token).status == 204


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("flaw", [flaw for flaw in TokenFlaw if flaw is not TokenFlaw.NO_SUBJECT])
def test_each_flaw_is_refused(proxy: Proxied, behind: Server, flaw: TokenFlaw, algorithm: Algorithm) -> None:
    name = f"/v1/stream/flaw-{flaw}-{algorithm}"
    answer = proxy.raw("PUT", name, TEXT, token=proxy.token(flaw, alg=algorithm))
    # Envoy returns 403 for a wrong audience: the token is valid, but not for this service.
    wrong_audience = flaw in {TokenFlaw.WRONG_AUDIENCE, TokenFlaw.NO_AUDIENCE}
    assert answer.status == (403 if wrong_audience else 401)
    if answer.status == 401:
        assert "Bearer" in answer.headers["www-authenticate"]
    assert httpx.head(f"{behind.url}{name}").status_code == 404


def test_a_token_without_a_subject_is_refused(proxy: Proxied) -> None:
    answer = proxy.raw("GET", "/v1/stream/x", token=proxy.token(TokenFlaw.NO_SUBJECT))
    assert (answer.status, answer.code) == (403, "bad_subject")


@pytest.mark.parametrize("subject", ["a\r\nX-Admin: 1", "a\nb", "naïve", "x" * 300])
def test_subject_that_is_not_a_plain_header_value_is_refused(proxy: Proxied, subject: str) -> None:
    assert proxy.raw("GET", "/v1/stream/x", token=proxy.token(sub=subject)).status == 403


@pytest.mark.parametrize("header", ["", "garbage", "Basic YTpi", "Bearer", "Bearer ", "Bearer a.b.c", "Bearer ..."])
def test_other_credentials_are_rejected(proxy: Proxied, header: str) -> None:
    lines = [f"Authorization: {header}"] if header else []
    assert proxy.raw("PUT", "/v1/stream/nobody", TEXT, *lines).status == 401


def test_only_health_and_the_stream_browser_are_public(proxy: Proxied) -> None:
    health = proxy.raw("GET", "/healthz")
    assert (health.status, health.body) == (200, b"ok")
    assert proxy.raw("GET", "/").status == 307, "leads to the stream browser, which asks for a token"
    assert proxy.raw("GET", "/ui/").status == 200
    assert proxy.raw("POST", "/ui/").status == 401
    for target in ("/readyz", "/metrics", "/uix", "/ds", "/ds/some", "/v1/stream/x", "/nothing", "/v1/stream"):
        assert proxy.raw("GET", target).status == 401, target


@pytest.mark.parametrize(
    "target",
    [
        "/healthz/../v1/stream/x",
        "/healthz/%2e%2e/v1/stream/x",
        "/healthz/..%2fv1/stream/x",
        "/healthz/..;/v1/stream/x",
        "/healthz//..//v1/stream/x",
        "//v1/stream/x",
        "/v1//stream/x",
        "/./v1/stream/x",
        "/healthz\\..\\v1\\stream\\x",
        "http://localhost/v1/stream/x",
        "http://localhost/healthz/../v1/stream/x",
        "/healthz%00/../v1/stream/x",
        "/healthz#/../v1/stream/x",
        "/v1/stream/__ds/jwks.json/../../x",
        "/v1/stream/__ds/subscriptions/ack",
        "/ui/../v1/stream/x",
    ],
)
def test_no_encoding_of_a_path_bypasses_authentication(proxy: Proxied, target: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE"):
        answer = proxy.raw(method, target, TEXT)
        assert answer.status in {400, 401, 404}, (method, answer)
        assert answer.status != 404 or b"stream_not_found" not in answer.body


def test_no_client_can_forge_the_subject(echo: Proxied) -> None:
    def seen(*lines: str, target: str = "/v1/stream/x", token: str | None = None) -> list[str]:
        seen_headers = json.loads(echo.raw("GET", target, *lines, token=token).body)
        names = {"x-jwt-sub", "x_jwt_sub", "authorization"}
        return [f"{name}: {value}" for name, value in seen_headers["headers"] if name.lower() in names]

    token = echo.token(sub="alice")
    forged = ("X-JWT-Sub: root", "x-jwt-sub: root", "X-Jwt-SUB: admin", "X_JWT_Sub: root")
    assert seen(token=token) == ["x-jwt-sub: alice"]
    assert seen(*forged, token=token) == ["x-jwt-sub: alice"]
    # Without authentication there is no subject.
    assert seen(*forged, target="/healthz") == []
    assert seen("Connection: close, X-JWT-Sub", *forged, token=token) in (["x-jwt-sub: alice"], [])


def test_token_in_the_query_is_accepted_and_not_forwarded(echo: Proxied) -> None:
    answer = echo.raw("GET", f"/v1/stream/x?offset=-1&access_token={echo.token()}&live=sse")
    assert sorted(json.loads(answer.body)["path"].partition("?")[2].split("&")) == ["live=sse", "offset=-1"]
    assert "access_token" not in echo.log.read_text()


@pytest.mark.parametrize("second", ["access_token", "access%5Ftoken", "%61ccess_token"])
def test_two_tokens_in_one_request_are_refused(echo: Proxied, second: str) -> None:
    alice, bob = echo.token(sub="alice"), echo.token(sub="bob")
    for answer in (
        echo.raw("GET", f"/v1/stream/x?{second}={bob}", token=alice),
        echo.raw("GET", f"/v1/stream/x?offset=-1&{second}={alice}", token=alice),
        echo.raw("GET", f"/v1/stream/x?{second}={bob}", "Authorization: Basic YTpi"),
        echo.raw("GET", f"/v1/stream/x?access_token={alice}&{second}={bob}"),
        echo.raw("GET", "/v1/stream/x", f"Authorization: Bearer {bob}", token=alice),
        echo.raw("GET", "/v1/stream/x", f"authorization: Bearer {bob}", token=alice),
    ):
        assert (answer.status, answer.code) == (400, "several_tokens")


def test_a_live_read_ends_when_its_token_expires() -> None:
    """The clock skew (1 s here) is tolerated; the server itself would continue for minutes."""
    with (
        serve() as server,
        proxied(server.port, DS_AUTH__CLOCK_SKEW_SECS="1", DS_HTTP__CORS_ORIGINS=APP) as proxy,
        ThreadPoolExecutor() as together,
    ):
        httpx.put(f"{server.url}/v1/stream/quiet", headers={"Content-Type": "text/plain"})
        # Long enough for all of them to begin before it, also on a busy machine.
        expiry = int(time.time()) + 10
        headers = {
            "Authorization": f"Bearer {proxy.signed(exp=expiry)}",
            "X-Envoy-Upstream-Rq-Timeout-Ms": "600000",
            "Origin": APP,
        }

        def read_events(address: str) -> None:
            with httpx.stream("GET", f"{address}=sse", headers=headers) as answer:
                assert answer.status_code == 200
                with pytest.raises(httpx.RemoteProtocolError):
                    answer.read()
            assert expiry <= time.time() < expiry + 40

        def long_poll(address: str) -> None:
            ended = httpx.get(f"{address}=long-poll", headers=headers)
            assert (ended.status_code, ended.json()["code"]) == (401, "token_expired")
            assert "invalid_token" in ended.headers["www-authenticate"]
            assert ended.headers["access-control-allow-origin"] == APP
            assert expiry <= time.time() < expiry + 40

        addresses = [f"{proxy.url}/v1/stream/quiet?offset=now&{name}" for name in ("live", "l%69ve")]
        for done in [together.submit(read, address) for read in (read_events, long_poll) for address in addresses]:
            done.result(120)


def test_preflight_passes_and_browsers_can_read_errors(proxy: Proxied) -> None:
    origin = f"Origin: {APP}"
    preflight = proxy.raw("OPTIONS", "/v1/stream/x", origin, "Access-Control-Request-Method: PUT")
    assert preflight.status == 204
    assert "PUT" in preflight.headers["access-control-allow-methods"]
    assert proxy.raw("OPTIONS", "/v1/stream/x").status == 401
    for refused in (
        proxy.raw("GET", "/v1/stream/x", origin),
        proxy.raw("GET", "/v1/stream/__registry__", origin, token=proxy.token()),
    ):
        assert refused.status in {401, 403}
        assert refused.headers["access-control-allow-origin"] == APP


def test_server_sent_events_are_not_buffered_and_end_soon_after_their_token(proxy: Proxied) -> None:
    token = proxy.token(ttl=1)
    forever = proxy.token()
    proxy.raw("PUT", "/v1/stream/live", TEXT, token=forever)
    events: list[str] = []
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.stream("GET", f"{proxy.url}/v1/stream/live?offset=-1&live=sse", headers=headers) as answer:
        assert answer.status_code == 200
        # Each event is written after the previous one was read, so the proxy does not buffer events.
        # The server ends it after its reconnect interval (4 s here), or the proxy when the token has expired.
        with contextlib.suppress(httpx.RemoteProtocolError):
            for line in answer.iter_lines():
                value = line.removeprefix("data:")
                if line.startswith("data:"):
                    events += [] if value.startswith("{") else [value]
                    if len(events) < 3:
                        proxy.raw("POST", "/v1/stream/live", TEXT, token=forever, body=f"{len(events)}".encode())
    assert events
    # By then the token has expired, including the clock skew.
    wait_until(lambda: proxy.raw("GET", "/v1/stream/live?offset=-1&live=sse", token=token).status == 401)


def test_proxy_does_not_end_a_long_poll(proxy: Proxied) -> None:
    token = proxy.token()
    proxy.raw("PUT", "/v1/stream/quiet", TEXT, token=token)
    began = time.monotonic()
    assert proxy.raw("GET", "/v1/stream/quiet?offset=now&live=long-poll", token=token).status == 204
    assert time.monotonic() - began > 0.9


def test_tokens_stay_valid_after_a_rotation_until_old_keys_are_retired(behind: Server, tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    with proxied(behind.port, ring=ring, DS_AUTH__JWKS_REFRESH_SECS="0.5") as proxy:

        def status(token: str) -> int:
            return proxy.raw("GET", "/v1/stream/rotation", token=token).status

        def within(token: str, wanted: int) -> None:
            wait_until(lambda: status(token), lambda found: found == wanted)

        old = proxy.token()
        assert status(old) == 404
        ring.rotate()
        new = proxy.token()
        within(new, 404)
        assert status(old) == 404
        ring.retire()
        within(old, 401)
        assert status(new) == 404


def test_keys_can_be_read_from_a_file_of_another_program(behind: Server, tmp_path: Path) -> None:
    theirs = KeyRing(tmp_path / "theirs")
    theirs.ensure()
    with proxied(behind.port, DS_AUTH__JWKS_FILE=str(theirs.jwks_file)) as proxy:
        assert proxy.raw("GET", "/v1/stream/x", token=proxy.token()).status == 401
    with proxied(behind.port, jwks=theirs.jwks_file, ring=theirs) as proxy:
        assert proxy.raw("GET", "/v1/stream/x", token=proxy.token()).status == 404


def test_keys_can_be_fetched_from_an_identity_provider_over_tls(behind: Server, tmp_path: Path) -> None:
    theirs = KeyRing(tmp_path / "theirs")
    theirs.ensure()
    certificate = make_certificate(tmp_path)
    cert, key = str(certificate.cert_path), str(certificate.key_path)
    with serve(DS_TLS__CERT_PATH=cert, DS_TLS__KEY_PATH=key) as provider:
        keys = f"https://localhost:{provider.port}/v1/stream/jwks.json"
        with httpx.Client(verify=certificate.client_context()) as http:
            kind = {"Content-Type": "application/jwk-set+json"}
            assert http.put(keys, content=theirs.jwks_file.read_bytes(), headers=kind).status_code == 201
        with proxied(behind.port, jwks=keys, ring=theirs, DS_AUTH__JWKS_CA_PATH=cert) as proxy:
            assert proxy.raw("GET", "/v1/stream/x", token=proxy.token()).status == 404
            assert proxy.raw("GET", "/v1/stream/x", token=proxy.token(TokenFlaw.EXPIRED)).status == 401
        with proxied(behind.port, jwks=keys, ring=theirs) as proxy:
            refused = proxy.raw("GET", "/v1/stream/x", token=proxy.token())
            assert refused.status == 401, "a provider with an untrusted certificate is rejected"


def test_issuer_and_audience_are_settings(behind: Server) -> None:
    with proxied(behind.port, DS_AUTH__ISSUER="https://id.example.com/", DS_AUTH__AUDIENCES="one, two") as proxy:
        assert proxy.raw("GET", "/v1/stream/x", token=proxy.token()).status == 404
        assert proxy.raw("GET", "/v1/stream/x", token=proxy.token(TokenFlaw.WRONG_ISSUER)).status == 401
        assert proxy.raw("GET", "/v1/stream/x", token=proxy.token(TokenFlaw.WRONG_AUDIENCE)).status == 403


def test_tls_at_the_proxy_and_at_the_server(tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    cert, key = str(certificate.cert_path), str(certificate.key_path)
    with (
        serve(DS_TLS__CERT_PATH=cert, DS_TLS__KEY_PATH=key) as server,
        proxied(
            server.port,
            DS_TLS__CERT_PATH=cert,
            DS_TLS__KEY_PATH=key,
            DS_PROXY__TLS_CERT_PATH=cert,
            DS_PROXY__TLS_KEY_PATH=key,
        ) as proxy,
    ):
        headers = {"Authorization": f"Bearer {proxy.token()}", "Content-Type": "text/plain"}
        url = f"https://localhost:{proxy.port}/v1/stream/secret"
        trusted = ssl.create_default_context(cafile=str(certificate.cert_path))
        assert httpx.put(url, headers=headers, verify=trusted).status_code == 201
        assert httpx.get(url, verify=trusted).status_code == 401
        for options, printed in (
            (["--http2"], "2 401"),
            (["--http1.1"], "1.1 401"),
            (["--tls-max", "1.1"], "0 000"),
        ):
            asked = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_version} %{http_code}", "--cacert", cert, *options]
            assert subprocess.run([*asked, url], capture_output=True, text=True, timeout=60).stdout == printed
