"""Which parts a profile has, and how each is run: the server or its shards, Envoy, Postgres, the sync, tools.

Invariant: everything a part keeps lies below the stack's directory; everything it listens on is a setting.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headwater.config import LoadedSettings, Settings
from headwater.stack.envoy import Door, Upstream, envoy_config, find_envoy, validate
from headwater.stack.keys import KeyRing, replace_file
from headwater.stack.parts import Absent, Part, answers, answers_on_socket, listens, runs
from headwater.stack.server_address import ServerAddress, UnsafeSettings, reachable, server_address
from headwater.stack.state import StackDirectory

if TYPE_CHECKING:
    from headwater.stack.database import Database

DURABLE_MODE: Final = "file-durable"
DATABASE: Final = "durable_streams"
ADMIN_SOCKET: Final = "admin.sock"
_BASELINE: Final = frozenset(("default", "config/default.toml"))


class Profile(StrEnum):
    """How much of the stack: each has all of the one before."""

    DEFAULT = "default"
    SYNC = "sync"
    DEV = "dev"


@dataclass(frozen=True, slots=True)
class Plan:
    """What `headwater up` was asked for."""

    loaded: LoadedSettings
    directory: StackDirectory
    profile: Profile
    shards: int
    jwks_url: str
    config_file: Path | None = None

    @property
    def settings(self) -> Settings:
        return self.loaded.settings

    @property
    def server(self) -> ServerAddress:
        """What the other parts talk to: the server, or the listener of Envoy that stands for all its shards."""
        listening = self.settings.server
        is_tls = self.settings.tls.enabled and self.shards == 1
        return server_address(self.settings, listening.host, listening.port, tls=is_tls)


def check_settings(settings: Settings) -> None:
    if settings.server.port == 0:
        raise UnsafeSettings("server.port is 0: in the stack every port is known beforehand; set one")


def parts_of(plan: Plan) -> list[Part | Absent]:
    """The parts in the order in which they are started."""
    parts: list[Part | Absent] = [*_servers(plan), _envoy(plan)]
    if plan.profile is Profile.DEFAULT:
        return parts
    from headwater.stack.database import Database  # noqa: PLC0415  (needs the packages of this profile)
    from headwater.stack.roles import FORMER_DEFAULT, settle_credentials  # noqa: PLC0415

    settings = plan.settings.stack
    credentials = settle_credentials(plan.directory.database_credentials, settings.postgres_password)
    database = Database(
        plan.directory.root / "postgres",
        settings.postgres_port,
        DATABASE,
        credentials.superuser,
        (credentials.former, FORMER_DEFAULT),
        credentials.pipeline,
    )
    parts += [_postgres(database), _sync(plan, database.pipeline_url)]
    if plan.profile is Profile.DEV:
        parts += [_adminer(plan), _heartbeat(plan, database.pipeline_url)]
    return parts


def _servers(plan: Plan) -> list[Part]:
    settings = plan.settings
    if plan.shards == 1:
        return [_server(plan, "server", settings.server.port, plan.directory.streams(0, 1), {})]
    # What would only know a part of the streams is switched off in each of them; the policy says why to who asks.
    alone = {"DS_REGISTRY__ENABLED": "false", "DS_SUBSCRIPTIONS__ENABLED": "false"}
    return [
        _server(
            plan,
            f"server-{shard}",
            settings.stack.shard_port + shard,
            plan.directory.streams(shard, plan.shards),
            {**alone, "DS_SERVER__HOST": "127.0.0.1"},
        )
        for shard in range(plan.shards)
    ]


def _server(plan: Plan, name: str, port: int, streams: Path, more: Mapping[str, str]) -> Part:
    settings, origins = plan.settings, plan.loaded.origins
    environment = {"DS_STORAGE__DATA_DIR": str(streams), **more}
    if origins["storage.mode"] in _BASELINE:
        # Behind `up`, what was acknowledged is kept unless somebody chose otherwise.
        environment["DS_STORAGE__MODE"] = DURABLE_MODE
    if origins["server.allowed_hosts"] in _BASELINE:
        # Envoy checks a token, and passes the host on that its client asked for.
        environment["DS_SERVER__ALLOWED_HOSTS"] = "*"
    # The tokens of requests are Envoy's business here.
    environment["DS_AUTH__TOKEN"] = ""
    if plan.profile is Profile.DEV and "DS_REGISTRY__ENABLED" not in more and origins["registry.enabled"] in _BASELINE:
        environment["DS_REGISTRY__ENABLED"] = "true"
    config = ("--config", str(plan.config_file)) if plan.config_file is not None else ()
    listens_on = environment.get("DS_SERVER__HOST", settings.server.host)
    address = server_address(settings, listens_on, port, tls=settings.tls.enabled, is_shard=plan.shards > 1)
    return Part(
        name,
        (sys.executable, "-m", "headwater", "serve", "--port", str(port), *config),
        answers(f"{address.url}/readyz", address.ca_file),
        port,
        address=address.url,
        environment=environment,
    )


def _envoy(plan: Plan) -> Part:
    settings = plan.settings
    executable = find_envoy(settings)
    config = plan.directory.run / "envoy.json"
    if plan.shards == 1:
        upstreams: tuple[Upstream, ...] = (Upstream(reachable(settings.server.host), settings.server.port),)
    else:
        first = settings.stack.shard_port
        upstreams = tuple(Upstream("127.0.0.1", first + shard) for shard in range(plan.shards))
    private = plan.directory.run / "envoy"
    direct_port = settings.server.port if plan.shards > 1 else None
    # Relative: the path of a socket is limited to about a hundred bytes.
    door = Door(upstreams, plan.jwks_url, direct_port=direct_port, admin_socket=ADMIN_SOCKET)

    def prepare() -> None:
        private.mkdir(mode=0o700, exist_ok=True)
        private.chmod(0o700)
        replace_file(config, envoy_config(settings, door).encode(), 0o600)
        validate(executable, config)

    scheme = "https" if settings.proxy.tls_cert_path is not None else "http"
    return Part(
        "envoy",
        (
            *(str(executable), "--config-path", str(config), "--concurrency", str(settings.proxy.threads)),
            # Hot restart takes a name that all Envoys of a machine share.
            *("--disable-hot-restart", "--log-level", "warning", "--file-flush-interval-msec", "500"),
        ),
        answers(f"http://127.0.0.1:{settings.proxy.admin_port}/ready")
        if settings.proxy.admin_port
        else answers_on_socket(private / ADMIN_SOCKET, "/ready"),
        settings.proxy.port,
        host=settings.proxy.host,
        address=f"{scheme}://{reachable(settings.proxy.host)}:{settings.proxy.port}",
        working_directory=private,
        prepare=prepare,
    )


def _postgres(database: Database) -> Part:
    database.directory.mkdir(parents=True, exist_ok=True)
    options = database.popen_options
    owner = (options["user"], options["group"]) if "user" in options else None

    def probe() -> str:
        import psycopg  # noqa: PLC0415

        from headwater.stack.database import DatabaseTrouble  # noqa: PLC0415

        try:
            database.wait_until_ready(0.0)
        except (DatabaseTrouble, psycopg.Error) as error:
            return str(error).splitlines()[0]
        return ""

    return Part(
        "postgres",
        tuple(database.command),
        probe,
        database.port,
        address=f"postgresql://postgres@127.0.0.1:{database.port}/{database.name}",
        environment={"LC_ALL": "C.UTF-8", "HOME": "/"},
        working_directory=Path("/"),
        owner=owner,
        stop_signal=signal.SIGINT,
        prepare=database.prepare,
    )


def _sync(plan: Plan, postgres_url: str) -> Part:
    settings = plan.settings.stack
    config = ("--config", str(settings.sync_config.absolute())) if settings.sync_config is not None else ()
    own = ("--checkpoints", str(plan.directory.root / "pipeline"), "--metrics-port", str(settings.sync_port))
    return Part(
        "sync",
        (sys.executable, "-m", "headwater", "sync", *own, *config),
        answers(f"http://127.0.0.1:{settings.sync_port}/readyz"),
        settings.sync_port,
        address=f"http://127.0.0.1:{settings.sync_port}/metrics",
        environment={**plan.server.environment, "POSTGRES_URL": postgres_url, "DS_PIPELINE__PROBE": "true"},
    )


def _adminer(plan: Plan) -> Part | Absent:
    settings = plan.settings.stack
    php = shutil.which("php")
    missing = [what for what, there in (("php", php), (str(settings.adminer_file), settings.adminer_file.is_file()))
               if not there]  # fmt: skip
    if php is None or missing:
        how = "on Debian: apt-get install adminer php-cli php-pgsql"
        return Absent("adminer", f"not here: {' and '.join(missing)} ({how})")
    address = f"127.0.0.1:{settings.adminer_port}"
    return Part(
        "adminer",
        (php, "-S", address, str(settings.adminer_file)),
        listens("127.0.0.1", settings.adminer_port),
        settings.adminer_port,
        address=f"http://{address}",
    )


def _heartbeat(plan: Plan, postgres_url: str) -> Part:
    interval = plan.settings.stack.heartbeat_interval_secs
    return Part(
        "heartbeat",
        (sys.executable, "-m", "headwater.stack.heartbeat", str(interval)),
        runs(),
        environment={**plan.server.environment, "POSTGRES_URL": postgres_url},
    )


def jwks_file_of(settings: Settings, directory: StackDirectory) -> Path:
    """The public keys that Envoy checks tokens with, where they are a file; made now if they are ours."""
    if settings.auth.jwks_file is not None:
        return settings.auth.jwks_file.absolute()
    ring = KeyRing(directory.keys)
    ring.ensure()
    return ring.jwks_file
