"""What is known of a running stack, in its data directory: a lock, a state file, a manifest, logs.

Invariant: whoever holds the lock is the one supervisor of the directory and alone writes its state; the state names
processes by id and start time, so that it stays true after a crash.
"""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import IO, Final, Literal, TypeAlias

import msgspec

from headwater.stack.keys import replace_file
from headwater.stack.processes import Identity

PartState: TypeAlias = Literal["waiting", "starting", "up", "unready", "restarting", "stopped", "absent", "failed"]
Phase: TypeAlias = Literal["starting", "up", "stopping", "stopped", "failed"]


class StackBusy(Exception):
    """Another supervisor has the directory."""


class ManifestMismatch(Exception):
    """The directory was made for something else; the message says what to do."""


class PartStatus(msgspec.Struct):
    """One part, as it was when the state was written."""

    name: str
    state: PartState = "waiting"
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
    def identity(self) -> Identity:
        return Identity(self.pid, self.started)


class StackStatus(msgspec.Struct):
    """The whole stack."""

    pid: int
    started: int
    profile: str
    shards: int
    phase: Phase
    since: float
    parts: list[PartStatus]
    detail: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.started)


class _Manifest(msgspec.Struct):
    shards: int
    version: int = 1


_decode_status: Final = msgspec.json.Decoder(StackStatus).decode


class StackDirectory:
    """Where everything of one stack lies."""

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

    def log_of(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    def streams(self, shard: int, shards: int) -> Path:
        return self.root / "streams" if shards == 1 else self.root / f"shard-{shard:02d}" / "streams"

    def make(self) -> None:
        for directory in (self.root, self.logs, self.run):
            directory.mkdir(parents=True, exist_ok=True)

    def acquire(self) -> None:
        """Become the one supervisor of this directory, or raise `StackBusy`."""
        self.make()
        lock = (self.run / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            other = self.read()
            whose = f" (process {other.pid}, profile {other.profile})" if other is not None else ""
            raise StackBusy(
                f"a stack already runs on {self.root}{whose}: see `headwater status`, end it with `headwater down`"
            ) from None
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def is_supervised(self) -> bool:
        """Whether somebody holds the lock now."""
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

    def settle_shards(self, asked: int | None) -> int:
        """The number of shards, which belongs to the directory: a stream's home follows from it."""
        manifest = self.root / "manifest.json"
        if not manifest.exists():
            shards = asked or 1
            self.make()
            replace_file(manifest, msgspec.json.encode(_Manifest(shards)), 0o644)
            return shards
        made_for = msgspec.json.decode(manifest.read_bytes(), type=_Manifest).shards
        if asked is not None and asked != made_for:
            raise ManifestMismatch(
                f"{self.root} was made for {_shards(made_for)}, and each stream's home follows from that number: start"
                f" it with --shards {made_for}, or start {_shards(asked)} on an empty directory (--data-dir) and copy"
                " the streams over through the proxy"
            )
        return made_for

    def rotate_log(self, log: Path, largest: int = 10 * 1024 * 1024) -> None:
        """Begin a log anew when it has grown large; one older one is kept."""
        if log.exists() and log.stat().st_size > largest:
            log.replace(log.with_suffix(".log.1"))


def truth_about(directory: StackDirectory) -> StackStatus | None:
    """The state as it is now: what the file says, checked against the processes that it names."""
    status = directory.read()
    if status is None:
        return None
    for part in status.parts:
        if part.pid and part.state in {"up", "unready", "starting"} and not part.identity.is_alive:
            part.state, part.detail = "failed", "its process is gone"
    if not status.identity.is_alive and status.phase in {"starting", "up", "stopping"}:
        status.phase, status.detail = "failed", "the supervisor was killed"
    return status


def now() -> float:
    return time.time()


def _shards(number: int) -> str:
    return "1 shard" if number == 1 else f"{number} shards"
