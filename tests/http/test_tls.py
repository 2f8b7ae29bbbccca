"""Direct TLS from PEM files."""

from __future__ import annotations

import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from headwater.http.context import REFUSED_MAX
from tests.http.certificates import Certificate, make_certificate
from tests.http.protocol import Stream
from tests.http.raw import ConnectionEnded, RawConnection, connect, encode
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def secure(certificate: Certificate) -> Iterator[Server]:
    with serve(
        DS_TLS__CERT_PATH=str(certificate.cert_path),
        DS_TLS__KEY_PATH=str(certificate.key_path),
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0",
    ) as running:
        yield running


@pytest.fixture
def stream(secure: Server, certificate: Certificate, stream_name: Callable[[], str]) -> Iterator[Stream]:
    address = f"https://localhost:{secure.port}"
    with httpx.Client(base_url=address, verify=certificate.client_context(), timeout=60) as http:
        yield Stream(http, stream_name())


def test_startup_line_has_an_https_url(secure: Server) -> None:
    assert secure.url.startswith("https://")


def test_streams_work_over_tls(stream: Stream) -> None:
    created = stream.put("hello ")
    assert created.status_code == 201
    assert created.headers["location"].startswith("https://")
    stream.append("world" * 100_000)
    assert stream.content() == b"hello " + b"world" * 100_000


def test_events_are_live_over_tls(secure: Server, certificate: Certificate, stream: Stream) -> None:
    stream.create()
    connection = RawConnection(secure, tls=certificate.client_context())
    with SseReader(secure, stream.name, connection=connection) as events:
        events.until_up_to_date()
        for number in range(10):
            stream.append(f"{number}")
            assert events.pair()[0].data == f"{number}"
        stream.close("last")
        assert events.pair()[1]["streamClosed"] is True
        assert events.ends()


def test_plain_http_on_the_tls_port_is_rejected(secure: Server, stream: Stream) -> None:
    with connect(secure) as connection:
        connection.send(encode("GET", "/healthz"))
        assert connection.ends()
    assert stream.http.get("/healthz").text == "ok"


def test_large_bodies_are_received_completely_over_tls(stream: Stream) -> None:
    """They bypass the HTTP parser, as without TLS."""
    body = bytes(range(256)) * 4000
    stream.create()
    for _ in range(2):
        assert stream.post(body).status_code == 204
    assert stream.content() == 2 * body


def test_client_that_does_not_trust_the_certificate_cannot_connect(secure: Server, stream: Stream) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        RawConnection(secure, tls=ssl.create_default_context())
    assert stream.http.get("/healthz").text == "ok"


def descriptors(server: Server) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


LIMIT = 20
SILENT = 100
BEYOND = REFUSED_MAX + 4
"""Connections beyond the limit that may be open for a moment."""


def healthy(server: Server, certificate: Certificate) -> bool:
    try:
        with RawConnection(server, tls=certificate.client_context()) as connection:
            return connection.request("GET", "/healthz").status == 200
    except (OSError, ConnectionEnded):
        return False


def test_handshakes_in_progress_count_as_connections_and_time_out(certificate: Certificate) -> None:
    """Clients that connect and send nothing used to be accepted without a limit, and stayed for a minute."""
    with (
        serve(
            DS_TLS__CERT_PATH=str(certificate.cert_path),
            DS_TLS__KEY_PATH=str(certificate.key_path),
            DS_SERVER__WORKERS="1",
            DS_SERVER__MAX_CONNECTIONS=str(LIMIT),
            DS_SERVER__READ_TIMEOUT_SECS="2",
        ) as server,
        ExitStack() as stack,
    ):
        assert healthy(server, certificate)
        before = descriptors(server)
        silent = [stack.enter_context(connect(server)) for _ in range(SILENT)]
        wait_until(lambda: "the limit is server.max_connections" in server.log())
        wait_until(lambda: descriptors(server) <= before + LIMIT + BEYOND)
        assert not healthy(server, certificate), "all places are taken"
        assert all(connection.ends(within_secs=10) for connection in silent)
        wait_until(lambda: healthy(server, certificate))
        assert server.log().count("the limit is server.max_connections") == 1, "once per minute"


