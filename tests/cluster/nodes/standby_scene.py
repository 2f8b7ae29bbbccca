"""A shard with an owner and a standby that serves reads, in one process, over a real Postgres."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import cast

from headwater.cluster import frames
from headwater.cluster.multi_worker_follow import MultiWorkerFollow
from headwater.cluster.nodes.committed import CommittedAnswers, forward_questions
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.schema import connect
from headwater.cluster.nodes.standby import StandbyJournal, StandbyStorage
from headwater.cluster.nodes.standby_reads import OwnerPosition, StandbyReads, follow_owner
from headwater.cluster.peers import Peer, PeerLostError, Peers
from headwater.cluster.relay import Exchange, Relay
from headwater.cluster.relayed import RelayServer
from headwater.config import Settings
from headwater.engine.clock import SteadyClock
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.scheduler import LoopScheduler
from headwater.http.routes import ROUTES
from headwater.http.routing import Router
from headwater.http.server import build_context
from headwater.stack.database import LocalPostgres
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.tiering.objects import Objects
from headwater.storage.tiering.open import TierSettings, open_replicated
from headwater.storage.tiering.tier import TieredFilesystem
from tests.pressure.clients import byte_position
from tests.pressure.history import History, Operation
from tests.storage.tiering.driving import SMALL
from tests.waiting import async_wait_until

CLIENT = 255
"""The number of the process that has the clients."""
TIER = TierSettings(2**30, 2**30, 3600.0, retry_s=0.02)


def _itself(peer: Peer) -> Peer:
    return peer


def request(method: str, target: str, body: bytes = b"", **headers: str) -> bytes:
    fields = {"Host": "localhost", "Content-Type": "text/plain", "Content-Length": str(len(body))} | headers
    lines = [f"{method} /v1/stream/{target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def tail_of(response: bytes) -> int:
    found = re.search(rb"(?i)stream-next-offset: (\S+)", response)
    assert found is not None, response
    return byte_position(found[1].decode())


def offset_of(response: bytes) -> str:
    found = re.search(rb"(?i)stream-next-offset: (\S+)", response)
    assert found is not None, response
    return found[1].decode()


def status_of(response: bytes) -> int:
    return int(response.split(b" ")[1])


def body_of(response: bytes) -> bytes:
    return response.partition(b"\r\n\r\n")[2]


class StandbyScene:
    """One shard. `owner` and `standby` are connections on which requests can be sent to them."""

    def __init__(self, running: LocalPostgres, shard: int, directory: Path, objects: Objects) -> None:
        self._running = running
        self._shard = shard
        self._directory = directory
        self._objects = objects
        self._client = Peers(CLIENT, 256)
        self._standbys = Peers(CLIENT, 256)
        self.owner: Peer
        self.standby: Peer
        self.engine: Engine
        """That of the standby."""
        self.storage: StandbyStorage
        self.owners_storage: JournaledStorage
        self.owner_position: OwnerPosition
        self.history = History()

    # -- the two processes -----------------------------------------------------------------------------------------

    @asynccontextmanager
    async def owned(self, epoch: int, *, answers: bool = True) -> AsyncIterator[Engine]:
        """The owner in an epoch, which replaces the former one."""
        with connect(self._running.url, "test") as connection:
            connection.execute("UPDATE headwater.shard SET epoch = %s WHERE id = %s", [epoch, self._shard])
        loop = asyncio.get_running_loop()
        journal = PostgresJournal(
            self._running.url, self._shard, epoch, require_standby=False, is_ours=lambda: False, keep_s=60.0
        )
        with closing(journal):
            storage, files = open_replicated(
                self._objects, self._directory / str(epoch), TIER, SMALL, epoch=epoch, replica=journal
            )
            engine = _engine(storage, files, loop)
            engine.start()
            peers = Peers(self._shard, 256)
            relay = Relay(peers, loop, 1.0)
            router = Router(ROUTES)
            context = build_context(Settings(), engine, None, loop, 16)
            peers.open_server = RelayServer(context, router, router, relay, cast("MultiWorkerFollow", None)).open
            if answers:
                CommittedAnswers(engine, storage, epoch, peers)
            else:
                peers.answers("committed", _never)
            self.owner = await _connect(self._client, self._shard, peers, CLIENT)
            self.owners_storage = storage
            try:
                yield engine
            finally:
                for peer in peers.all():
                    peer.close()
                await async_wait_until(lambda: engine.idle or engine.failure is not None)
                engine.stop()

    @asynccontextmanager
    async def followed(self, *, waits_for_owner: bool = True, head_s: float = 0.0) -> AsyncIterator[None]:
        """The standby."""
        loop = asyncio.get_running_loop()
        journal = StandbyJournal(self._running.url, self._shard, waits_for_owner=waits_for_owner)
        warm = asyncio.Event()
        storage = self.storage = StandbyStorage(
            self._objects,
            self._directory / "standby",
            TIER,
            SMALL,
            journal=journal,
            wait=lambda: None,
            on_warm=warm.set,
            head_s=head_s,
        )
        storage.journal = journal
        engine = self.engine = _engine(storage, storage.files, loop)
        peers = Peers(self._shard, 256)
        self.owner_position = OwnerPosition(engine, storage, peers)
        context = build_context(Settings(), engine, None, loop, 16)
        StandbyReads(context, Relay(peers, loop, 1.0), self.owner_position)
        forward_questions(self._standbys, self._client)
        self.standby = await _connect(self._standbys, self._shard, peers, CLIENT)
        tasks = [
            asyncio.create_task(follow_owner(engine, storage, self.owner_position)),
            asyncio.create_task(self.owner_position.watch()),
        ]
        try:
            await asyncio.wait((asyncio.ensure_future(warm.wait()), tasks[0]), return_when=asyncio.FIRST_COMPLETED)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for each in (self._client, self._standbys, peers):
                for peer in each.all():
                    peer.close()
            journal.close()

    def last_lsn(self) -> int:
        """The last record in Postgres."""
        with connect(self._running.url, "test") as connection:
            row = connection.execute("SELECT seq FROM headwater.shard WHERE id = %s", [self._shard]).fetchone()
        assert row is not None
        return int(str(row[0]))

    # -- clients ---------------------------------------------------------------------------------------------------

    async def asked(self, peer: Peer, method: str, target: str, body: bytes = b"", **headers: str) -> bytes | None:
        """The response to a request; None if it was declined."""
        try:
            data, _ = await Exchange(peer, request(method, target, body, **headers), frames.BEGIN).response
        except PeerLostError:
            return None
        return data

    async def create(self, name: str, **headers: str) -> None:
        response = await self.asked(self.owner, "PUT", name, b"", **headers)
        assert response is not None
        assert status_of(response) == 201

    async def append(self, name: str, body: bytes) -> Operation:
        """An append, which is part of the history."""
        operation = self.history.begin("append", name, body)
        response = await self.asked(self.owner, "POST", name, body)
        if response is not None and status_of(response) == 204:
            operation.end = tail_of(response)
            self.history.end(operation, "ok")
        return operation

    async def read(self, name: str) -> bytes:
        """A read of everything from the standby, which is part of the history."""
        operation = self.history.begin("read", name)
        response = await self.asked(self.standby, "GET", f"{name}?offset=-1")
        assert response is not None, "declined"
        assert status_of(response) == 200
        operation.body = body_of(response)
        operation.end, operation.up_to_date = tail_of(response), True
        self.history.end(operation, "ok")
        return operation.body


def _engine(storage: JournaledStorage, files: TieredFilesystem, loop: asyncio.AbstractEventLoop) -> Engine:
    deferring = files.cache.deferring
    return Engine(storage, SteadyClock(), LoopScheduler(loop), EngineLimits(), commit="thread", deferring=deferring)


async def _never(_sender: int, _arguments: object) -> None:
    await asyncio.Event().wait()


async def _connect(one: Peers, ones_peer: int, other: Peers, others_peer: int) -> Peer:
    """Connect two processes; returns the peer at the first."""
    loop = asyncio.get_running_loop()
    for (peers, number), end in zip(((one, ones_peer), (other, others_peer)), socket.socketpair(), strict=True):
        end.setblocking(False)
        peer = peers.connect(number)
        await loop.create_unix_connection(partial(_itself, peer), sock=end)
        peers.connected(peer)
    found = one.get(ones_peer)
    assert found is not None
    return found


@asynccontextmanager
async def standby_scene(
    running: LocalPostgres, shard: int, directory: Path, objects: Objects, *, waits_for_owner: bool = True
) -> AsyncIterator[StandbyScene]:
    """An owner and its standby."""
    scene = StandbyScene(running, shard, directory, objects)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(scene.owned(1))
        await stack.enter_async_context(scene.followed(waits_for_owner=waits_for_owner))
        yield scene
