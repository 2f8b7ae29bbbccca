"""Processes and ports of this machine as the kernel tells of them: who still lives, and who holds a port.

Invariant: a process is known by its id together with its start time, so that a number which the kernel has given to
somebody else meanwhile is never mistaken for ours, and never gets our signals.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, for good."""

    pid: int
    started: int
    """Clock ticks after the machine's start; 0 where the kernel does not tell."""

    @property
    def is_alive(self) -> bool:
        return self.pid > 0 and start_time(self.pid) == self.started

    def send(self, signal_number: int) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def end(self, gently: int, timeout_s: float) -> None:
        """Ask it to end; kill it, and its process group, when it does not."""
        self.send(gently)
        if not self.wait(timeout_s):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send(signal.SIGKILL)
            self.wait(5.0)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.is_alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def identity_of(pid: int) -> Identity:
    return Identity(pid, start_time(pid) or 0)


def start_time(pid: int) -> int | None:
    """When a process began; None when there is none (one that has ended and was not waited for yet is none)."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        if _PROC.joinpath("self").exists():
            return None
        try:
            os.kill(pid, 0)
        except OSError:
            return None
        return 0
    # The name in parentheses may hold anything; the fields after it are numbers.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in {"Z", "X"} else int(fields[18])


def can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def holder_of(port: int) -> str:
    """Who listens on a port, as a phrase."""
    sockets = set(_listening(port))
    for directory in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (directory / "fd").iterdir():
                if descriptor.readlink().name in sockets:
                    command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    return f"{command.strip()[:80]} (process {directory.name})"
    return "a process of another user" if sockets else "something that could not be told"


def _listening(port: int) -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(f"socket:[{fields[9]}]")
    return found
