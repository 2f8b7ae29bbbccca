"""The command line in a real process: output and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import headwater
from headwater.core import native
from tests.serving import serve, server_environment


def headwater_command(
    *arguments: str, cwd: Path, timeout_secs: float = 120, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headwater", *arguments],
        cwd=cwd,
        env=server_environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_secs,
    )


def test_version(tmp_path: Path) -> None:
    done = headwater_command("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"headwater {headwater.__version__} ({native.BUILD})\n")
    done = headwater_command("--version", cwd=tmp_path, HEADWATER_PURE="1")
    assert (done.returncode, done.stdout) == (0, f"headwater {headwater.__version__} (pure)\n")


def test_without_a_command_the_commands_are_listed(tmp_path: Path) -> None:
    done = headwater_command(cwd=tmp_path)
    assert done.returncode == 0
    assert "serve" in done.stdout
    assert "config" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serv"], "serv"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "99999"], "server.port: got '99999' from --port; it takes a whole number"),
        (["serve", "--port", "http"], "server.port: got 'http' from --port"),
        (["serve", "--profile", "nowhere"], "--profile nowhere: there is no config/nowhere.toml"),
        (["serve", "--config", "nowhere.toml"], "--config nowhere.toml: no such file"),
        (["config"], "Missing command"),
        (["config", "show", "--format", "xml"], "xml"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = headwater_command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("headwater: ")
    assert says in done.stderr


def test_invalid_environment_variable_prevents_the_start(tmp_path: Path) -> None:
    done = headwater_command("serve", cwd=tmp_path, DS_STORAGE__MODE="floppy")
    assert done.returncode == 2
    assert done.stderr == (
        "headwater: storage.mode: got 'floppy' from DS_STORAGE__MODE;"
        " it takes memory, file-fast, file-durable, acid or cluster\n"
    )


def test_config_show_prints_the_origin_of_each_value(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/default.toml").write_text("[server]\nport = 1\nidle_timeout_secs = 5\n")
    (tmp_path / "config/dev.toml").write_text("[registry]\nenabled = true\n")
    done = headwater_command(
        "config", "show", "--profile", "dev", "--format", "json", cwd=tmp_path, DS_SERVER__PORT="2"
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["server.port"] == {"value": 2, "origin": "DS_SERVER__PORT"}
    assert shown["server.idle_timeout_secs"] == {"value": 5.0, "origin": "config/default.toml"}
    assert shown["registry.enabled"] == {"value": True, "origin": "config/dev.toml"}
    assert shown["storage.data_dir"] == {"value": "data/streams", "origin": "default"}
    assert shown["tls.cert_path"] == {"value": None, "origin": "default"}


def test_config_show_prints_one_row_per_setting(tmp_path: Path) -> None:
    long_origins = ",".join(f"https://app-{number}.example.com" for number in range(3))
    done = headwater_command("config", "show", cwd=tmp_path, DS_HTTP__CORS_ORIGINS=long_origins)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert rows["http.cors_origins"] == [long_origins, "DS_HTTP__CORS_ORIGINS"]
    assert rows["server.port"] == ["4437", "default"]
    assert rows["limits.max_stream_bytes"] == ["default"]


def test_config_show_does_not_import_the_server(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from headwater.cli import main\n"
        "try:\n    main(['config', 'show', '--format', 'json'])\n"
        "except SystemExit:\n    pass\n"
        "print([name for name in sys.modules if name in ('uvloop', 'httptools', 'lmdb', 'headwater.http')],"
        " file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "[]\n"


@pytest.mark.parametrize("profile", [None, "dev", "prod"])
def test_the_shipped_files_are_valid(profile: str | None) -> None:
    repository = Path(__file__).resolve().parents[2]
    chosen = ["--profile", profile] if profile else []
    done = headwater_command("config", "show", "--format", "json", *chosen, cwd=repository)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["server.port"]["value"] == 4437


def test_store_rotate_key_creates_the_next_webhook_key(tmp_path: Path) -> None:
    data = str(tmp_path / "data")

    def kids(url: str) -> list[str]:
        return [key["kid"] for key in httpx.get(f"{url}/v1/stream/__ds/jwks.json").json()["keys"]]

    with serve(DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=data) as server:
        assert headwater_command("store", "rotate-key", "--data-dir", data, cwd=tmp_path).returncode == 0
        (old,) = kids(server.url)
        done = headwater_command("store", "rotate-key", "--data-dir", data, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        new, kept = kids(server.url)
        assert kept == old
        assert done.stdout.startswith(f"key {new} is published and will sign from 2")
    with serve(DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=data) as server:
        assert kids(server.url) == [new, old], "it is durable"


def test_store_rotate_key_needs_the_server_that_signs(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    done = headwater_command("store", "rotate-key", "--data-dir", data, cwd=tmp_path)
    assert done.returncode != 0
    assert "no server has" in done.stderr
    with serve(DS_SUBSCRIPTIONS__ENABLED="false", DS_STORAGE__MODE="acid", DS_STORAGE__DATA_DIR=data):
        done = headwater_command("store", "rotate-key", "--data-dir", data, cwd=tmp_path)
    assert done.returncode != 0
    assert "subscriptions are disabled on this server" in done.stderr
