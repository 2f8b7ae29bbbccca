"""The services of each stack profile and how to run them: the server, Envoy, Postgres, the sync, tools.

Invariant: every file of a service is inside the stack's directory, and every port is a setting.
"""

from __future__ import annotations

import shutil
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headwater.config import LoadedSettings, Settings
from headwater.stack.envoy import EnvoyEndpoints, Upstream, envoy_config, find_envoy, validate
from headwater.stack.keys import KeyRing, replace_file
from headwater.stack.server_address import ServerAddress, StackSettingsError, reachable, server_address
from headwater.stack.services import Service, UnavailableService, http_probe, no_probe, port_probe, unix_socket_probe
from headwater.stack.state import StackDirectory

if TYPE_CHECKING:
    from headwater.stack.database import LocalPostgres

DURABLE_MODE: Final = "file-durable"
DATABASE: Final = "durable_streams"
DEFAULT_SHAPES: Final = "items"
ADMIN_SOCKET: Final = "admin.sock"
_BASELINE: Final = frozenset(("default", "config/default.toml"))


class Profile(StrEnum):
    """Which services to start. Each profile includes the services of the previous one."""

    DEFAULT = "default"
    SYNC = "sync"
    DEV = "dev"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """The input of `headwater up`: settings, directory, profile."""

    loaded: LoadedSettings
    directory: StackDirectory
    profile: Profile
    jwks_url: str
    config_file: Path | None = None
    nodes: int = 0
    """With `--nodes`: a cluster of so many nodes instead of one server."""

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def server(self) -> ServerAddress:
        """The address that other services use."""
        return server_address(self.settings)


def check_settings(settings: Settings) -> None:
    if settings.tls.client_ca_path is not None:
        raise StackSettingsError(
            "tls.client_ca_path: the services of the stack have no client certificates. Use mutual TLS without `up`, or"
            " between clients and your own proxy."
        )
    if settings.shapes.port == 0:
        raise StackSettingsError("shapes.port is 0 (a random port), but Envoy must know the port; set a fixed one")
    if settings.server.port == 0:
        raise StackSettingsError(
            "server.port is 0 (a random port), but the other services of the stack must know the port; set a fixed one"
        )


def services_for(plan: StackPlan) -> list[Service | UnavailableService]:
    """List the services in the order in which they start."""
    if plan.nodes:
        return _cluster(plan)
    services: list[Service | UnavailableService] = [_server(plan), _envoy(plan)]
    if plan.profile is Profile.DEFAULT:
        return services
    from headwater.stack.database import LocalPostgres  # noqa: PLC0415  (needs the packages of this profile)
    from headwater.stack.roles import FORMER_DEFAULT, resolve_credentials  # noqa: PLC0415

    settings = plan.settings.stack
    credentials = resolve_credentials(plan.directory.database_credentials, settings.postgres_password)
    database = LocalPostgres(
        plan.directory.root / "postgres",
        settings.postgres_port,
        DATABASE,
        credentials.superuser,
        (credentials.former, FORMER_DEFAULT),
        credentials.pipeline,
    )
    services += [_postgres(database), _shapes(plan, database.pipeline_url), _sync(plan, database.pipeline_url)]
    if plan.profile is Profile.DEV:
        services += [_adminer(plan), _heartbeat(plan, database.pipeline_url)]
    return services


def _cluster(plan: StackPlan) -> list[Service | UnavailableService]:
    """A cluster behind Envoy, which has the first node where it has the server otherwise."""
    from headwater.stack.cluster_services import cluster_services  # noqa: PLC0415  (needs Postgres)

    others = tuple(Upstream("127.0.0.1", plan.settings.server.port + number) for number in range(1, plan.nodes))
    services = cluster_services(plan.settings, plan.directory, plan.nodes, plan.config_file)
    return [*services, _envoy(plan, others)]


