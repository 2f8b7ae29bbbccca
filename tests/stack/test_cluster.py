"""`headwater up --nodes`: a cluster on one machine that survives the loss of a node and of Postgres' primary."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from headwater.config import Settings
from headwater.stack.cluster_services import SETTINGS_NAME, cluster_services
from headwater.stack.envoy import EnvoyEndpoints, Upstream, envoy_config
from headwater.stack.state import StackDirectory
from tests.ports import free_ports
from tests.stack.stacks import Stack, stack
from tests.waiting import wait_until

TEXT = {"Content-Type": "text/plain"}
NAMES = [f"/v1/stream/s-{number}" for number in range(12)]


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that the user of Postgres can enter."""
    made = Path(tempfile.mkdtemp(prefix="headwater-stack-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def shards(made: Stack) -> list[dict[str, object]]:
    done = made.run("cluster", "status", "--json")
    found: list[dict[str, object]] = json.loads(done.stdout)["shards"] if done.stdout else []
    return found


def test_envoy_spreads_requests_over_the_nodes_that_answer() -> None:
    nodes = tuple(Upstream("127.0.0.1", port) for port in (1, 2, 3))
    config = json.loads(
        envoy_config(Settings(), EnvoyEndpoints(nodes[0], "http://127.0.0.1/jwks", other_nodes=nodes[1:]))
    )
    streams = next(each for each in config["static_resources"]["clusters"] if each["name"] == "streams")
    endpoints = streams["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [each["endpoint"]["address"]["socket_address"]["port_value"] for each in endpoints] == [1, 2, 3]
    assert streams["health_checks"][0]["http_health_check"]["path"] == "/healthz"


def test_settings_of_the_nodes_are_kept_for_commands_that_work_on_the_cluster(tmp_path: Path) -> None:
    """Only the owner of the directory may read them: they have the secrets of the cluster."""
    services = cluster_services(Settings(), StackDirectory(tmp_path), 3, None)
    file = tmp_path / SETTINGS_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    read = ["bash", "-c", f"set -a; . {file}; env -0"]
    done = subprocess.run(read, env={}, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.rstrip("\0").split("\0"))
    (node,) = [service for service in services if service.name == "node-2"]
    assert node.environment.items() >= {name: found[name] for name in found if name.startswith(("DS_", "AWS_"))}.items()
    assert found["DS_CLUSTER__SHARDS"] == "6"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_cluster_starts_with_one_command_and_survives_a_node_and_the_primary(directory: Path) -> None:
    settings = {
        "DS_SERVER__PORT": str(free_ports(3)[0]),
        "DS_STACK__POSTGRES_PORT": str(free_ports(3)[0]),
        "DS_STACK__STORE_PORT": str(free_ports(8)[0]),
    }
    with stack(directory, **settings) as made:
        made.up("--nodes", "3")
        nodes = {"node-0", "node-1", "node-2"}
        wait_until(
            lambda: shards(made),
            lambda found: all(each["is_serving"] for each in found) and {each["owner"] for each in found} == nodes,
            what="all shards, at all nodes",
        )
        with made.client(made.token("--scope", "streams:admin")) as client:
            client.timeout = 30
            assert all(each["figures"] for each in shards(made)), "a node says what its shards have in the object store"
            for name in NAMES:
                assert client.put(name, headers=TEXT, content=b"one;").status_code == 201
            servers = made.data / "postgres-servers"
            former = json.loads((servers / "servers.json").read_text())["primary"]
            os.kill(int((servers / f"pg-{former}" / "data" / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
            wait_until(
                lambda: json.loads((servers / "servers.json").read_text()),
                lambda state: state["primary"] != former and state["former"] is None,
                what="another primary, and the former one as a standby",
            )
            written = made.run("psql", "-c", "CREATE TABLE written ()")
            assert written.returncode == 0, written.stderr
            for name in NAMES:
                appended(client, name, b"two;")
            node = psutil.Process(made.part("node-1")["pid"])
            for process in (node, *node.children(recursive=True)):
                process.kill()
            for name in NAMES:
                appended(client, name, b"three;")
                assert client.get(name).content.startswith(b"one;two;")
        wait_until(lambda: made.run("cluster", "status").returncode, lambda code: code == 0, what="a whole cluster")


def appended(client: httpx.Client, name: str, body: bytes) -> None:
    """Append with a client that tries again, as every client of a cluster should."""

    def attempt() -> int:
        try:
            return client.post(name, content=body, headers=TEXT).status_code
        except httpx.HTTPError:
            return 0

    wait_until(attempt, lambda status: status == 204, what="an append")
