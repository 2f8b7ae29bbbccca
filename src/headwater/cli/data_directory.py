"""Find the data directory of a command, and talk to the server that has it open.

Invariant: nothing in this module creates or changes a directory.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import StoreMode, settings_from
from headwater.config import Settings, StorageSettings

ANSWER_TIMEOUT_S: Final = 30.0
PAUSE_TIMEOUT_S: Final = 300.0
"""A server that pauses first completes the requests in progress, within its own limit."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A data directory with the mode and the settings to open it with."""

    directory: Path
    mode: str | None
    """The storage mode that the directory must have; None reads the mode from the directory."""
    settings: StorageSettings
    cluster: Settings | None = None
    """Set in mode cluster, which has no directory: where its database and its objects are."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.directory) if self.cluster is None else f"cluster {self.cluster.cluster.name}"


def locate_store(
    profile: str | None,
    config_file: Path | None,
    mode: StoreMode | None,
    directory: Path | None,
    *,
    takes_cluster: bool = False,
) -> StoreLocation:
    """The store that a command was given, or that the settings name. Only some commands work on a cluster."""
    loaded = settings_from(profile, config_file).settings
    settings = loaded.storage
    # These modes have no directory, so a given directory must have another mode.
    has_directory = settings.mode != "memory" and (settings.mode != "cluster" or directory is None)
    chosen = mode.canonical if mode is not None else settings.mode if has_directory else None
    if chosen == StoreMode.CLUSTER:
        if directory is not None:
            raise CommandError("a cluster has no data directory; leave out --data-dir or --from-dir", USAGE)
        if not takes_cluster:
            raise CommandError(
                "this command works on a data directory, and the storage mode is cluster; copy the cluster into a"
                " directory first: headwater store copy --from-mode cluster --to-mode file-durable --to-dir DIR",
                USAGE,
            )
        return StoreLocation(settings.data_dir, chosen, settings, loaded)
    return StoreLocation(directory or settings.data_dir, chosen, settings)


@contextmanager
def readable(store: StoreLocation) -> Iterator[StoreLocation]:
    """The store as a data directory that no server has open: for a cluster, one that is made from it."""
    if store.cluster is None:
        require_no_server(store.directory)
        yield store
        return
    with copying().fetched_cluster(store.cluster) as directory:
        yield StoreLocation(directory, "file-durable", store.settings)


def copying() -> ModuleType:
    """The tools for the data of a cluster, which need its packages."""
    try:
        from headwater.cluster.nodes import copying as module
    except ImportError as error:
        raise CommandError(
            f"a cluster needs a package that is missing: {error}. pip install 'headwater[cluster]'"
        ) from None
    return module


@contextmanager
def storage_errors() -> Iterator[None]:
    """Report storage and file errors as a `CommandError`."""
    from headwater.storage.interface import StorageError

    try:
        yield
    except StorageError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename or 'the data directory'}: {error.strerror or error}") from None


class RunningServer:
    """The control socket of the server that has a directory open."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")

    def request(self, command: str) -> dict[str, Any]:
        try:
            self._connection.sendall(msgspec.json.encode({"ask": command}) + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise CommandError(f"The server that has the directory open does not respond: {error}") from None
        if not line.endswith(b"\n"):
            raise CommandError(
                "The server that has the directory open closed the connection without a response; see its log."
            )
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise CommandError(f"The server that has the directory open reports: {answer['error']}")
        return answer


@contextmanager
def running_server(
    directory: Path, timeout_s: float = ANSWER_TIMEOUT_S, *, wait: bool = False
) -> Iterator[RunningServer | None]:
    """Connect to the server that has a directory open; yields None if there is none, with `wait` only after a while."""
    from headwater.storage import control_socket

    try:
        connection = control_socket.connect(directory, timeout_s)
        until_s = time.monotonic() + timeout_s
        while connection is None and wait and time.monotonic() < until_s:
            time.sleep(0.05)
            connection = control_socket.connect(directory, timeout_s)
    except OSError as error:
        raise CommandError(f"{directory / control_socket.NAME} cannot be opened: {error.strerror or error}") from None
    if connection is None:
        yield None
        return
    with connection:
        yield RunningServer(connection)


@contextmanager
def paused_server(directory: Path) -> Iterator[bool]:
    """Pause the server that has a directory open, so that its store is closed; yields whether there is one."""
    from headwater.storage.worker_stores import store_directories

    stores = store_directories(directory)
    if len(stores) != 1:
        require_no_server(directory)
        yield False
        return
    with running_server(stores[0], PAUSE_TIMEOUT_S) as server:
        if server is not None:
            server.request("pause")
        yield server is not None


def wait_for_server(directory: Path) -> bool:
    """Wait until the server has opened its store again; False if that takes too long."""
    from headwater.storage import control_socket

    until_s = time.monotonic() + PAUSE_TIMEOUT_S
    while time.monotonic() < until_s:
        connection = control_socket.connect(directory, ANSWER_TIMEOUT_S)
        if connection is not None:
            connection.close()
            return True
        time.sleep(0.05)
    return False


def require_no_server(directory: Path) -> None:
    """Raise a `CommandError` if a server has the directory open."""
    from headwater.storage.worker_stores import store_directories

    for store in store_directories(directory):
        with running_server(store) as server:
            if server is not None:
                pid = server.request("hold")["pid"]
                raise CommandError(
                    f"{directory} is open in the server with process id {pid}. Stop the server first, or make a copy"
                    " with `headwater backup DIR` and use the copy."
                )
