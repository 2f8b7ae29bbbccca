"""The data directory of a stack: lock, state file and logs.

Invariant: the process that holds the lock is the only supervisor of the directory, and only it writes the state. The
state identifies processes by id and start time, so that it can be checked after a crash.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias

import msgspec

from headwater.stack.keys import replace_file
from headwater.stack.processes import ProcessIdentity

ServiceState: TypeAlias = Literal["waiting", "starting", "up", "unready", "restarting", "stopped", "absent", "failed"]
Phase: TypeAlias = Literal["starting", "up", "stopping", "stopped", "failed"]


class StackRunningError(Exception):
    """Another supervisor already runs on the directory."""


class ShardedDirectoryError(Exception):
    """An earlier release divided the streams of the directory into one store per server process."""


class ServiceStatus(msgspec.Struct):
    """The state of one service when the state file was written."""

    name: str
    state: ServiceState = "waiting"
    pid: int = 0
    started: int = 0
    stop_signal: int = 15
    port: int | None = None
    address: str = ""
    log: str = ""
    restarts: int = 0
    since: float = 0.0
    detail: str = ""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started)


class StackStatus(msgspec.Struct):
    """The state of the stack and of all its services."""

    pid: int
    started: int
    profile: str
    phase: Phase
    since: float
    parts: list[ServiceStatus]
    detail: str = ""

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(self.pid, self.started)


class _StackManifest(msgspec.Struct):
    """What earlier releases kept about a directory."""

    shards: int
    version: int = 1


_manifests: Final = msgspec.json.Decoder(_StackManifest)


_decode_status: Final = msgspec.json.Decoder(StackStatus).decode


class StackDirectory:
    """Paths of one stack, and its lock."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self._lock: IO[str] | None = None

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def database_credentials(self) -> Path:
        return self.keys / "postgres.json"

    @property
    def supervisor_log(self) -> Path:
        return self.logs / "supervisor.log"

    def log_of(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    @property
    def streams(self) -> Path:
        return self.root / "streams"

    def make(self) -> None:
        for directory in (self.root, self.logs, self.run):
            directory.mkdir(parents=True, exist_ok=True)

    def acquire(self) -> None:
        """Become the supervisor of this directory, or raise `StackRunningError`."""
        self.make()
        lock = (self.run / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            other = self.read()
            owner = f" (process {other.pid}, profile {other.profile})" if other is not None else ""
            raise StackRunningError(
                f"a stack already runs on {self.root}{owner}; `headwater status` shows it, `headwater down` stops it"
            ) from None
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor holds the lock."""
        try:
            with (self.run / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def write(self, status: StackStatus) -> None:
        replace_file(self.run / "state.json", msgspec.json.encode(status), 0o644)

    def read(self) -> StackStatus | None:
        try:
            return _decode_status((self.run / "state.json").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    @property
    def _manifest(self) -> Path:
        return self.root / "manifest.json"

    def sharded_streams(self) -> list[Path]:
        """The stores of a directory that an earlier release divided, if they are not joined yet."""
        if not self._manifest.exists():
            return []
        shards = _manifests.decode(self._manifest.read_bytes()).shards
        return [self.root / f"shard-{shard:02d}" / "streams" for shard in range(shards)] if shards > 1 else []

    def check_is_joined(self) -> None:
        shards = len(self.sharded_streams())
        if shards:
            raise ShardedDirectoryError(
                f"the streams in {self.root} are divided into {shards} shards, which this release does not serve. Join"
                f" them with `headwater store join-shards --data-dir {self.root}`; then --workers uses several cores."
            )

    def forget_shards(self) -> None:
        """Use the joined streams from now on, and remove those that they were joined from."""
        replace_file(self._manifest, msgspec.json.encode(_StackManifest(1)), 0o644)
        for shard in self.root.glob("shard-[0-9][0-9]"):
            shutil.rmtree(shard)

    def rotate_log(self, log: Path, largest: int = 10 * 1024 * 1024) -> None:
        """Rename a large log, so that a new one begins. One old log is kept."""
        if log.exists() and log.stat().st_size > largest:
            log.replace(log.with_suffix(".log.1"))


def current_status(directory: StackDirectory) -> StackStatus | None:
    """Return the state in the file, corrected for processes that no longer run."""
    status = directory.read()
    if status is None:
        return None
    for service in status.parts:
        if service.pid and service.state in {"up", "unready", "starting"} and not service.identity.is_alive:
            service.state, service.detail = "failed", "its process no longer runs"
    if not status.identity.is_alive and status.phase in {"starting", "up", "stopping"}:
        status.phase, status.detail = "failed", "the supervisor was killed"
    return status


def now() -> float:
    return time.time()
