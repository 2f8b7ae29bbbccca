"""When the supervisor kills a worker that does not answer: with a clock that the test moves, and without processes."""

from __future__ import annotations

import errno
import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import cast

import pytest

from headwater.cluster import messages, supervisor
from headwater.cluster.shards import ShardMap
from headwater.cluster.supervisor import CONNECT_RETRY_S, STABLE_S, STARTING_FACTOR, TICK_S, WorkerSupervisor
from headwater.cluster.worker import STARTING_S, ServingWorker, Starting, run_serving
from headwater.config import Settings, StorageSettings

WORKER_PID = 10**9


class IdleSupervisor(WorkerSupervisor):
    """Workers that send nothing."""

    def __init__(self, now_s: float, *, is_ready: bool = True, workers: int = 1) -> None:
        settings = Settings(storage=StorageSettings(mode="file-durable"))
        super().__init__(settings, lambda: settings, ShardMap(16, workers), lambda _: settings)
        self.timeout_s = settings.server.worker_timeout_secs
        for worker in self._workers:
            worker.pid, worker.is_ready, worker.last_answer_s = WORKER_PID, is_ready, now_s

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


def test_silent_worker_is_killed_while_it_starts(clock: SimpleNamespace, killed: list[tuple[int, int]]) -> None:
    starting = IdleSupervisor(clock.now_s, is_ready=False)
    began_s, limit_s = clock.now_s, STARTING_FACTOR * starting.timeout_s
    while not killed:
        clock.now_s += TICK_S
        starting.turn()
    assert killed == [(WORKER_PID, signal.SIGKILL)]
    assert limit_s < clock.now_s - began_s <= limit_s + TICK_S


def test_worker_reports_that_it_runs_while_its_recovery_occupies_the_loop() -> None:
    ours, theirs = messages.pair()

    def occupy(seconds: float) -> None:
        time.sleep(seconds)

    class Recovering:
        starting = Starting(theirs)

        async def run(self) -> None:
            occupy(STARTING_S * 2.5)
            self.starting.end()
            while not (received := messages.receive(ours)):
                pass
            assert received == (messages.Pong(), [])
            occupy(STARTING_S * 2)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with ours, theirs:
        try:
            assert run_serving(cast(ServingWorker, Recovering()), theirs) == 0
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        reports = 1
        with suppress(BlockingIOError):
            while messages.receive(ours):
                reports += 1
        assert reports == 2, "it reports until it answers itself"


def test_workers_that_could_not_be_connected_are_connected_later(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without descriptors, and while one of them does not read."""
    connecting = IdleSupervisor(clock.now_s, workers=2)
    ends = [messages.pair() for _ in connecting._workers]
    for worker, (ours, _) in zip(connecting._workers, ends, strict=True):
        worker.control, worker.has_said_hello = ours, worker.number == 1

    def no_descriptors() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def received() -> list[list[messages.Message]]:
        found: list[list[messages.Message]] = [[], []]
        for _, theirs in ends:
            with suppress(BlockingIOError):
                while message := messages.receive(theirs):
                    found[ends.index((_, theirs))].append(message[0])
                    for descriptor in message[1]:
                        os.close(descriptor)
        return [[message for message in some if isinstance(message, messages.Connect)] for some in found]

    with monkeypatch.context() as limited:
        limited.setattr(messages, "pair", no_descriptors)
        connecting._introduce(connecting._workers[0])
    assert received() == [[], []]
    while messages.send(ends[1][0], messages.Reload()):
        pass
    clock.now_s += CONNECT_RETRY_S
    connecting.turn()
    assert received() == [[messages.Connect(1)], []]
    for _ in range(3):
        clock.now_s += CONNECT_RETRY_S
        connecting.turn()
    assert received() == [[messages.Connect(1)], [messages.Connect(0)]], "once"
    for pair in ends:
        for end in pair:
            end.close()


@pytest.mark.parametrize(
    ("is_ready", "expected"),
    [(True, [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]), (False, [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])],
)
def test_worker_that_dies_again_and_again_is_restarted_later_each_time(
    clock: SimpleNamespace, is_ready: bool, expected: list[float]
) -> None:
    dying = IdleSupervisor(clock.now_s)
    (worker,) = dying._workers

    def delay() -> float:
        worker.pid, worker.is_ready, worker.started_s = WORKER_PID, is_ready, clock.now_s
        clock.now_s += 1
        dying._on_death(worker)
        assert worker.restart_at_s is not None
        return worker.restart_at_s - float(clock.now_s)

    assert [delay() for _ in expected] == pytest.approx(expected)
    worker.pid, worker.is_ready, worker.started_s = WORKER_PID, True, clock.now_s
    clock.now_s += STABLE_S
    dying._on_death(worker)
    assert worker.restart_at_s == clock.now_s


def test_every_address_of_the_host_is_served_on_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.2", 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0)),
        (255, socket.SOCK_STREAM, 0, "", ("unknown", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    listening = supervisor._bind(Settings())
    with ExitStack() as opened:
        for bound in listening:
            opened.enter_context(bound)
        addresses = [bound.getsockname()[:2] for bound in listening]
        assert addresses == [(host, addresses[0][1]) for host in ("127.0.0.1", "127.0.0.2", "::1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found[-1:])
    with pytest.raises(OSError, match="not supported"):
        supervisor._bind(Settings())


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
