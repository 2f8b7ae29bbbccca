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
from typing import Any, Final

import msgspec

from headwater.cli.errors import CommandError
from headwater.cli.options import StoreMode, settings_from
from headwater.config import StorageSettings

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


def locate_store(
    profile: str | None, config_file: Path | None, mode: StoreMode | None, directory: Path | None
) -> StoreLocation:
    settings = settings_from(profile, config_file).settings.storage
    if mode is not None:
        chosen: str | None = mode.canonical
    else:
        # Mode `memory` has no directory, so the given directory must have another mode.
        chosen = settings.mode if settings.mode != "memory" else None
    return StoreLocation(directory or settings.data_dir, chosen, settings)


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
            raise CommandError("The server that has the directory open closed the connection without a response.")
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise CommandError(f"The server that has the directory open reports: {answer['error']}")
        return answer


@contextmanager
def running_server(directory: Path, timeout_s: float = ANSWER_TIMEOUT_S) -> Iterator[RunningServer | None]:
    """Connect to the server that has a directory open; yields None if there is none."""
    from headwater.storage import control_socket

    try:
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
