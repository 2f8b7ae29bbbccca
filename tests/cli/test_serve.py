"""`headwater serve`: startup, error messages and shutdown."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from tests.cli.test_commands import headwater_command
from tests.http.certificates import make_certificate
from tests.serving import serve


def test_server_listens_responds_and_exits_cleanly_on_sigterm() -> None:
    with serve() as server:
        assert httpx.get(f"{server.url}/healthz").text == "ok"
        assert f"headwater listening on http://127.0.0.1:{server.port}" in server.log()
        assert server.stop() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/healthz")


def test_startup_prints_the_data_directory_or_warns_that_memory_is_lost(tmp_path: Path) -> None:
    with serve(DS_STORAGE__MODE="memory") as server:
        assert "all streams are lost when the server stops" in server.log()
        assert f"stream browser at {server.url}/ui/" in server.log()
    with serve(DS_STORAGE__MODE="file-fast", DS_STORAGE__DATA_DIR=str(tmp_path / "data")) as server:
        assert f"storage mode file-fast, data in {tmp_path / 'data'}" in server.log()
        assert "lost" not in server.log()


def test_a_data_directory_selects_durable_storage(tmp_path: Path) -> None:
    with serve(arguments=("--data-dir", str(tmp_path / "mine"))) as server:
        assert f"storage mode file-durable, data in {tmp_path / 'mine'}" in server.log()
        httpx.put(f"{server.url}/v1/stream/kept", content=b"x").raise_for_status()
    with serve(arguments=("--data-dir", str(tmp_path / "mine"), "--mode", "file-fast")) as server:
        assert httpx.get(f"{server.url}/v1/stream/kept").content == b"x"
    done = headwater_command("serve", "--port", "0", "--mode", "memory", "--data-dir", "mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "--data-dir has no effect with --mode memory" in done.stderr


def test_port_in_use_is_reported_with_a_hint(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = headwater_command("serve", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"headwater: port {port} on 127.0.0.1 is in use; stop the process that listens there, or choose another port"
        " with --port (0 picks a free one)"
    )
    assert "Traceback" not in done.stderr


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    # 192.0.2.0/24 is reserved for documentation, so no machine has it. Nothing is sent there, only bound.
    done = headwater_command("serve", "--port", "0", "--host", "192.0.2.1", cwd=tmp_path)
    assert done.returncode == 1
    assert "192.0.2.1 is not an address of this machine" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_invalid_log_filter_prevents_the_start(tmp_path: Path) -> None:
    done = headwater_command("serve", "--port", "0", cwd=tmp_path, RUST_LOG="bogus")
    assert done.returncode == 2
    assert "RUST_LOG" in done.stderr
    assert "'bogus' is neither a level nor module=level" in done.stderr


def test_reference_servers_module_in_the_log_filter_selects_all_of_ours() -> None:
    with serve(RUST_LOG="warn,durable_streams=debug") as server:
        httpx.get(f"{server.url}/v1/stream/nothing")
        assert server.stop() == 0
        assert "DEBUG" in server.log()


def test_missing_certificate_is_reported(tmp_path: Path) -> None:
    done = headwater_command(
        "serve", "--port", "0", cwd=tmp_path, DS_TLS__CERT_PATH="cert.pem", DS_TLS__KEY_PATH="key.pem"
    )
    assert done.returncode == 2
    assert done.stderr == "headwater: tls.cert_path: cannot read cert.pem: No such file or directory\n"


def test_files_that_are_not_certificates_are_reported(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("not a certificate")
    (tmp_path / "key.pem").write_text("not a key")
    done = headwater_command(
        "serve", "--port", "0", cwd=tmp_path, DS_TLS__CERT_PATH="cert.pem", DS_TLS__KEY_PATH="key.pem"
    )
    assert done.returncode == 1
    assert "tls.cert_path and tls.key_path are not a valid pair of PEM files" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_storage_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the data directory should be")
    done = headwater_command(
        "serve", "--port", "0", cwd=tmp_path, DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR="taken"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("headwater: storage: ")
    assert "Traceback" not in done.stderr


def test_server_uses_tls_if_both_files_are_set(tmp_path: Path) -> None:
    made = make_certificate(tmp_path)
    with serve(DS_TLS__CERT_PATH=str(made.cert_path), DS_TLS__KEY_PATH=str(made.key_path)) as server:
        assert server.url.startswith("https://")
        answer = httpx.get(f"https://localhost:{server.port}/healthz", verify=made.client_context())
        assert answer.text == "ok"


def test_the_settings_file_of_the_working_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/default.toml").write_text('[http]\ncors_origins = "https://app.example.com"\n')
    with serve(directory=tmp_path) as server:
        answer = httpx.get(f"{server.url}/healthz", headers={"Origin": "https://app.example.com"})
    assert answer.headers["access-control-allow-origin"] == "https://app.example.com"


def test_json_logs_are_one_object_per_line() -> None:
    with serve(DS_LOG__FORMAT="json", DS_LOG__RUST_LOG="debug") as server:
        httpx.get(f"{server.url}/healthz")
        server.stop()
        entries = [json.loads(line) for line in server.log().splitlines()]
    assert any("listening on" in entry["message"] for entry in entries)
    assert all({"time", "level", "logger", "message"} <= entry.keys() for entry in entries)


def test_requests_are_logged_at_debug_and_not_at_info() -> None:
    def lines_about_the_request(level: str) -> list[str]:
        with serve(DS_LOG__RUST_LOG=level) as server:
            httpx.put(server.stream_url("a-name-to-look-for"))
            server.stop()
            return [line for line in server.log().splitlines() if "a-name-to-look-for" in line]

    assert lines_about_the_request("info") == []
    assert len(lines_about_the_request("debug")) == 1
