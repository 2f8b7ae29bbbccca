"""Envoy's admin interface, which has no authentication: a private socket, or a read-only port."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from headwater.stack.services import unix_socket_probe
from tests.serving import serve, server_environment
from tests.stack.proxying import proxied
from tests.stack.stacks import stack


def test_admin_interface_is_a_private_socket_even_with_a_long_path(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 15) / ("longer" * 15)
    deep.mkdir(parents=True)
    with stack(deep) as made:
        made.up()
        admin = made.data / "run" / "envoy" / "admin.sock"
        assert stat.S_IMODE(admin.stat().st_mode) == 0o600
        assert stat.S_IMODE(admin.parent.stat().st_mode) == 0o700
        assert unix_socket_probe(admin, "/ready")() == ""
        assert json.loads((made.data / "run" / "envoy.json").read_bytes())["admin"]["address"].keys() == {"pipe"}


def test_admin_port_is_read_only() -> None:
    with serve() as server, proxied(server.port) as proxy:
        admin = f"http://127.0.0.1:{proxy.admin_port}"
        for path in ("/ready", "/stats/prometheus", "/stats?filter=http", "/clusters"):
            assert httpx.get(f"{admin}{path}").status_code == 200, path
        for path in (
            "/quitquitquit",
            "/drain_listeners",
            "/healthcheck/fail",
            "/logging?level=trace",
            "/runtime_modify",
        ):
            assert httpx.post(f"{admin}{path}").status_code in {403, 404}, path
        assert proxy.raw("GET", "/healthz").status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_written_configuration_has_an_admin_port_only_on_request_and_on_loopback(tmp_path: Path, host: str) -> None:
    def written(**env: str) -> dict[str, object]:
        file = tmp_path / "envoy.json"
        command = ["up", "--write-envoy-config", str(file), "--upstream", "server:4437", "--data-dir", str(tmp_path)]
        environment = server_environment(DS_PROXY__HOST=host, **env)
        subprocess.run(
            [sys.executable, "-m", "headwater", *command], cwd=tmp_path, env=environment, check=True, timeout=60
        )
        config: dict[str, object] = json.loads(file.read_bytes())
        return config

    assert "admin" not in written()
    admin = written(DS_PROXY__ADMIN_PORT="9901")["admin"]
    assert isinstance(admin, dict)
    assert admin["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 9901}
