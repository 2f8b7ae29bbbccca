"""Starts the parts in order, waits until each is ready, starts again what crashes, and ends all in reverse.

One loop on one thread tends every part; nothing else starts or ends processes. Invariants: a part is first started
when all before it have been ready; of a part there is never a second process; and no part outlives the supervisor
(`leash`), however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from headwater.config import Stack
from headwater.stack import leash
from headwater.stack.parts import Absent, Part
from headwater.stack.processes import can_bind, holder_of, identity_of
from headwater.stack.state import PartState, PartStatus, Phase, StackDirectory, StackStatus, now

TICK_S: Final = 0.05
PROBE_EVERY_S: Final = 2.0
FIRST_STARTS_MAX: Final = 3
"""How often a part that was never ready is started before the whole start is given up."""
STEADY_S: Final = 30.0
"""A part that ran this long has recovered: its next crash waits the shortest time again."""
_TAIL_BYTES: Final = 2000


class StackFailed(Exception):
    """The stack cannot come up; the message says which part, and what its log says."""


@dataclass(slots=True)
class _Tended:
    """A part and how it fares."""

    part: Part
    status: PartStatus
    process: subprocess.Popen[bytes] | None = None
    was_ready: bool = False
    attempts: int = 0
    crashes: int = 0
    began: float = 0.0
    next_at: float = 0.0


class Supervisor:
    def __init__(
        self,
        directory: StackDirectory,
        parts: Sequence[Part | Absent],
        settings: Stack,
        *,
        profile: str,
        shards: int,
        show: Callable[[StackStatus], None],
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._show = show
        self._ending = False
        me = identity_of(os.getpid())
        self._tended: list[_Tended] = []
        statuses = []
        for part in parts:
            status = PartStatus(part.name, since=now())
            statuses.append(status)
            if isinstance(part, Absent):
                status.state, status.detail = "absent", part.reason
                continue
            status.port, status.address = part.port, part.address
            status.log, status.stop_signal = str(directory.log_of(part.name)), int(part.stop_signal)
            self._tended.append(_Tended(part, status))
        self.status = StackStatus(me.pid, me.started, profile, shards, "starting", now(), statuses)

    def check_ports(self) -> None:
        """Name every port that is taken, with who holds it, before anything is started."""
        taken = [
            f"port {tended.part.port} ({tended.part.name}) is held by {holder_of(tended.part.port)}"
            for tended in self._tended
            if tended.part.port is not None and not can_bind(tended.part.host, tended.part.port)
        ]
        if taken:
            raise StackFailed("; ".join(taken) + "; stop it, or choose another port (`headwater config show`)")

    def run(self) -> None:
        """Until a signal says to end. Raises `StackFailed` when the start fails; all is ended then, too."""
        with self._signals():
            try:
                self._publish("starting")
                while not self._ending:
                    self._tend_all()
                    if self.status.phase == "starting" and all(tended.was_ready for tended in self._tended):
                        self._publish("up")
                    time.sleep(TICK_S)
            except BaseException as error:
                self.status.detail = str(error)
                self._end_all()
                self._publish("failed")
                raise
            self._end_all()
            self._publish("stopped")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def end(_number: int, _frame: FrameType | None) -> None:
            self._ending = True

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tend_all(self) -> None:
        for tended in self._tended:
            self._tend(tended)
            if not tended.was_ready:
                break  # What comes after it waits.

    def _tend(self, tended: _Tended) -> None:
        if tended.process is None:
            if time.monotonic() >= tended.next_at:
                self._start(tended)
            return
        code = tended.process.poll()
        if code is not None:
            self._crashed(tended, _how_it_ended(code))
        elif tended.status.state == "starting":
            self._look_whether_ready(tended)
        elif time.monotonic() >= tended.next_at:
            tended.next_at = time.monotonic() + PROBE_EVERY_S
            trouble = tended.part.probe()
            self._set(tended, "unready" if trouble else "up", trouble)
            if time.monotonic() - tended.began > STEADY_S:
                tended.crashes = 0

    def _start(self, tended: _Tended) -> None:
        part = tended.part
        tended.attempts += 1
        log = self._directory.log_of(part.name)
        self._directory.rotate_log(log)
        self._set(tended, "starting", "")
        try:
            if part.prepare is not None:
                part.prepare()
            tended.process = self._spawn(part, log)
        except Exception as error:
            raise StackFailed(f"{part.name} cannot be started: {error}") from error
        tended.began = time.monotonic()
        identity = identity_of(tended.process.pid)
        tended.status.pid, tended.status.started = identity.pid, identity.started
        self._publish()

    def _spawn(self, part: Part, log: Path) -> subprocess.Popen[bytes]:
        uid, gid = part.owner or (-1, -1)
        leashed = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), str(int(part.stop_signal))]
        with log.open("ab") as output:
            return subprocess.Popen(
                [*leashed, str(uid), str(gid), *part.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=part.full_environment(),
                cwd=part.working_directory,
                # A Ctrl-C at the terminal is for the supervisor, which ends the parts in order.
                start_new_session=True,
            )

    def _look_whether_ready(self, tended: _Tended) -> None:
        trouble = tended.part.probe()
        if not trouble:
            tended.was_ready = True
            tended.next_at = time.monotonic() + PROBE_EVERY_S
            self._set(tended, "up", "")
        elif time.monotonic() - tended.began > self._settings.start_timeout_secs:
            how = f"not ready within {self._settings.start_timeout_secs:g} s: {trouble}"
            self._set(tended, "restarting", how)
            self._end(tended)
            self._crashed(tended, how)
        else:
            self._set(tended, "starting", trouble)

    def _crashed(self, tended: _Tended, how: str) -> None:
        assert tended.process is not None
        _kill_group(tended.process.pid)
        tended.process = None
        tended.status.pid = tended.status.started = 0
        if not tended.was_ready and tended.attempts >= FIRST_STARTS_MAX:
            self._set(tended, "failed", how)
            raise StackFailed(f"{tended.part.name} {how}; {self._log_end(tended)}")
        ceiling = max(self._settings.restart_delay_max_secs, self._settings.restart_delay_secs)
        delay = min(ceiling, self._settings.restart_delay_secs * 2**tended.crashes)
        tended.crashes = min(tended.crashes + 1, 30)
        tended.next_at = time.monotonic() + delay
        tended.status.restarts += 1
        self._set(tended, "restarting", f"{how}; again in {delay:g} s")

    def _end_all(self) -> None:
        self._publish("stopping")
        for tended in reversed(self._tended):
            if tended.process is not None:
                self._end(tended)
                tended.process = None
                tended.status.pid = tended.status.started = 0
            if tended.status.state != "failed":
                self._set(tended, "stopped", "")

    def _end(self, tended: _Tended) -> None:
        process = tended.process
        assert process is not None
        if process.poll() is None:
            process.send_signal(tended.part.stop_signal)
            with suppress(subprocess.TimeoutExpired):
                process.wait(self._settings.stop_timeout_secs)
        _kill_group(process.pid)
        process.wait()

    def _set(self, tended: _Tended, state: PartState, detail: str) -> None:
        status = tended.status
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

    def _log_end(self, tended: _Tended) -> str:
        log = self._directory.log_of(tended.part.name)
        text = log.read_text("utf-8", "replace")[-_TAIL_BYTES:].strip() if log.exists() else ""
        return f"its log ({log}) ends:\n{text}" if text else f"its log ({log}) is empty"


def clean_up_after(directory: StackDirectory, timeout_s: float) -> list[str]:
    """End what a supervisor that was killed left behind. Only for whoever holds the lock."""
    before = directory.read()
    if before is None:
        return []
    left = [part for part in reversed(before.parts) if part.pid and part.identity.is_alive]
    for part in left:
        part.identity.end(part.stop_signal, timeout_s)
    return [part.name for part in left]


def _kill_group(pid: int) -> None:
    """What a part started and left behind; its group has the part's own id."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _how_it_ended(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"
