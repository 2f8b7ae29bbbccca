"""The server address for the other services: a name in its certificate, and the trusted certificates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headwater.stack.server_address import ServerAddress, StackSettingsError, server_address
from headwater.stack.services import http_probe
from tests.http.certificates import make_certificate
from tests.serving import serve, server_environment
from tests.stack.proxying import settings_of


def tls(directory: Path, **env: str) -> dict[str, str]:
    made = make_certificate(directory)
    return {"DS_TLS__CERT_PATH": str(made.cert_path), "DS_TLS__KEY_PATH": str(made.key_path), **env}


def test_without_tls_the_address_is_http() -> None:
    found = server_address(settings_of(DS_SERVER__HOST="0.0.0.0"))
    assert found == ServerAddress("http://127.0.0.1:4437")
    assert found.environment == {"DS_SERVER_URL": "http://127.0.0.1:4437"}


def test_with_tls_the_address_uses_a_name_of_the_certificate_which_is_trusted_if_self_signed(tmp_path: Path) -> None:
    variables = tls(tmp_path)
    found = server_address(settings_of(**variables, DS_SERVER__HOST="0.0.0.0"))
    assert found == ServerAddress("https://127.0.0.1:4437", tmp_path / "server.crt")
    assert found.environment["DS_CA_FILE"] == str(tmp_path / "server.crt")
    with pytest.raises(StackSettingsError, match=r"valid for 127.0.0.1, localhost, but .*10.0.0.7.*stack.server_url"):
        server_address(settings_of(**variables, DS_SERVER__HOST="10.0.0.7"))
    named = settings_of(**variables, DS_SERVER__HOST="10.0.0.7", DS_STACK__SERVER_URL="https://localhost:4437/")
    assert server_address(named).url == "https://localhost:4437"
    with pytest.raises(StackSettingsError, match="server_ca_path"):
        server_address(settings_of(**variables, DS_STACK__SERVER_CA_PATH="/nowhere"))


def test_probe_and_commands_verify_the_certificate(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    with serve(DS_TLS__CERT_PATH=str(made.cert_path), DS_TLS__KEY_PATH=str(made.key_path)) as server:
        url = f"https://127.0.0.1:{server.port}"
        certificate = tmp_path / "server.crt"
        assert http_probe(f"{url}/readyz", certificate)() == ""
        assert "CERTIFICATE_VERIFY_FAILED" in http_probe(f"{url}/readyz")()

        def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "headwater", *arguments],
                env=server_environment(DS_URL=url, **env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
            )

        assert run("create", "over/tls", "--ca-file", str(certificate)).returncode == 0
        assert run("append", "over/tls", "1", DS_CA_FILE=str(certificate)).returncode == 0
        assert run("read", "over/tls", DS_CA_FILE=str(certificate)).stdout == "1\n"
        refused = run("read", "over/tls")
        assert refused.returncode == 1
        assert "certificate" in refused.stderr.lower()
        wrong = run("read", "over/tls", "--ca-file", str(tmp_path / "server.key"))
        assert wrong.returncode == 2
        assert "--ca-file" in wrong.stderr


def test_probe_reports_the_detail_of_an_error_response() -> None:
    with serve(DS_AUTH__TOKEN="a-token-of-the-tests") as server:
        url = f"http://127.0.0.1:{server.port}/v1/stream/s"
        assert http_probe(url)().startswith(f"{url} returned 401: The server requires its token")
