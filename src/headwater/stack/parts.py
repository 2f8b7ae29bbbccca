"""What a part of the stack is: a command, its environment, how to tell that it is ready, and how it is ended.

Invariant: a probe answers within seconds and changes nothing; it may be asked at any time.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

Probe: TypeAlias = Callable[[], str]
"""Empty when the part is ready; else what it waits for."""

PROBE_TIMEOUT_S: Final = 2.0
_SAID_MAX: Final = 500


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


def answers(url: str) -> Probe:
    """Ready when a GET of this address says 200."""
    parts = urlsplit(url)

    def probe() -> str:
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PROBE_TIMEOUT_S)
        try:
            connection.request("GET", parts.path)
            answer = connection.getresponse()
            said = answer.read(_SAID_MAX).decode("utf-8", "replace").strip()
        except (OSError, http.client.HTTPException) as error:
            return f"no answer at {url}: {error}"
        finally:
            connection.close()
        return "" if answer.status == 200 else f"{url} says {answer.status}: {said}".rstrip(": ")

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
