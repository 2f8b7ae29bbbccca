"""When the supervisor kills a worker that does not answer: with a clock that the test moves, and without processes."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace

import pytest

from headwater.cluster import supervisor
from headwater.cluster.shards import ShardMap
from headwater.cluster.supervisor import TICK_S, WorkerSupervisor
from headwater.config import Settings

WORKER_PID = 10**9


class IdleSupervisor(WorkerSupervisor):
    """One ready worker, which sends nothing."""

    def __init__(self, now_s: float) -> None:
        settings = Settings()
        super().__init__(settings, lambda: settings, ShardMap(16, 1), lambda _: settings)
        self.timeout_s = settings.server.worker_timeout_secs
        (worker,) = self._workers
        worker.pid, worker.is_ready, worker.last_answer_s = WORKER_PID, True, now_s

    def _reap(self) -> None:
        """Do nothing: there is no process."""

    def turn(self) -> None:
        woken, waker = socket.socketpair()
        with woken, waker:
            woken.setblocking(False)
            waker.send(b".")
            self._selector.register(woken, 1)
            self._turn(woken)
            self._selector.unregister(woken)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    moved = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: moved.now_s))
    return moved


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append((pid, number)))
    return found


def test_worker_that_does_not_answer_is_killed_after_the_timeout(
    clock: SimpleNamespace, killed: list[tuple[int, int]]
) -> None:
    idle = IdleSupervisor(clock.now_s)
    began_s = clock.now_s
    while not killed:
        clock.now_s += TICK_S
        idle.turn()
    assert killed == [(WORKER_PID, signal.SIGKILL)]
    assert idle.timeout_s < clock.now_s - began_s <= idle.timeout_s + TICK_S


def test_worker_is_not_killed_because_the_supervisor_was_stopped(
    clock: SimpleNamespace, killed: list[tuple[int, int]]
) -> None:
    idle = IdleSupervisor(clock.now_s)
    clock.now_s += TICK_S
    idle.turn()
    clock.now_s += 3600
    idle.turn()
    clock.now_s += TICK_S
    idle.turn()
    assert not killed
