"""The process of one shard on a node of a cluster: a worker whose store is opened from Postgres and the object store.

Its commits are refused by Postgres once the shard has another owner. Reads are answered from memory, so they depend on
the lease: another owner may have written more once it has expired. `_check` is called before every request, whether of
a client or relayed, and ends the process instead. What is sent without a new request (the end of a long-poll, events)
was asked for while the lease was valid, and says what was true then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from headwater.cluster import messages
from headwater.cluster.nodes.committed import CommittedAnswers, forward_questions
from headwater.cluster.nodes.link_tls import link_tls
from headwater.cluster.nodes.open_shard import empty_directory, open_shard, shard_directory
from headwater.cluster.nodes.shard_links import ShardLinks
from headwater.cluster.nodes.standby import StandbyStorage, open_standby
from headwater.cluster.nodes.standby_reads import OwnerPosition, StandbyReads, follow_owner
from headwater.cluster.nodes.status_page import StatusPage
from headwater.cluster.peers import Peers
from headwater.cluster.relay import Relay
from headwater.cluster.shards import ShardMap
from headwater.cluster.worker import ServingWorker
from headwater.engine.engine import Engine
from headwater.engine.open_storage import Store
from headwater.http.routing import Route
from headwater.http.server import Reloader, build_context, sweep
from headwater.operating_system import SYSTEM
from headwater.storage.journaled_store import JournaledStorage

if TYPE_CHECKING:
    from headwater.config import Settings

log = logging.getLogger("headwater.cluster")

CHECK_S: Final = 0.05
ANSWER_S: Final = 0.2
"""Time for the refusals of waiting writers to be sent before the process ends."""
EXPIRED_CODE: Final = 3


class NodeWorker(ServingWorker):
    def __init__(
        self,
        settings: Settings,
        reloader: Reloader,
        shard: int,
        shard_map: ShardMap,
        listening: Sequence[socket.socket],
        control: socket.socket,
        *,
        epoch: int | None,
        lease: messages.ShardLease,
        host: str,
    ) -> None:
        """Without an epoch it is a standby, until it takes the shard over."""
        directory = shard_directory(settings.storage.data_dir, shard, epoch or 0)
        # A commit is a round trip to another machine: never on the event loop.
        storage = settings.storage.model_copy(update={"data_dir": directory, "commit": "thread"})
        super().__init__(
            settings.model_copy(update={"storage": storage}), reloader, shard, shard_map, listening, control
        )
        self._node_settings = settings
        self._epoch: int | None = epoch
        self._lease = lease
        self._host = host
        self._standbys = Peers(shard, shard_map.workers)
        """The standbys on this node that serve reads."""
        self._readers = Peers(shard, shard_map.workers)
        """Of such a standby: the processes that have clients, which pass its questions on to the owner."""
        self._owner_position: OwnerPosition | None = None
        self._links: ShardLinks | None = None
        self._watching: asyncio.Task[None] | None = None

    def _open_store(self, open_packs_max: int) -> Store:
        if self._epoch is None:
            return open_standby(
                self._node_settings,
                self._number,
                self._map.shards,
                empty_directory(self._node_settings, self._number, 0),
                open_packs_max,
                wait=self._epoch_as_standby,
                on_warm=self._report_warm,
                is_ours=self._is_ours,
            )
        return open_shard(
            self._node_settings, self._number, self._map.shards, self._epoch, open_packs_max, self._is_ours
        )

    def _routes(self, routes: tuple[Route, ...], relay: Relay, store: Store) -> tuple[Route, ...]:
        relay.standbys = self._standbys
        forward_questions(self._standbys, self._peers)
        return StatusPage(self._node_settings, relay, store).routes(routes)

    async def _follow(self, engine: Engine, store: Store) -> None:
        if self._epoch is not None:
            return
        assert isinstance(store.storage, StandbyStorage)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._control.fileno(), self._on_control)
        owner_position = self._owner_position = OwnerPosition(engine, store.storage, self._readers)
        working = []
        if self._settings.cluster.standby_reads:
            settings = self._settings
            context = build_context(settings, engine, None, loop, settings.server.max_connections)
            StandbyReads(context, Relay(self._readers, loop, settings.server.worker_wait_secs), owner_position)
            working = [loop.create_task(owner_position.watch()), loop.create_task(sweep(context))]
        try:
            await follow_owner(engine, store.storage, owner_position)
        finally:
            for task in working:
                task.cancel()
            loop.remove_reader(self._control.fileno())

    def _epoch_as_standby(self) -> int | None:
        """The epoch of this process, if the shard is to be taken over."""
        if self._stop.is_set() or self._drain.is_set():
            logging.shutdown()
            os._exit(0)
        return self._epoch

    async def _connect_local(self, message: messages.ConnectStandby | messages.ConnectReader, descriptor: int) -> None:
        opened = socket.socket(fileno=descriptor)
        opened.setblocking(False)
        if isinstance(message, messages.ConnectStandby):
            peers, number = self._standbys, message.shard
        else:
            peers, number = self._readers, message.worker
        peer = peers.connect(number)
        await asyncio.get_running_loop().create_unix_connection(lambda: peer, sock=opened)
        if peers is self._readers and self._epoch is not None:
            peer.close()  # It has become the owner meanwhile.
        else:
            peers.connected(peer)

    def _report_warm(self) -> None:
        messages.send(self._control, messages.Warm())

    def _on_take_over(self, epoch: int) -> None:
        log.info("the standby takes shard %d over", self._number)
        self._epoch = epoch
        for peer in self._readers.all():
            peer.close()  # What it did not answer is relayed to the owner, which it will be.
        if self._owner_position is not None:
            self._owner_position.wake.set()

    async def _begin(self, engine: Engine, store: Store) -> str:
        assert self._epoch is not None
        assert isinstance(store.storage, JournaledStorage)
        # The recovery took place in one iteration of the loop, so the loop's time is old.
        await asyncio.sleep(0)
        CommittedAnswers(engine, store.storage, self._epoch, self._peers)
        settings = self._settings.cluster
        links = self._links = ShardLinks(self._peers, self._epoch, settings.secret, link_tls(settings))
        port = links.listen(self._host, settings.peer_port + self._number if settings.peer_port else 0)
        # The leases that arrived during recovery.
        self._on_control()
        self._peers.check = self._check
        links.connect_to(self._lease.owners)
        self._watching = asyncio.create_task(self._watch(store))
        return f"{self._host}:{port}"

    def _on_lease(self, lease: messages.ShardLease) -> None:
        self._lease = lease
        if self._links is not None:
            self._links.connect_to(lease.owners)

    def _is_ours(self) -> bool:
        return SYSTEM.elapsed_s() < self._lease.until_s

    def _check(self) -> None:
        if not self._is_ours():
            log.error("the lease of shard %d has expired; its process ends", self._number)
            logging.shutdown()
            os._exit(EXPIRED_CODE)

    async def _watch(self, store: Store) -> None:
        """End when the lease has expired, or when nothing can be written any more: the shard is opened again."""
        assert isinstance(store.storage, JournaledStorage)
        while store.storage.failure is None:
            await asyncio.sleep(CHECK_S)
            self._check()
        await asyncio.sleep(ANSWER_S)
        log.error("shard %d cannot be written; its process ends: %s", self._number, store.storage.failure)
        logging.shutdown()
        os._exit(EXPIRED_CODE)
