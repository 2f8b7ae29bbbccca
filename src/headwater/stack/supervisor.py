"""Start the services in order, wait until each is ready, restart the ones that exit, and stop all in reverse order.

One loop on one thread handles every service; nothing else starts or stops processes. Invariants: a service first starts
after all earlier services have been ready; a service never has two processes; and no service outlives the supervisor,
even if the supervisor is killed (`die_with_parent`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from headwater.config import StackSettings
from headwater.operating_system import die_with_parent
from headwater.stack.processes import can_bind, identity_of, port_user
from headwater.stack.services import Service, UnavailableService
from headwater.stack.state import Phase, ServiceState, ServiceStatus, StackDirectory, StackStatus, now

TICK_S: Final = 0.05
PROBE_EVERY_S: Final = 2.0
FIRST_STARTS_MAX: Final = 3
"""How often to start a service that was never ready before the startup of the stack fails."""
STEADY_S: Final = 30.0
"""After running this long a service counts as recovered: its next restart uses the shortest delay again."""
_TAIL_BYTES: Final = 2000


class StackStartError(Exception):
    """The stack cannot start; the message names the service and quotes its log."""


@dataclass(slots=True)
class _ManagedService:
    """A service with its process and its restart state."""

    service: Service
    status: ServiceStatus
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    """Where the log of the last start begins."""
    was_ready: bool = False
    attempts: int = 0
    consecutive_exits: int = 0
    began: float = 0.0
    next_at: float = 0.0


class Supervisor:
    def __init__(
        self,
        directory: StackDirectory,
        services: Sequence[Service | UnavailableService],
        settings: StackSettings,
        *,
        profile: str,
        show: Callable[[StackStatus], None],
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._show = show
        self._stopping = False
        me = identity_of(os.getpid())
        self._managed: list[_ManagedService] = []
        statuses = []
        for service in services:
            status = ServiceStatus(service.name, since=now())
            statuses.append(status)
            if isinstance(service, UnavailableService):
                status.state, status.detail = "absent", service.reason
                continue
            status.port, status.address = service.port, service.address
            status.log, status.stop_signal = str(directory.log_of(service.name)), int(service.stop_signal)
            self._managed.append(_ManagedService(service, status))
        self.status = StackStatus(me.pid, me.started, profile, "starting", now(), statuses)

    def check_ports(self) -> None:
        """Raise an error that lists every port in use, and by which process, before anything is started."""
        users, variables = [], []
        for managed in self._managed:
            service = managed.service
            if service.port is not None and not can_bind(service.host, service.port):
                users.append(f"port {service.port} ({service.name}) is used by {port_user(service.port)}")
                variables.append(service.port_variable)
        if users:
            settings = ", ".join(filter(None, variables))
            hint = f"Stop that process, or set another port{settings and f' ({settings})'}."
            raise StackStartError(f"{'; '.join(users)}. {hint}")

    def run(self) -> None:
        """Run until a signal arrives. If the startup fails, stop everything and raise `StackStartError`."""
        with self._signals():
            try:
                self._publish("starting")
                while not self._stopping:
                    self._check_all()
                    if self.status.phase == "starting" and all(managed.was_ready for managed in self._managed):
                        self._publish("up")
                    time.sleep(TICK_S)
            except BaseException as error:
                self.status.detail = str(error)
                self._stop_all()
                self._publish("failed")
                raise
            self._stop_all()
            self._publish("stopped")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def end(_number: int, _frame: FrameType | None) -> None:
            self._stopping = True

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _check_all(self) -> None:
        for managed in self._managed:
            self._check(managed)
            if not managed.was_ready:
                break  # Later services wait for this one.

    def _check(self, managed: _ManagedService) -> None:
        if managed.process is None:
            if time.monotonic() >= managed.next_at:
                self._start(managed)
            return
        code = managed.process.poll()
        if code is not None:
            self._on_exit(managed, _exit_reason(code))
        elif managed.status.state == "starting":
            self._check_ready(managed)
        elif time.monotonic() >= managed.next_at:
            managed.next_at = time.monotonic() + PROBE_EVERY_S
            problem = managed.service.probe()
            self._set(managed, "unready" if problem else "up", problem)
            if time.monotonic() - managed.began > STEADY_S:
                managed.consecutive_exits = 0

    def _start(self, managed: _ManagedService) -> None:
        service = managed.service
        managed.attempts += 1
        log = self._directory.log_of(service.name)
        self._directory.rotate_log(log)
        self._set(managed, "starting", "")
        try:
            if service.prepare is not None:
                service.prepare()
            managed.log_start = log.stat().st_size if log.exists() else 0
            managed.process = self._spawn(service, log)
        except Exception as error:
            raise StackStartError(f"{service.name} cannot start: {error}") from error
        managed.began = time.monotonic()
        identity = identity_of(managed.process.pid)
        managed.status.pid, managed.status.started = identity.pid, identity.started
        self._publish()

    def _spawn(self, service: Service, log: Path) -> subprocess.Popen[bytes]:
        uid, gid = service.owner or (-1, -1)
        command = die_with_parent.wrapped(int(service.stop_signal), (str(uid), str(gid)), list(service.command))
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=service.full_environment(),
                cwd=service.working_directory,
                # Ctrl-C at the terminal must reach only the supervisor, which stops the services in order.
                start_new_session=True,
            )

    def _check_ready(self, managed: _ManagedService) -> None:
        problem = managed.service.probe()
        if not problem:
            managed.was_ready = True
            managed.next_at = time.monotonic() + PROBE_EVERY_S
            self._set(managed, "up", "")
        elif time.monotonic() - managed.began > self._settings.start_timeout_secs:
            how = f"not ready within {self._settings.start_timeout_secs:g} s: {problem}"
            self._set(managed, "restarting", how)
            self._stop(managed)
            self._on_exit(managed, how)
        else:
            self._set(managed, "starting", problem)

    def _on_exit(self, managed: _ManagedService, how: str) -> None:
        assert managed.process is not None
        _kill_group(managed.process.pid)
        managed.process = None
        managed.status.pid = managed.status.started = 0
        if not managed.was_ready and managed.attempts >= FIRST_STARTS_MAX:
            self._set(managed, "failed", how)
            raise StackStartError(f"{managed.service.name} {how}; {self._log_stop(managed)}")
        ceiling = max(self._settings.restart_delay_max_secs, self._settings.restart_delay_secs)
        delay = min(ceiling, self._settings.restart_delay_secs * 2**managed.consecutive_exits)
        managed.consecutive_exits = min(managed.consecutive_exits + 1, 30)
        managed.next_at = time.monotonic() + delay
        managed.status.restarts += 1
        self._set(managed, "restarting", f"{how}; next start in {delay:g} s")

    def _stop_all(self) -> None:
        self._publish("stopping")
        for managed in reversed(self._managed):
            if managed.process is not None:
                self._stop(managed)
                managed.process = None
                managed.status.pid = managed.status.started = 0
            if managed.status.state != "failed":
                self._set(managed, "stopped", "")

    def _stop(self, managed: _ManagedService) -> None:
        process = managed.process
        assert process is not None
        if process.poll() is None:
            process.send_signal(managed.service.stop_signal)
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._settings.stop_timeout_secs)
        _kill_group(process.pid)
        process.wait()

    def _set(self, managed: _ManagedService, state: ServiceState, detail: str) -> None:
        status = managed.status
        if status.state == state and status.detail == detail:
            return
        if status.state != state:
            status.since = now()
        status.state, status.detail = state, detail
        self._publish()

    def _publish(self, phase: Phase | None = None) -> None:
        if phase is not None and phase != self.status.phase:
            self.status.phase, self.status.since = phase, now()
        self._directory.write(self.status)
        self._show(self.status)

    def _log_stop(self, managed: _ManagedService) -> str:
        log = self._directory.log_of(managed.service.name)
        written = log.read_bytes()[managed.log_start :] if log.exists() else b""
        text = written[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
        return f"its log ({log}) ends:\n{text}" if text else f"its log ({log}) is empty"


def stop_leftovers(directory: StackDirectory, timeout_s: float) -> list[str]:
    """Stop the services that a killed supervisor left running. The caller must hold the lock."""
    before = directory.read()
    if before is None:
        return []
    left = [service for service in reversed(before.parts) if service.pid and service.identity.is_alive]
    for service in left:
        service.identity.stop(service.stop_signal, timeout_s)
    return [service.name for service in left]


def _kill_group(pid: int) -> None:
    """Kill the processes that a service started; the id of their group is the service's process id."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _exit_reason(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
