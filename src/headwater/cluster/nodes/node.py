"""A node of a cluster: a supervisor with one process for each shard that the node owns, and a keeper of their leases.

Which shards these are is decided by the keeper's turns. A shard that the node loses has its process killed; one whose
process died gets another epoch and is opened again; one that the node should hand over is drained first. While the node
has no process that serves, the supervisor itself answers every request with 503.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from headwater.cluster import messages
from headwater.cluster.nodes.keeper import Refused, receive_answer, send_turn, start_keeper
from headwater.cluster.nodes.link_tls import link_tls
from headwater.cluster.nodes.node_worker import NodeWorker
from headwater.cluster.nodes.ownership import Standing, Turn
from headwater.cluster.nodes.refusals import Refusals
from headwater.cluster.shards import ShardMap
from headwater.cluster.supervisor import STOP_S, WorkerFailedError, WorkerProcess, WorkerSupervisor
from headwater.cluster.worker import run_serving
from headwater.http.server import Reloader, address_of, announce, warn_of_exposure

if TYPE_CHECKING:
    from headwater.config import Settings

log = logging.getLogger("headwater.cluster")

TURNS_PER_LEASE: Final = 6
STANDBY_S: Final = 5.0
"""A standby that ended is not started again before this time has passed since its start."""
HAND_OVER_S: Final = 2.0
"""How long a shard that is handed over may take to complete its requests."""
LEAVE_S: Final = 1.0
"""How long the keeper may take to report that the node has left."""
_ANY: Final = frozenset(("0.0.0.0", "::", ""))


def run_node(settings: Settings, load: Callable[[], Settings]) -> None:
    """Serve as a node until SIGTERM or SIGINT. Raises `StorageError` if a requirement of the cluster is not met."""
    host = settings.cluster.host or (socket.gethostname() if settings.server.host in _ANY else settings.server.host)
    name = settings.cluster.node or f"{socket.gethostname()}:{settings.server.port or os.getpid()}"
    owner = f"{name}#{secrets.token_hex(4)}"
    tls = link_tls(settings.cluster)
    if tls is not None:
        tls.check()
    keeper, pid, opened = start_keeper(settings, name, owner, f"{host}:{settings.server.port}")
    try:
        log.warning("the mode cluster is experimental: keep a copy of data that you cannot lose")
        log.info("node %s of the cluster %s, which has %d shards", name, settings.cluster.name, opened.shards)
        NodeSupervisor(settings, load, opened.shards, keeper, host).run()
    finally:
        keeper.close()
        _end_keeper(pid)


def _end_keeper(pid: int) -> None:
    """Give the keeper time to report that the node has left; an unresponsive Postgres must not delay the end."""
    until_s = time.monotonic() + LEAVE_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= until_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.02)


class NodeSupervisor(WorkerSupervisor):
    def __init__(
        self, settings: Settings, load: Callable[[], Settings], shards: int, keeper: socket.socket, host: str
    ) -> None:
        super().__init__(settings, load, ShardMap(shards, shards), lambda _: settings)
        self._keeper = keeper
        self._host = host
        self._every_s = settings.cluster.lease_secs / TURNS_PER_LEASE
        self._next_turn_s = 0.0
        self._asked: Turn | None = None
        self._standing = Standing({}, 0.0, {})
        self._problem = ""
        self._epochs: dict[int, int] = {}
        """The epoch of the last started process of each shard."""
        self._standbys: set[int] = set()
        """Shards of other nodes whose process here is a standby."""
        self._standby_from_s: dict[int, float] = {}
        """When the next standby of a shard may start."""
        self._reopen: set[int] = set()
        self._release: set[int] = set()
        self._moving: WorkerProcess | None = None
        self._move_until_s = 0.0
        self._is_move_ending = False
        self._leave_until_s: float | None = None

    # -- hooks of the supervisor -----------------------------------------------------------------------------------

    def _start_all(self) -> None:
        self._selector.register(self._keeper, selectors.EVENT_READ, self._on_answer)
        self._inherited = (*self._inherited, self._keeper)
        self._refusals = Refusals(self._listening, self._selector)

    def _turn(self, woken: socket.socket) -> None:
        super()._turn(woken)
        now_s = time.monotonic()
        self._ask(now_s)
        self._advance_move(now_s)
        self._advance_leaving(now_s)
        # Without a process that accepts them, the supervisor answers the clients.
        should_refuse = self._drain_until_s is None and not any(worker.is_ready for worker in self._workers)
        self._refusals.turn(now_s, should_refuse=should_refuse)

    def _run_worker(self, number: int, control: socket.socket) -> int:
        worker = NodeWorker(
            self._settings,
            Reloader(self._load),
            number,
            self._map,
            self._listening,
            control,
            epoch=None if number in self._standbys else self._epochs[number],
            lease=messages.ShardLease(self._standing.until_s, self._standing.owners),
            host=self._host,
        )
        return run_serving(worker, control)

    def _introduce(self, newcomer: WorkerProcess) -> None:
        """Publish the address of the new process in the next turn, so that the others connect to it."""
        newcomer.has_said_hello = True
        self._next_turn_s = 0.0
        for shard in sorted(self._standbys):
            self._connect_standby(self._workers[shard], newcomer)

    def _on_warm(self, standby: WorkerProcess) -> None:
        for worker in self._workers:
            self._connect_standby(standby, worker)

    def _announce_once(self) -> None:
        if not self._has_announced:
            self._has_announced = True
            warn_of_exposure(self._settings)
            announce(self._settings, address_of(self._settings, self._listening[0].getsockname()[1]))

    def _fails_start(self, worker: WorkerProcess) -> bool:
        return False  # It may be the shard of another node by now, or its next attempt succeeds.

    def _is_leaving(self, worker: WorkerProcess) -> bool:
        number = worker.number
        return worker is self._moving or number in self._standbys or number not in self._standing.held

    def _restart(self, worker: WorkerProcess) -> None:
        worker.restart_at_s = None
        self._reopen.add(worker.number)
        self._next_turn_s = 0.0

    def _begin_drain(self) -> None:
        """Hand the shards over one by one, then end."""
        if self._leave_until_s is None:
            log.info("handing over %d shards", len(self._standing.held))
            self._leave_until_s = time.monotonic() + self._settings.server.drain_timeout_secs
            for shard in tuple(self._standbys):
                self._end_standby(self._workers[shard])
            self._next_turn_s = 0.0

    # -- turns -----------------------------------------------------------------------------------------------------

    def _ask(self, now_s: float) -> None:
        if self._asked is None and now_s >= self._next_turn_s:
            self._next_turn_s = now_s + self._every_s
            held = self._standing.held
            self._asked = Turn(
                {shard: self._workers[shard].address for shard in held},
                tuple(self._reopen & held.keys()),
                tuple(self._release),
                takes=self._leave_until_s is None,
                warm=tuple(shard for shard in sorted(self._standbys) if self._workers[shard].is_warm),
            )
            send_turn(self._keeper, self._asked)

    def _on_answer(self) -> None:
        answer = receive_answer(self._keeper)
        if not isinstance(answer, Standing):
            self._selector.unregister(self._keeper)
            reason = answer.reason if isinstance(answer, Refused) else "the process that keeps the leases ended"
            self._fail(WorkerFailedError("cluster", reason))
            return
        asked, self._asked = self._asked, None
        assert asked is not None
        if answer.problem:
            if answer.problem != self._problem:
                log.error("cannot renew the leases of this node's shards: %s", answer.problem)
            self._problem = answer.problem
            return
        if self._problem:
            log.info("the leases are renewed again")
            self._problem = ""
        self._reopen -= set(asked.reopen)
        self._release -= set(asked.release)
        lost = self._standing.held.keys() - answer.held.keys() - set(asked.release)
        if lost:
            log.error("lost the leases of shards %s; other nodes own them", sorted(lost))
        self._standing = answer
        self._follow()
        if len(answer.owners) == self._map.shards:
            self._announce_once()

    def _follow(self) -> None:
        """Start and stop processes according to the leases."""
        held, is_leaving = self._standing.held, self._leave_until_s is not None
        lease = messages.ShardLease(self._standing.until_s, self._standing.owners)
        for worker in self._workers:
            shard = worker.number
            epoch = held.get(shard)
            if not worker.is_running:
                self._standbys.discard(shard)
            if shard in self._standbys:
                self._follow_standby(worker, epoch, lease)
            elif worker.is_running:
                if epoch != self._epochs.get(shard):
                    os.kill(worker.pid, signal.SIGKILL)
                else:
                    self._send(worker, lease)
            elif is_leaving:
                continue
            elif epoch is not None and epoch != self._epochs.get(shard):
                self._epochs[shard] = epoch
                self._start(worker)
            elif epoch is None and shard in self._standing.standbys:
                self._start_standby(worker)

    # -- standbys --------------------------------------------------------------------------------------------------

    def _start_standby(self, worker: WorkerProcess) -> None:
        now_s = time.monotonic()
        if now_s >= self._standby_from_s.get(worker.number, 0.0):
            self._standby_from_s[worker.number] = now_s + STANDBY_S
            self._standbys.add(worker.number)
            self._start(worker)

    def _follow_standby(self, worker: WorkerProcess, epoch: int | None, lease: messages.ShardLease) -> None:
        """Let a standby become the owner, or end it."""
        if epoch is None:
            if worker.number not in self._standing.standbys:
                self._end_standby(worker)
        elif worker.is_warm:
            self._standbys.discard(worker.number)
            self._epochs[worker.number] = epoch
            self._send(worker, lease)
            self._send(worker, messages.TakeOver(epoch))
        else:
            self._end_standby(worker)  # It is not faster than a new process.

    def _connect_standby(self, standby: WorkerProcess, worker: WorkerProcess) -> None:
        """Connect a standby that serves reads to a process that has clients."""
        is_serving = worker.has_said_hello and worker.number not in self._standbys
        if not (self._settings.cluster.standby_reads and standby.is_warm and is_serving):
            return
        ends = socket.socketpair()
        self._send(standby, messages.ConnectReader(worker.number), (ends[0].fileno(),))
        self._send(worker, messages.ConnectStandby(standby.number), (ends[1].fileno(),))
        for end in ends:
            end.close()

    def _end_standby(self, worker: WorkerProcess) -> None:
        if worker.is_running:
            os.kill(worker.pid, signal.SIGKILL)

    # -- handing over ----------------------------------------------------------------------------------------------

    def _advance_move(self, now_s: float) -> None:
        moving = self._moving
        if moving is None:
            ready = [worker for worker in self._workers if worker.is_ready]
            if self._standing.surplus and ready and not self._release:
                self._moving = ready[-1]
                self._is_move_ending = False
                self._move_until_s = now_s + HAND_OVER_S
                self._send(ready[-1], messages.Drain())
        elif not moving.is_running:
            self._moving = None
            self._give_back(moving.number)
        elif not self._is_move_ending and (moving.is_drained or now_s >= self._move_until_s):
            self._is_move_ending = True
            self._move_until_s = now_s + STOP_S
            self._send(moving, messages.Stop())
        elif now_s >= self._move_until_s:
            os.kill(moving.pid, signal.SIGKILL)

    def _give_back(self, shard: int) -> None:
        self._release.add(shard)
        held = {other: epoch for other, epoch in self._standing.held.items() if other != shard}
        self._standing = msgspec.structs.replace(self._standing, held=held, surplus=0)
        self._next_turn_s = 0.0

    def _advance_leaving(self, now_s: float) -> None:
        if self._leave_until_s is None or self._drain_until_s is not None:
            return
        for worker in self._workers:
            if worker.number in self._standing.held and not worker.is_running and worker is not self._moving:
                self._give_back(worker.number)
        is_done = not self._standing.held and not self._release and self._asked is None
        if is_done or now_s >= self._leave_until_s:
            super()._begin_drain()
