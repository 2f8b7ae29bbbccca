"""Which data directory a command is about, by flags and settings; and the server that may have it open.

Invariant: a directory is never made or changed by asking about it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.cli.failure import Failure
from headwater.cli.options import StoreMode, settings_from
from headwater.config import Storage

ANSWER_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    directory: Path
    mode: str | None
    """What the directory must be of; None when nobody has said, and it may say itself."""
    settings: Storage


def place_from(profile: str | None, config_file: Path | None, mode: StoreMode | None, directory: Path | None) -> Place:
    settings = settings_from(profile, config_file).settings.storage
    if mode is not None:
        chosen: str | None = mode.canonical
    else:
        # In `memory` there is no directory, so the one that is asked about is of some other mode.
        chosen = settings.mode if settings.mode != "memory" else None
    return Place(directory or settings.data_dir, chosen, settings)


@contextmanager
def failures() -> Iterator[None]:
    """What goes wrong with a store, as the one line that a command ends with."""
    from headwater.storage.interface import StorageError

    try:
        yield
    except StorageError as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise Failure(f"{error.filename or 'the data directory'}: {error.strerror or error}") from None


class Server:
    """The server that has a directory open, at its control socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")

    def ask(self, question: str) -> dict[str, Any]:
        try:
            self._connection.sendall(msgspec.json.encode({"ask": question}) + b"\n")
            line = self._lines.readline()
        except OSError as error:
            raise Failure(f"the server that has the directory open does not answer: {error}") from None
        if not line.endswith(b"\n"):
            raise Failure("the server that has the directory open hung up")
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise Failure(f"the server that has the directory open says: {answer['error']}")
        return answer


@contextmanager
def server_of(directory: Path) -> Iterator[Server | None]:
    """The running server of a directory, or None when none has it open."""
    from headwater.storage import control_socket

    try:
        connection = control_socket.connect(directory, ANSWER_TIMEOUT_S)
    except OSError as error:
        raise Failure(f"{directory / control_socket.NAME} cannot be opened: {error.strerror or error}") from None
    if connection is None:
        yield None
        return
    with connection:
        yield Server(connection)


def refuse_if_running(directory: Path) -> None:
    """For commands that need a directory at rest: say what to do while a server has it open."""
    with server_of(directory) as server:
        if server is not None:
            pid = server.ask("hold")["pid"]
            raise Failure(
                f"{directory} is in use by the server with process id {pid}; stop it first, or take a backup with"
                " `headwater backup DIR` and give that as the directory"
            )