def test_handshakes_of_clients_that_leave_are_not_counted(certificate: Certificate) -> None:
    with serve(
        DS_TLS__CERT_PATH=str(certificate.cert_path),
        DS_TLS__KEY_PATH=str(certificate.key_path),
        DS_SERVER__WORKERS="1",
        DS_SERVER__MAX_CONNECTIONS=str(LIMIT),
        DS_SERVER__READ_TIMEOUT_SECS="600",
    ) as server:
        for _ in range(3):
            with ExitStack() as stack:
                for _ in range(LIMIT + REFUSED_MAX):
                    stack.enter_context(connect(server))
                wait_until(lambda: not healthy(server, certificate))
            wait_until(lambda: healthy(server, certificate))


def test_connections_beyond_the_limit_get_503_over_tls(certificate: Certificate) -> None:
    with (
        serve(
            DS_TLS__CERT_PATH=str(certificate.cert_path),
            DS_TLS__KEY_PATH=str(certificate.key_path),
            DS_SERVER__WORKERS="1",
            DS_SERVER__MAX_CONNECTIONS="3",
        ) as server,
        ExitStack() as stack,
    ):
        tls = certificate.client_context()
        opened = [stack.enter_context(RawConnection(server, tls=tls)) for _ in range(3)]
        assert all(connection.request("GET", "/healthz").status == 200 for connection in opened)
        with RawConnection(server, tls=tls) as connection:
            assert connection.response().status == 503


def test_old_tls_versions_are_refused(secure: Server, certificate: Certificate) -> None:
    with RawConnection(secure, tls=certificate.client_context()) as connection:
        assert isinstance(connection.socket, ssl.SSLSocket)
        assert connection.socket.version() in ("TLSv1.2", "TLSv1.3")


def test_missing_certificate_stops_the_start(tmp_path: Path, certificate: Certificate) -> None:
    with (
        pytest.raises(AssertionError, match="ended with code"),
        serve(DS_TLS__CERT_PATH=str(tmp_path / "none.crt"), DS_TLS__KEY_PATH=str(certificate.key_path)),
    ):
        pass


def client_certificate(certificate: Certificate, own: Certificate) -> ssl.SSLContext:
    context = certificate.client_context()
    context.load_cert_chain(own.cert_path, own.key_path)
    return context


def test_only_clients_of_a_trusted_authority_can_connect(
    certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trusted = make_certificate(tmp_path_factory.mktemp("trusted"))
    foreign = make_certificate(tmp_path_factory.mktemp("foreign"))
    with serve(
        DS_TLS__CERT_PATH=str(certificate.cert_path),
        DS_TLS__KEY_PATH=str(certificate.key_path),
        DS_TLS__CLIENT_CA_PATH=str(trusted.cert_path),
    ) as server:
        address = f"https://localhost:{server.port}/healthz"
        assert httpx.get(address, verify=client_certificate(certificate, trusted)).text == "ok"
        for verify, alert in (
            (certificate.client_context(), "alert certificate required"),
            (client_certificate(certificate, foreign), "alert unknown ca"),
        ):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError), match=f"(?i){alert}"):
                httpx.get(address, verify=verify)
        wait_until(lambda: "the client sent no certificate; clients need a certificate that an" in server.log())
        assert server.log().count("a TLS connection was refused (1 since the last such line)") == 1, "once per minute"
        assert httpx.get(address, verify=client_certificate(certificate, trusted)).text == "ok"


def test_a_hangup_reloads_the_certificate_and_the_log_level(tmp_path: Path) -> None:
    first = make_certificate(tmp_path)
    (tmp_path / "settings.toml").write_text('[log]\nrust_log = "info"\n')
    with serve(
        arguments=("--config", str(tmp_path / "settings.toml")),
        DS_TLS__CERT_PATH=str(first.cert_path),
        DS_TLS__KEY_PATH=str(first.key_path),
    ) as server:
        address = f"https://localhost:{server.port}/healthz"
        old = first.client_context()
        with httpx.Client(verify=old) as kept:
            kept.get(address).raise_for_status()
            (tmp_path / "server.key").write_text("not a key")
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "the settings were not reloaded: tls.cert_path and tls.key_path are not" in server.log())
            assert httpx.get(address, verify=old).text == "ok", "a wrong file changes nothing"
            renewed = make_certificate(tmp_path)
            (tmp_path / "settings.toml").write_text('[log]\nrust_log = "debug"\n')
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: "reloaded certificate" in server.log())
            assert kept.get(address).text == "ok", "open connections stay open"
            assert httpx.get(address, verify=renewed.client_context()).text == "ok"
            with pytest.raises(httpx.ConnectError):
                httpx.get(address, verify=old)
        wait_until(lambda: "answered" in server.log())
