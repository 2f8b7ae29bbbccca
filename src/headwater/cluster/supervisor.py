"""The supervisor of the workers: holds the listening sockets, starts, watches, restarts and stops them.

It processes no requests itself, so it has little that can fail or stall. A worker that died is restarted; one that does
not respond for a while is killed first, so a shard never has two owners. In `memory` mode the death of a worker ends
the server, because its streams are lost.
"""

from __future__ import annotations

import gc
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

from headwater.cluster import messages
from headwater.cluster.shards import ShardMap
from headwater.cluster.worker import run_worker
from headwater.http.server import BACKLOG, address_of, announce, warn_of_exposure, warn_of_loss
from headwater.operating_system import SYSTEM

if TYPE_CHECKING:
    from headwater.config import Settings

log = logging.getLogger("headwater.cluster")

TICK_S: Final = 0.5
PING_S: Final = 0.5
BACKOFF_MAX_S: Final = 5.0
CONNECT_RETRY_S: Final = 1.0
"""When two workers that could not be connected are connected again."""
STARTING_FACTOR: Final = 3
"""How many times longer a worker may be silent while it starts: a step of the recovery can occupy the interpreter."""
STABLE_S: Final = 30.0
"""A worker that served at least this long is restarted immediately when it dies; also at its first death."""
STOP_S: Final = 5.0
"""Time to close the storage after the connections have ended."""


