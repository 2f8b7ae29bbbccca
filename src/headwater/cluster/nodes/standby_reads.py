"""Reads that a warm standby answers, for the other processes of its node (`cluster.standby_reads`).

Before each answer the owner is asked what it has committed, and the answer waits until that is applied here. So a read
is never older than what was acknowledged before it was sent, on any node, and never shows what could still be lost. The
standby declines what it cannot answer like the owner (errors, streams that expire or are fenced, quotas of namespaces,
and everything while the owner does not answer): the process that has the client relays the request to the owner.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from headwater.cluster.nodes.committed import QUESTION
from headwater.cluster.nodes.standby import CommittedPosition, StandbyStorage
from headwater.cluster.peers import Peer, PeerLostError, Peers
from headwater.cluster.relay import Relay
from headwater.cluster.relayed import RelayedConnection, Tunnel, TunnelPool
from headwater.core.errors import Refusal
from headwater.engine.engine import Engine
from headwater.engine.fences import fence_key
from headwater.engine.stream_refusals import not_found
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import LiveResponse, PiecewiseResponse, Response
from headwater.http.routes import ROUTES
from headwater.http.routing import Route, Router
from headwater.storage.tiering.standby_store import FollowStep

FOLLOW_S: Final = 0.2
"""How often a standby reads new batches if nothing wakes it."""
RECORDS_MAX: Final = 256
"""Records that are applied before readers get a turn."""
CURRENT_S: Final = 1.0
"""How long a read waits until everything is applied that the owner has committed. Then the owner gets it."""
WATCH_S: Final = 5.0
"""The same for live readers, whose responses have begun."""
RETRY_S: Final = 0.2
FIRST_ERROR: Final = 400
READ_ROUTES: Final = tuple(route for route in ROUTES if route.standby_may_answer)


class OwnerPosition:
    """Follows what the owner has committed, while clients read here."""

    def __init__(self, engine: Engine, storage: StandbyStorage, peers: Peers) -> None:
        self._engine = engine
        self._storage = storage
        self._peers = peers
        self._known = CommittedPosition(0, 0)
        self._asked: asyncio.Task[bool] | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._late_lsn = 0
        """A record that was not applied in time: until it is, reads do not wait here."""
        self.wake: Final = asyncio.Event()
        """Set when there is something to read from the journal."""

    async def is_current(self) -> bool:
        """Wait until readers see everything that the owner had acknowledged at this time; False if that takes too
        long."""
        if self._storage.applied_lsn < self._late_lsn:
            return False
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_task(self._become_current())
        return await asyncio.shield(self._asked)

    async def watch(self) -> None:
        """Keep live readers current."""
        while True:
            is_current = False
            if any(self._engine.metrics.followers.values()):
                is_current = await self._catch_up(self._storage.applied_lsn, WATCH_S)
            if not is_current:
                await asyncio.sleep(RETRY_S)

    def on_applied(self) -> None:
        """Note that something may have been applied."""
        applied_lsn = self._storage.applied_lsn
        for lsn, future in self._waiting:
            if lsn <= applied_lsn and not future.done():
                future.set_result(None)
        self._waiting = [waiting for waiting in self._waiting if not waiting[1].done()]

    async def _become_current(self) -> bool:
        # Readers that were waiting when this task started share its question; later ones need another.
        self._asked = None
        is_current = await self._catch_up(None, CURRENT_S)
        if not is_current:
            self._late_lsn = self._known.lsn
        return is_current

    async def _catch_up(self, after_lsn: int | None, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                committed = await self._ask(after_lsn)
                if committed > self._known:
                    self._known = committed
                    self._storage.journal.confirm(committed)
                if self._storage.applied_lsn < committed.lsn:
                    self.wake.set()
                    applied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiting.append((committed.lsn, applied))
                    await applied
        except (PeerLostError, Refusal, TimeoutError):
            return False
        return True

    async def _ask(self, after_lsn: int | None) -> CommittedPosition:
        """Ask the owner, through any process of this node."""
        through = next(iter(self._peers.all()), None)
        if through is None:
            raise PeerLostError("no process of this node is connected")
        return CommittedPosition(*await through.ask(QUESTION, after_lsn))


async def follow_owner(engine: Engine, storage: StandbyStorage, owner_position: OwnerPosition) -> None:
    """Apply what the owner commits, until the shard is taken over. The event loop never waits for Postgres."""
    loop = asyncio.get_running_loop()
    steps = storage.follow()
    applied = 0
    try:
        with ThreadPoolExecutor(1, "headwater-standby") as thread:
            step = next(steps, None)
            while step is not None:
                if isinstance(step, FollowStep):
                    owner_position.on_applied()
                    applied = 0
                    if step is FollowStep.PAUSES:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(owner_position.wake.wait(), FOLLOW_S)
                        owner_position.wake.clear()
                    elif step is FollowStep.BLOCKS:
                        step = await loop.run_in_executor(thread, next, steps, None)
                        continue
                else:
                    engine.replay(step)
                    applied += 1
                    if applied % RECORDS_MAX == 0:
                        await asyncio.sleep(0)
                step = next(steps, None)
    finally:
        # The processes that have the clients have counted these requests.
        engine.metrics.requests.clear()
        engine.metrics.request_seconds.clear()


class StandbyReads:
    """The server of the standby. It stops when the connections to the other processes are closed."""

    def __init__(self, context: Context, relay: Relay, owner_position: OwnerPosition) -> None:
        self._context = context
        self._relay = relay
        self._owner_position = owner_position
        self._pool = TunnelPool(StandbyRouter(READ_ROUTES))
        relay.peers.open_server = self._open

    def _open(self, peer: Peer, number: int, begin: int, data: bytes) -> Tunnel:
        pool = self._pool
        tunnel = pool.idle.pop() if pool.idle else StandbyTunnel(self._context, pool, self._relay, self._owner_position)
        pool.busy.add(tunnel)
        return tunnel.use(peer, number)


class StandbyRouter(Router):
    """The reads that a standby can answer."""

    def resolve(self, context: Context, request: Request) -> tuple[Route, Address]:
        route, address = super().resolve(context, request)
        engine = context.engine
        stream = engine.seen(address.name)
        # A read would extend the life of a mortal stream. Only the owner has the state of fences and the usage of
        # namespaces.
        if (
            stream is None
            or stream.mortal
            or fence_key(stream.id) in engine.catalog.documents
            or engine.quota.namespaces is not None
        ):
            raise not_found(address.name)
        return route, address


class StandbyConnection(RelayedConnection):
    """A connection that has a response, or none: errors are reported by the owner."""

    __slots__ = ()

    def _send(self, response: Response | PiecewiseResponse | LiveResponse) -> None:
        if isinstance(response, Response) and response.status >= FIRST_ERROR:
            self.abort()
        else:
            super()._send(response)


class StandbyTunnel(Tunnel):
    """A tunnel whose request begins when the standby is current."""

    __slots__ = ("_owner_position", "_waiting")

    connection_type = StandbyConnection

    def __init__(self, context: Context, pool: TunnelPool, relay: Relay, owner_position: OwnerPosition) -> None:
        super().__init__(context, pool.router, relay, pool.free)
        self._owner_position = owner_position
        self._waiting: asyncio.Task[None] | None = None

    def begin(self, origin: bytes, data: bytes) -> None:
        self._waiting = asyncio.get_running_loop().create_task(self._begin_when_current(origin, data))

    async def _begin_when_current(self, origin: bytes, data: bytes) -> None:
        if not await self._owner_position.is_current():
            self.abort()
        elif not self.is_closing():
            super().begin(origin, data)