def _server(plan: StackPlan) -> Service:
    settings, origins = plan.settings, plan.loaded.origins
    environment = {
        "DS_STORAGE__DATA_DIR": str(plan.directory.streams),
        "DS_SERVER__WORKERS": str(settings.server.workers or "auto"),
    }
    if origins["storage.mode"] in _BASELINE:
        # The stack stores data durably unless the user chose another mode.
        environment["DS_STORAGE__MODE"] = DURABLE_MODE
    if origins["server.allowed_hosts"] in _BASELINE:
        # Envoy checks the token and forwards the Host header of the client unchanged.
        environment["DS_SERVER__ALLOWED_HOSTS"] = "proxied" if settings.server.is_loopback else "*"
    if origins["server.trusted_proxies"] in _BASELINE:
        # Envoy runs beside the server.
        environment["DS_SERVER__TRUSTED_PROXIES"] = "127.0.0.1, ::1"
    # Envoy checks tokens, so the server must not.
    environment["DS_AUTH__TOKEN"] = ""
    if plan.profile is Profile.DEV and origins["registry.enabled"] in _BASELINE:
        environment["DS_REGISTRY__ENABLED"] = "true"
    config = ("--config", str(plan.config_file)) if plan.config_file is not None else ()
    address, port = plan.server, settings.server.port
    return Service(
        "server",
        (sys.executable, "-m", "headwater", "serve", "--port", str(port), *config),
        http_probe(f"{address.url}/readyz", address.ca_file),
        port,
        port_variable="DS_SERVER__PORT",
        address=address.url,
        environment=environment,
    )


def _envoy(plan: StackPlan, other_nodes: tuple[Upstream, ...] = ()) -> Service:
    settings = plan.settings
    executable = find_envoy(settings)
    config = plan.directory.run / "envoy.json"
    server = Upstream(reachable(settings.server.host), settings.server.port)
    private = plan.directory.run / "envoy"
    # A relative path, because the path of a socket is limited to about 100 bytes.
    shapes = None
    if plan.profile is not Profile.DEFAULT:
        shapes = Upstream(reachable(settings.shapes.host), settings.shapes.port)
    endpoints = EnvoyEndpoints(server, plan.jwks_url, shapes=shapes, other_nodes=other_nodes, admin_socket=ADMIN_SOCKET)

    def prepare() -> None:
        private.mkdir(mode=0o700, exist_ok=True)
        private.chmod(0o700)
        replace_file(config, envoy_config(settings, endpoints).encode(), 0o600)
        validate(executable, config)

    scheme = "https" if settings.proxy.tls_cert_path is not None else "http"
    return Service(
        "envoy",
        (
            *(str(executable), "--config-path", str(config), "--concurrency", str(settings.proxy.threads)),
            # Hot restart uses a name that all Envoys of one machine share.
            *("--disable-hot-restart", "--log-level", "warning", "--file-flush-interval-msec", "500"),
        ),
        http_probe(f"http://127.0.0.1:{settings.proxy.admin_port}/ready")
        if settings.proxy.admin_port
        else unix_socket_probe(private / ADMIN_SOCKET, "/ready"),
        settings.proxy.port,
        host=settings.proxy.host,
        port_variable="DS_PROXY__PORT",
        address=f"{scheme}://{reachable(settings.proxy.host)}:{settings.proxy.port}",
        working_directory=private,
        prepare=prepare,
    )


def _postgres(database: LocalPostgres) -> Service:
    database.directory.mkdir(parents=True, exist_ok=True)
    options = database.popen_options
    owner = (options["user"], options["group"]) if "user" in options else None

    def probe() -> str:
        import psycopg  # noqa: PLC0415

        from headwater.stack.database import LocalPostgresError  # noqa: PLC0415

        try:
            database.wait_until_ready(0.0)
        except (LocalPostgresError, psycopg.Error) as error:
            return str(error).splitlines()[0]
        return ""

    return Service(
        "postgres",
        tuple(database.command),
        probe,
        database.port,
        port_variable="DS_STACK__POSTGRES_PORT",
        address=f"postgresql://postgres@127.0.0.1:{database.port}/{database.name}",
        environment={"LC_ALL": "C.UTF-8", "HOME": "/"},
        working_directory=Path("/"),
        owner=owner,
        stop_signal=signal.SIGINT,
        prepare=database.prepare,
    )


