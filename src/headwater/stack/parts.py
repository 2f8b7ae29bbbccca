"""What a part of the stack is: a command, its environment, how to tell that it is ready, and how it is ended.

Invariant: a probe answers within seconds and changes nothing; it may be asked at any time.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

Probe: TypeAlias = Callable[[], str]
"""Empty when the part is ready; else what it waits for."""

PROBE_TIMEOUT_S: Final = 2.0
_SAID_MAX: Final = 500
_SOCKET_PATH_MAX_BYTES: Final = 100
"""Linux takes 107, other systems 103."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    command: tuple[str, ...]
    probe: Probe
    port: int | None = None
    host: str = "127.0.0.1"
    address: str = ""
    """What to open or connect to, for people."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of the supervisor's."""
    working_directory: Path | None = None
    owner: tuple[int, int] | None = None
    """User and group to drop to."""
    stop_signal: int = signal.SIGTERM
    prepare: Callable[[], None] | None = None
    """What must be done before each start."""

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}


@dataclass(frozen=True, slots=True)
class Absent:
    """A part that this machine cannot run, and why."""

    name: str
    reason: str


def answers(url: str, ca_file: Path | None = None) -> Probe:
    """Ready when a GET of this address says 200."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    host, port = parts.hostname, parts.port
    if parts.scheme == "https":
        trust = ssl.create_default_context(cafile=ca_file)
        secure = http.client.HTTPSConnection
        return _asked(lambda: secure(host, port, timeout=PROBE_TIMEOUT_S, context=trust), parts.path, url)
    return _asked(lambda: http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S), parts.path, url)


def answers_on_socket(socket_file: Path, path: str) -> Probe:
    """Ready when a GET of this path over a Unix socket says 200."""
    return _asked(lambda: _UnixConnection(socket_file), path, f"{socket_file}:{path}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, socket_file: Path) -> None:
        super().__init__("localhost", timeout=PROBE_TIMEOUT_S)
        self._file = socket_file

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PROBE_TIMEOUT_S)
        if len(os.fsencode(self._file)) <= _SOCKET_PATH_MAX_BYTES:
            self.sock.connect(str(self._file))
            return
        # Too long for a socket's address: go by way of its open directory.
        directory = os.open(self._file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sock.connect(f"/proc/self/fd/{directory}/{self._file.name}")
        finally:
            os.close(directory)


def _asked(connect: Callable[[], http.client.HTTPConnection], path: str, name: str) -> Probe:
    def probe() -> str:
        connection = connect()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            said = answer.read(_SAID_MAX).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException) as error:
            return f"no answer at {name}: {error}"
        finally:
            connection.close()
        return "" if answer.status == 200 else f"{name} says {answer.status}: {said}".rstrip(": ")

    return probe


def listens(host: str, port: int) -> Probe:
    """Ready when a connection is taken."""

    def probe() -> str:
        try:
            socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()
        except OSError as error:
            return f"nothing listens on {host}:{port}: {error.strerror or error}"
        return ""

    return probe


def runs() -> Probe:
    """Ready as soon as it runs: for what has nothing to ask."""
    return lambda: ""
