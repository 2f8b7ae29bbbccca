"""A worker process: the owner of some shards, with its own storage, connected to the supervisor and to the others.

It recovers its data, reports to the supervisor, is connected to the other workers, and then serves. It exits when the
supervisor asks it to or has died.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvloop

from headwater.cluster import messages
from headwater.cluster.combined_responses import CombinedResponses
from headwater.cluster.coordination import Coordination
from headwater.cluster.feed import Feed
from headwater.cluster.fencing import AllFences, CoordinatorClaims, SealedStreams
from headwater.cluster.followed_streams import FollowedStreams
from headwater.cluster.handover import HandedConnection, HandOver
from headwater.cluster.mirror import AllStreams, Mirror
from headwater.cluster.multi_worker_follow import MultiWorkerFollow
from headwater.cluster.peers import Peers
from headwater.cluster.placed_buckets import PlacedBuckets
from headwater.cluster.placements import Placements
from headwater.cluster.relay import Relay, RelayingConnection
from headwater.cluster.relayed import RelayServer
from headwater.cluster.routing import WorkerRouter
from headwater.cluster.shards import COORDINATOR, ShardMap
from headwater.cluster.shared_reads import SharedReads
from headwater.cluster.tails import Tails
from headwater.cluster.usage import SharedUsage
from headwater.engine.control import ControlServer, open_control_socket
from headwater.engine.descriptors import connections_max, packs_max, raise_limit
from headwater.engine.engine import Engine
from headwater.engine.interpreter import keep_responsive
from headwater.engine.loop_lag import LoopLag
from headwater.engine.open_storage import Store, open_store
from headwater.engine.registry import StreamRegistry
from headwater.engine.scheduler import LoopScheduler
from headwater.engine.stream_index import StreamIndex
from headwater.engine.subscriptions import Subscriptions
from headwater.http.compiled_appends import use_compiled_appends, use_no_compiled_appends
from headwater.http.context import Context
from headwater.http.metrics import ServerCollector
from headwater.http.routes import ROUTES
from headwater.http.routing import Route, Router
from headwater.http.server import (
    BACKLOG,
    Reloader,
    build_context,
    build_engine,
    build_subscriptions,
    open_telemetry,
    sweep,
)
from headwater.http.tls import build_tls, handshake_timeout_s
from headwater.storage.interface import StorageError

if TYPE_CHECKING:
    from headwater.config import Settings

log = logging.getLogger("headwater.cluster")

DRAIN_CHECK_S: Final = 0.01
STARTING_S: Final = 0.5
"""How often a worker that does not answer yet reports that it runs."""


def run_worker(
    settings: Settings,
    load: Callable[[], Settings],
    number: int,
    shard_map: ShardMap,
    listening: Sequence[socket.socket],
    control: socket.socket,
) -> int:
    """Serve until the supervisor says stop; returns the exit code. `settings` has the data directory of the worker."""
    return run_serving(ServingWorker(settings, Reloader(load), number, shard_map, listening, control), control)


def run_serving(worker: ServingWorker, control: socket.socket) -> int:
    """Run a worker in this process; returns its exit code."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal sends Ctrl-C to all processes; the supervisor decides how workers stop.
        signal.signal(ignored, signal.SIG_IGN)
    worker.starting.begin()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(worker.run())
    except (StorageError, ssl.SSLError, OSError) as error:
        kind = "storage" if isinstance(error, StorageError) else "tls" if isinstance(error, ssl.SSLError) else "os"
        messages.send(control, messages.Failed(kind, str(error)))
        return 1
    finally:
        worker.starting.end()
    return 0