def _sync(plan: StackPlan, postgres_url: str) -> Service:
    settings = plan.settings.stack
    config = ("--config", str(settings.sync_config.absolute())) if settings.sync_config is not None else ()
    paths = ("--checkpoints", str(plan.directory.root / "pipeline"), "--metrics-port", str(settings.sync_port))
    return Service(
        "sync",
        (sys.executable, "-m", "headwater", "sync", *paths, *config),
        http_probe(f"http://127.0.0.1:{settings.sync_port}/readyz"),
        settings.sync_port,
        port_variable="DS_STACK__SYNC_PORT",
        address=f"http://127.0.0.1:{settings.sync_port}/metrics",
        environment={**plan.server.environment, **_otel(plan.settings), "POSTGRES_URL": postgres_url},
    )


def _otel(settings: Settings) -> dict[str, str]:
    """The settings of OpenTelemetry, which the sync gets from its environment."""
    otel = settings.otel
    return {
        "DS_OTEL__ENDPOINT": otel.endpoint,
        "DS_OTEL__SAMPLE_RATIO": str(otel.sample_ratio),
        "DS_OTEL__METRICS_INTERVAL_SECS": str(otel.metrics_interval_secs),
    }


def _shapes(plan: StackPlan, postgres_url: str) -> Service:
    settings = plan.settings.shapes
    environment = {**plan.server.environment, "POSTGRES_URL": postgres_url}
    if plan.loaded.origins["shapes.tables"] in _BASELINE:
        # The table that the sync follows by default.
        environment["DS_SHAPES__TABLES"] = DEFAULT_SHAPES
    config = ("--config", str(plan.config_file)) if plan.config_file is not None else ()
    address = f"http://{reachable(settings.host)}:{settings.port}"
    return Service(
        "shapes",
        (sys.executable, "-m", "headwater", "shapes", *config),
        http_probe(f"{address}/v1/health"),
        settings.port,
        port_variable="DS_SHAPES__PORT",
        host=settings.host,
        address=f"{address}/v1/shape",
        environment=environment,
    )


def _adminer(plan: StackPlan) -> Service | UnavailableService:
    settings = plan.settings.stack
    php = shutil.which("php")
    needed = (("php", php), (str(settings.adminer_file), settings.adminer_file.is_file()))
    missing = [name for name, found in needed if not found]
    if php is None or missing:
        how = "on Debian: apt-get install adminer php-cli php-pgsql"
        return UnavailableService("adminer", f"missing: {' and '.join(missing)} ({how})")
    address = f"127.0.0.1:{settings.adminer_port}"
    return Service(
        "adminer",
        (php, "-S", address, str(settings.adminer_file)),
        port_probe("127.0.0.1", settings.adminer_port),
        settings.adminer_port,
        port_variable="DS_STACK__ADMINER_PORT",
        address=f"http://{address}",
    )


def _heartbeat(plan: StackPlan, postgres_url: str) -> Service:
    interval = plan.settings.stack.heartbeat_interval_secs
    return Service(
        "heartbeat",
        (sys.executable, "-m", "headwater.stack.heartbeat", str(interval)),
        no_probe(),
        environment={**plan.server.environment, "POSTGRES_URL": postgres_url},
    )


def jwks_file_for(settings: Settings, directory: StackDirectory) -> Path:
    """Return the JWKS file that Envoy verifies tokens with. Creates the stack's own keys if no file is configured."""
    if settings.auth.jwks_file is not None:
        return settings.auth.jwks_file.absolute()
    ring = KeyRing(directory.keys)
    ring.ensure()
    return ring.jwks_file
