"""Processes and ports of this machine: whether a process still runs, and which process uses a port.

Invariant: a process is identified by its id and its start time. The kernel reuses process ids, so an id alone could
belong to an unrelated process, which must never receive our signals.
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

import psutil

_START_TIME_UNITS_PER_S: Final = 100
"""The kernel counts start times in hundredths of a second."""
_COMMAND_MAX_CHARACTERS: Final = 80


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process, for all time."""

    pid: int
    started: int
    """Hundredths of a second between the machine's boot and the start of the process."""

    @property
    def is_alive(self) -> bool:
        return self.pid > 0 and start_time(self.pid) == self.started

    def send(self, signal_number: int) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def stop(self, stop_signal: int, timeout_s: float) -> None:
        """Send the signal; after the timeout, kill the process and its process group."""
        self.send(stop_signal)
        if not self.wait(timeout_s):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send(signal.SIGKILL)
            self.wait(5.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False after the timeout."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def identity_of(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, start_time(pid) or 0)


def start_time(pid: int) -> int | None:
    """The start time of a process; None when it does not exist or is a zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            return None
        # Relative to the boot: both times move when the system clock is set, their difference does not.
        since_boot_s = process.create_time() - psutil.boot_time()
    except psutil.Error:
        return None
    return round(since_boot_s * _START_TIME_UNITS_PER_S)


def can_bind(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_user(port: int) -> str:
    """Describe the process that listens on a port, for an error message."""
    try:
        listening = [
            connection
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        ]
    except psutil.Error:  # macOS lists the sockets of other users only for root
        listening = []
    for connection in listening:
        if connection.pid is not None:
            with suppress(psutil.Error):
                words = psutil.Process(connection.pid).cmdline()
                # Without directories: the program and its script come first, and what they do is behind their paths.
                command = " ".join([*(Path(word).name for word in words[:2]), *words[2:]])
                return f"{command[:_COMMAND_MAX_CHARACTERS]} (process {connection.pid})"
    return "a process of another user" if listening else "an unknown process"