class Starting:
    """Reports to the supervisor that this process runs, until its event loop answers.

    A thread does that, because the recovery of the data occupies the event loop.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._has_ended = threading.Event()

    def begin(self) -> None:
        threading.Thread(target=self._report, name="headwater-starting", daemon=True).start()

    def end(self) -> None:
        self._has_ended.set()

    def _report(self) -> None:
        while not self._has_ended.wait(STARTING_S):
            messages.send(self._control, messages.Pong())


class ServingWorker:
    def __init__(
        self,
        settings: Settings,
        reloader: Reloader,
        number: int,
        shard_map: ShardMap,
        listening: Sequence[socket.socket],
        control: socket.socket,
    ) -> None:
        self._settings = settings
        self._reloader = reloader
        self._number = number
        self._map = shard_map
        self._listening = listening
        self._control = control
        self._serve = asyncio.Event()
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()
        self._abort: Callable[[], None] | None = None
        """Aborts the connections of clients that have not ended in time."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._peers = Peers(number, shard_map.workers)
        self._hand_over: HandOver | None = None
        self.starting: Final = Starting(control)

    async def run(self) -> None:
        settings, loop = self._settings, asyncio.get_running_loop()
        open_files_max = raise_limit()
        store = self._open_store(packs_max(open_files_max))
        engine = build_engine(settings, store, loop)
        mirror = Mirror(self._peers)
        buckets = PlacedBuckets(self._map, self._number, mirror)
        engine.buckets.elsewhere = buckets
        await self._follow(engine, store)
        engine.start()
        lag = LoopLag(engine.metrics.loop_lag_seconds)
        lag.start(loop)
        coordination: Coordination | None = None
        registry: StreamRegistry | None = None
        subscriptions: Subscriptions | None = None
        control: ControlServer | None = None
        telemetry = open_telemetry(settings)
        relay = Relay(self._peers, loop, settings.server.worker_wait_secs)
        combined = CombinedResponses(relay)
        routes = self._routes(buckets.routes(combined.routes(ROUTES)), relay, store)
        streams = AllStreams(engine, mirror, relay)
        scheduler = LoopScheduler(loop)
        engine.index = StreamIndex(streams, streams.publisher, scheduler)
        self._peers.on_feed = mirror.on_feed
        SealedStreams(engine, relay)
        if self._number == COORDINATOR:
            coordination = Coordination(streams, mirror, relay)
            routes = coordination.routes(routes)
            fences = AllFences(engine, mirror, relay)
            streams.barrier = fences
            registry = StreamRegistry(streams, scheduler) if settings.registry.enabled else None
            subscriptions = build_subscriptions(settings, streams, loop, fences, telemetry)
        elif settings.subscriptions.enabled:
            routes = CoordinatorClaims(engine, relay).routes(routes)
        Feed(engine, self._map, self._peers)
        try:
            control = await open_control_socket(engine, store, subscriptions, settings.storage)
            context = build_context(
                settings, engine, subscriptions, loop, connections_max(settings, open_files_max), telemetry
            )
            combined.attach(context)
            usage = SharedUsage(self._peers, context)
            placements = Placements(engine, self._map, relay)
            buckets.attach(engine, streams, placements)
            Tails(engine, self._peers, loop)
            reads = SharedReads(context, FollowedStreams(engine, relay, scheduler))
            router = WorkerRouter(routes, self._map, self._number, relay, placements, reads)
            following = MultiWorkerFollow(context, self._map, relay, placements)
            relayed = RelayServer(context, router, Router(routes), relay, following)
            self._peers.open_server = relayed.open
            self._hand_over = HandOver(loop, lambda first: HandedConnection(context, router, relay, first))
            self._peers.on_disconnected.append(self._hand_over.disconnect)
            relay.hand_over = self._hand_over.send
            tls = build_tls(settings)
            if tls is not None:
                tls.has_space = context.connections.has_space
            self._reloader.attach(context, tls)
            loop.add_reader(self._control.fileno(), self._on_control)
            messages.send(self._control, messages.Hello(await self._begin(engine, store)))
            if self._peers.check is None:
                use_compiled_appends(context, (RelayingConnection, HandedConnection))
            else:
                use_no_compiled_appends(context)  # Every request must be checked.
            if coordination is not None:
                await coordination.start(registry, subscriptions)
            messages.send(self._control, messages.Ready())
            self.starting.end()
            await _either(self._serve, self._stop)
            keep_responsive(loop)
            servers = [
                await loop.create_server(
                    lambda: RelayingConnection(context, router, relay),
                    sock=listening,
                    ssl=tls,
                    ssl_handshake_timeout=handshake_timeout_s(settings),
                    backlog=BACKLOG,
                )
                for listening in self._listening
            ]
            if telemetry is not None:
                telemetry.start(ServerCollector(context).collect)
            self._abort = partial(_abort_connections, context, self._number)
            repeated = [asyncio.create_task(sweep(context)), asyncio.create_task(usage.run())]
            await _either(self._drain, self._stop)
            context.draining = True
            for server in servers:
                server.close()
            for connection in context.connections.all():
                connection.drain()
            relayed.drain()
            while not self._stop.is_set():
                if not context.connections and not relayed.is_busy and engine.idle:
                    messages.send(self._control, messages.Drained())
                    await self._stop.wait()
                await asyncio.sleep(DRAIN_CHECK_S)
            for task in repeated:
                task.cancel()
        finally:
            lag.stop()
            loop.remove_reader(self._control.fileno())
            if control is not None:
                await control.close()
            if coordination is not None:
                await coordination.stop()
            if telemetry is not None:
                await telemetry.close()
            engine.stop()

    def _open_store(self, open_packs_max: int) -> Store:
        return open_store(self._settings.storage, open_packs_max, self._settings.hot_tail_bytes)

    def _routes(self, routes: tuple[Route, ...], relay: Relay, store: Store) -> tuple[Route, ...]:
        """The routes of this worker, from those of every worker."""
        return routes

    async def _follow(self, engine: Engine, store: Store) -> None:
        """Before the recovery, in a standby: follow the owner until the shard is taken over."""

    async def _begin(self, engine: Engine, store: Store) -> str:
        """The data is recovered: returns where other nodes reach this worker, if there are any."""
        return ""

    def _on_lease(self, lease: messages.ShardLease) -> None:
        raise AssertionError("only a node of a cluster has leases")

    def _on_take_over(self, epoch: int) -> None:
        raise AssertionError("only a node of a cluster has standbys")

    def _on_control(self) -> None:
        while True:
            try:
                received = messages.receive(self._control)
            except BlockingIOError:
                return
            if received is None:
                # The supervisor was killed. Exiting immediately loses nothing that was acknowledged.
                os._exit(1)
            message, descriptors = received
            match message:
                case messages.Ping():
                    messages.send(self._control, messages.Pong())
                case messages.Connect(worker):
                    self._run(self._connect(worker, descriptors))
                case messages.ConnectStandby() | messages.ConnectReader() if descriptors:
                    self._run(self._connect_local(message, *descriptors))
                case messages.Serve():
                    self._serve.set()
                case messages.Drain():
                    self._drain.set()
                case messages.Stop():
                    self._stop.set()
                    # Now: when another worker stops, the requests that it has not completed end as well.
                    if self._abort is not None:
                        self._abort()
                case messages.Reload():
                    self._reloader.reload()
                case messages.ShardLease() as lease:
                    self._on_lease(lease)
                case messages.TakeOver(epoch):
                    self._on_take_over(epoch)
                case messages.ConnectStandby() | messages.ConnectReader():
                    log.error("worker %d cannot be connected to a standby: too many open files", self._number)
                case _:
                    raise AssertionError(f"unexpected message for a worker: {message}")

    async def _connect_local(self, message: messages.ConnectStandby | messages.ConnectReader, descriptor: int) -> None:
        raise AssertionError("only a node of a cluster has standbys")

    def _run(self, connecting: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(connecting)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, worker: int, descriptors: Sequence[int]) -> None:
        """Connect to another worker: the descriptors are those for frames and for connections of clients."""
        opened = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        peer = self._peers.connect(worker)
        try:
            if len(opened) < 2:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            frames, moves = opened
            frames.setblocking(False)
            if self._hand_over is not None:
                self._hand_over.connect(worker, moves)
            await asyncio.get_running_loop().create_unix_connection(lambda: peer, sock=frames)
        except OSError as error:
            log.error("worker %d cannot be connected to worker %d yet: %s", self._number, worker, error)
            if self._hand_over is not None:
                self._hand_over.disconnect(worker)
            for end in opened:
                end.close()
            messages.send(self._control, messages.NotConnected(worker))
        else:
            self._peers.connected(peer)


def _abort_connections(context: Context, worker: int) -> None:
    if context.connections:
        log.warning("aborted %d connections of worker %d", len(context.connections), worker)
        for connection in context.connections.all():
            connection.abort()


async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
    """Wait until one of the two is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in (first, second)]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
