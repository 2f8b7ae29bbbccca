"""A service of the stack: its command, its environment, its readiness probe and how to stop it.

Invariant: a probe returns within seconds and has no side effects, so it may be called at any time.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from headwater.operating_system import SOCKET_PATH_MAX_BYTES, SYSTEM

Probe: TypeAlias = Callable[[], str]
"""Returns an empty string when the service is ready, otherwise the reason why it is not."""

PROBE_TIMEOUT_S: Final = 2.0
_BODY_MAX_BYTES: Final = 500


@dataclass(frozen=True, slots=True)
class Service:
    name: str
    command: tuple[str, ...]
    probe: Probe
    port: int | None = None
    host: str = "127.0.0.1"
    port_variable: str = ""
    """The environment variable that sets the port."""
    address: str = ""
    """The URL to show to the user."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the supervisor's environment."""
    working_directory: Path | None = None
    owner: tuple[int, int] | None = None
    """User id and group id to run as."""
    stop_signal: int = signal.SIGTERM
    prepare: Callable[[], None] | None = None
    """Called before each start."""

    def full_environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.environment}


@dataclass(frozen=True, slots=True)
class UnavailableService:
    """A service that this machine cannot run, with the reason."""

    name: str
    reason: str


def http_probe(url: str, ca_file: Path | None = None) -> Probe:
    """Ready when a GET of the URL returns 200."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    host, port = parts.hostname, parts.port
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=ca_file)
        secure = http.client.HTTPSConnection
        return _get_probe(lambda: secure(host, port, timeout=PROBE_TIMEOUT_S, context=context), parts.path, url)
    return _get_probe(lambda: http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S), parts.path, url)


def unix_socket_probe(socket_file: Path, path: str) -> Probe:
    """Ready when a GET of the path over a Unix socket returns 200."""
    return _get_probe(lambda: _UnixConnection(socket_file), path, f"{socket_file}:{path}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, socket_file: Path) -> None:
        super().__init__("localhost", timeout=PROBE_TIMEOUT_S)
        self._file = socket_file

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PROBE_TIMEOUT_S)
        if len(os.fsencode(self._file)) <= SOCKET_PATH_MAX_BYTES:
            self.sock.connect(str(self._file))
            return
        with SYSTEM.short_path(self._file.parent) as short:
            self.sock.connect(f"{short}/{self._file.name}")


def _detail(body: str) -> str:
    """The explanation in the body of an error response."""
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body


def _get_probe(connect: Callable[[], http.client.HTTPConnection], path: str, name: str) -> Probe:
    def probe() -> str:
        connection = connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(_BODY_MAX_BYTES).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException) as error:
            return f"no response from {name}: {error}"
        finally:
            connection.close()
        return "" if response.status == 200 else f"{name} returned {response.status}: {_detail(body)}".rstrip(": ")

    return probe


def port_probe(host: str, port: int) -> Probe:
    """Ready when the port accepts a connection."""

    def probe() -> str:
        try:
            socket.create_connection((host, port), timeout=PROBE_TIMEOUT_S).close()
        except OSError as error:
            return f"cannot connect to {host}:{port}: {error.strerror or error}"
        return ""

    return probe


def no_probe() -> Probe:
    """Ready as soon as the process runs, for services that offer nothing to check."""
    return lambda: ""