class WorkerFailedError(Exception):
    """A worker could not start, or died in a mode without recovery. `kind` is the category of the error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind: Final = kind


class WorkerProcess:
    """One worker, as the supervisor sees it."""

    def __init__(self, number: int) -> None:
        self.number: Final = number
        self.pid = 0
        self.control: socket.socket | None = None
        self.has_said_hello = False
        self.address = ""
        self.is_ready = False
        self.is_drained = False
        self.is_warm = False
        """In a cluster: it is a standby that can take its shard over at once."""
        self.started_s = 0.0
        self.last_answer_s = 0.0
        self.next_ping_s = 0.0
        self.restart_at_s: float | None = None
        self.deaths = 0
        """Since it served for a while."""
        self.backoff_s = 0.0
        self.failure: messages.Failed | None = None

    @property
    def is_running(self) -> bool:
        return self.pid != 0


class WorkerSupervisor:
    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        shard_map: ShardMap,
        worker_settings: Callable[[int], Settings],
    ) -> None:
        self._settings = settings
        self._load = load
        self._map = shard_map
        self._worker_settings = worker_settings
        self._workers = [WorkerProcess(number) for number in range(shard_map.workers)]
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._has_announced = False
        self._turned_s = time.monotonic()
        self._drain_until_s: float | None = None
        self._stop_until_s: float | None = None
        self._failure: WorkerFailedError | None = None
        self._connect_at_s: dict[tuple[int, int], float] = {}
        """When to try again to connect two workers."""

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises `OSError` if the address cannot be bound, or `WorkerFailedError`."""
        self._listening = _bind(self._settings)
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        self._selector.register(woken, selectors.EVENT_READ)
        self._inherited: tuple[socket.socket, ...] = (woken, waker)
        gc.collect()
        gc.freeze()
        try:
            self._start_all()
            while any(worker.is_running for worker in self._workers) or self._stop_until_s is None:
                self._turn(woken)
        finally:
            for worker in self._workers:
                if worker.is_running:
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)
            self._close_listening()
            signal.set_wakeup_fd(-1)
        if self._failure is not None:
            raise self._failure
        log.info("stopped")

    # -- one turn --------------------------------------------------------------------------------------------------

    def _turn(self, woken: socket.socket) -> None:
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is woken:
                _discard(woken)
            elif isinstance(key.data, WorkerProcess):
                self._receive(key.data)
            else:
                key.data()
        signals, self._signals = self._signals, []
        for number in signals:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._begin_drain()
            elif number == signal.SIGHUP:
                for worker in self._workers:
                    self._send(worker, messages.Reload())
        self._reap()
        now_s = time.monotonic()
        # The time in which this process did not run does not count: no worker was asked then.
        stopped_s = max(0.0, now_s - self._turned_s - TICK_S)
        self._turned_s = now_s
        for worker in self._workers:
            worker.last_answer_s = min(now_s, worker.last_answer_s + stopped_s)
            self._watch(worker, now_s)
        self._connect_again(now_s)
        self._advance_stop(now_s)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _receive(self, worker: WorkerProcess) -> None:
        assert worker.control is not None
        while True:
            try:
                received = messages.receive(worker.control)
            except BlockingIOError:
                return
            if received is None:
                self._selector.unregister(worker.control)
                worker.control.close()
                worker.control = None
                return
            worker.last_answer_s = time.monotonic()
            match received[0]:
                case messages.Hello(address):
                    worker.address = address
                    self._introduce(worker)
                case messages.Ready():
                    worker.is_ready = True
                    self._send(worker, messages.Serve())
                    if self._has_announced:
                        log.info("worker %d serves as process %d", worker.number, worker.pid)
                    self._announce_once()
                case messages.Drained():
                    worker.is_drained = True
                case messages.Failed() as failure:
                    worker.failure = failure
                case messages.NotConnected(other):
                    self._connect_at_s[_pair(worker, self._workers[other])] = time.monotonic() + CONNECT_RETRY_S
                case messages.Warm():
                    worker.is_warm = True
                    self._on_warm(worker)
                case _:
                    pass

    def _introduce(self, newcomer: WorkerProcess) -> None:
        """Connect a worker to all others that can be connected."""
        newcomer.has_said_hello = True
        for other in self._workers:
            if other is not newcomer:
                self._connect(newcomer, other)

    def _connect(self, one: WorkerProcess, other: WorkerProcess) -> None:
        """Connect two workers, now if both can be, or later if that fails."""
        self._connect_at_s.pop(_pair(one, other), None)
        if not all(worker.has_said_hello and worker.control is not None for worker in (one, other)):
            return  # One of them died, and its replacement is introduced.
        try:
            frames = socket.socketpair()
            with frames[0], frames[1]:
                moves = messages.pair()
                with moves[0], moves[1]:
                    are_sent = self._send(
                        one, messages.Connect(other.number), (frames[0].fileno(), moves[0].fileno())
                    ) and self._send(other, messages.Connect(one.number), (frames[1].fileno(), moves[1].fileno()))
        except OSError as error:
            log.error("workers %d and %d cannot be connected yet: %s", one.number, other.number, error)
            are_sent = False
        if not are_sent:
            self._connect_at_s[_pair(one, other)] = time.monotonic() + CONNECT_RETRY_S

    def _connect_again(self, now_s: float) -> None:
        for pair, at_s in tuple(self._connect_at_s.items()):
            if now_s >= at_s:
                self._connect(*(self._workers[number] for number in pair))

    def _on_warm(self, standby: WorkerProcess) -> None:
        """A standby can take its shard over."""

    def _announce_once(self) -> None:
        if not self._has_announced and all(worker.is_ready for worker in self._workers):
            self._has_announced = True
            warn_of_loss(self._settings)
            warn_of_exposure(self._settings)
            pids = ", ".join(str(worker.pid) for worker in self._workers)
            log.info("%d workers share %d shards, as processes %s", self._map.workers, self._map.shards, pids)
            announce(self._settings, address_of(self._settings, self._listening[0].getsockname()[1]))

    def _send(self, worker: WorkerProcess, message: messages.Message, descriptors: Sequence[int] = ()) -> bool:
        return worker.control is not None and messages.send(worker.control, message, descriptors)

    # -- starting and restarting workers ---------------------------------------------------------------------------

    def _start_all(self) -> None:
        for worker in self._workers:
            self._fork(worker)

    def _restart(self, worker: WorkerProcess) -> None:
        self._start(worker)

    def _fails_start(self, worker: WorkerProcess) -> bool:
        """Whether the end of a worker means that the server cannot start."""
        return worker.failure is not None and not self._has_announced

    def _is_leaving(self, worker: WorkerProcess) -> bool:
        """Whether a worker ended on purpose, and is not to be restarted."""
        return False

    def _run_worker(self, number: int, control: socket.socket) -> int:
        """In the child: serve; returns the exit code."""
        return run_worker(self._worker_settings(number), self._load, number, self._map, self._listening, control)

    def _start(self, worker: WorkerProcess) -> None:
        """Start a worker, now or, if the system does not allow it, later."""
        try:
            self._fork(worker)
        except OSError as error:
            if self._is_leaving(worker):
                return
            worker.backoff_s = _longer(worker.backoff_s)
            worker.restart_at_s = time.monotonic() + worker.backoff_s
            log.error("worker %d cannot be started yet: %s", worker.number, error)

    def _fork(self, worker: WorkerProcess) -> None:
        ours, theirs = messages.pair()
        with theirs:
            try:
                self._selector.register(ours, selectors.EVENT_READ, worker)
                sys.stderr.flush()
                pid = os.fork()
            except OSError:
                with suppress(KeyError):
                    self._selector.unregister(ours)
                ours.close()
                raise
            if pid == 0:
                self._become(worker.number, ours, theirs)
        number, deaths, backoff_s = worker.number, worker.deaths, worker.backoff_s
        worker.__init__(number)  # type: ignore[misc]
        worker.deaths, worker.backoff_s = deaths, backoff_s
        worker.pid, worker.control = pid, ours
        worker.started_s = worker.last_answer_s = time.monotonic()

    def _become(self, number: int, ours: socket.socket, theirs: socket.socket) -> None:
        """Runs in the child process: become the worker."""
        code = 1
        try:
            # Its shards may get another owner when the supervisor has died.
            SYSTEM.die_with_parent(signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for end in (ours, *self._inherited):
                end.close()
            for other in self._workers:
                if other.control is not None:
                    other.control.close()
            code = self._run_worker(number, theirs)
        except BaseException:
            log.exception("worker %d failed unexpectedly", number)
        finally:
            logging.shutdown()
            os._exit(code)

    def _reap(self) -> None:
        for worker in self._workers:
            if worker.is_running and os.waitpid(worker.pid, os.WNOHANG)[0]:
                self._on_death(worker)

    def _on_death(self, worker: WorkerProcess) -> None:
        pid, worker.pid = worker.pid, 0
        if worker.control is not None:
            self._receive(worker)
        if worker.control is not None:
            self._selector.unregister(worker.control)
            worker.control.close()
            worker.control = None
        was_ready, worker.is_ready, worker.has_said_hello = worker.is_ready, False, False
        if self._stop_until_s is not None or self._drain_until_s is not None or self._is_leaving(worker):
            return
        if self._fails_start(worker):
            assert worker.failure is not None
            self._fail(WorkerFailedError(worker.failure.kind, worker.failure.message))
        elif self._settings.storage.mode == "memory":
            self._fail(
                WorkerFailedError(
                    "memory",
                    f"worker {worker.number} (process {pid}) died, and with it its streams, because storage mode is"
                    " memory; the server ends. Use file-durable to survive this",
                )
            )
        else:
            now_s = time.monotonic()
            if was_ready and now_s - worker.started_s >= STABLE_S:
                worker.deaths, worker.backoff_s = 0, 0.0
            worker.deaths += 1
            if worker.deaths > 1 or not was_ready:
                worker.backoff_s = _longer(worker.backoff_s)
            worker.restart_at_s = now_s + worker.backoff_s
            reason = f": {worker.failure.message}" if worker.failure is not None else ""
            log.error("worker %d (process %d) died%s; it is restarted", worker.number, pid, reason)

    def _watch(self, worker: WorkerProcess, now_s: float) -> None:
        if not worker.is_running:
            if worker.restart_at_s is not None and now_s >= worker.restart_at_s and self._drain_until_s is None:
                self._restart(worker)
            return
        # Recovery takes as long as it takes, but the worker reports that it runs.
        limit_s = self._settings.server.worker_timeout_secs * (1 if worker.is_ready else STARTING_FACTOR)
        if now_s - worker.last_answer_s > limit_s:
            log.error(
                "worker %d (process %d) did not answer for %g s and is killed", worker.number, worker.pid, limit_s
            )
            os.kill(worker.pid, signal.SIGKILL)
            worker.last_answer_s = now_s
        # Not in every iteration: the response to a ping starts the next one.
        if worker.is_ready and now_s >= worker.next_ping_s:
            worker.next_ping_s = now_s + PING_S
            self._send(worker, messages.Ping())

    # -- the end ---------------------------------------------------------------------------------------------------

    def _fail(self, failure: WorkerFailedError) -> None:
        if self._failure is None:
            self._failure = failure
        self._drain_until_s = time.monotonic()

    def _begin_drain(self) -> None:
        if self._drain_until_s is None:
            log.info("draining %d workers", self._map.workers)
            self._drain_until_s = time.monotonic() + self._settings.server.drain_timeout_secs
            # New connections are refused as soon as the workers have closed it too.
            self._close_listening()
            for worker in self._workers:
                self._send(worker, messages.Drain())

    def _close_listening(self) -> None:
        for listening in self._listening:
            listening.close()

    def _advance_stop(self, now_s: float) -> None:
        if self._drain_until_s is not None and self._stop_until_s is None:
            running = [worker for worker in self._workers if worker.is_running]
            if now_s >= self._drain_until_s or all(worker.is_drained for worker in running):
                self._stop_until_s = now_s + STOP_S
                for worker in running:
                    self._send(worker, messages.Stop())
        elif self._stop_until_s is not None and now_s >= self._stop_until_s:
            for worker in self._workers:
                if worker.is_running:
                    log.warning("worker %d did not stop in time and is killed", worker.number)
                    os.kill(worker.pid, signal.SIGKILL)
            self._stop_until_s = now_s + STOP_S


def _bind(settings: Settings) -> list[socket.socket]:
    """One listening socket for each address of the host, with the same port. All workers accept from them, so the first
    idle worker gets a connection."""
    port, listening, unsupported = settings.server.port, list[socket.socket](), OSError("The host has no address")
    found = socket.getaddrinfo(settings.server.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as opened:
        for family, kind, protocol, _, (host, _, *scope) in dict.fromkeys(found):
            try:
                bound = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError as error:
                unsupported = error  # The system may have another family.
                continue
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((host, port, *scope))
            port = bound.getsockname()[1]
            bound.listen(BACKLOG)
            bound.setblocking(False)
            listening.append(bound)
        opened.pop_all()
    if not listening:
        raise unsupported
    return listening


def _pair(one: WorkerProcess, other: WorkerProcess) -> tuple[int, int]:
    return min(one.number, other.number), max(one.number, other.number)


def _longer(backoff_s: float) -> float:
    return min(BACKOFF_MAX_S, max(0.2, backoff_s * 2))


def _discard(woken: socket.socket) -> None:
    try:
        while woken.recv(4096):
            pass
    except BlockingIOError:
        pass
