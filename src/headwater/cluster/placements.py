"""Streams that are stored at another worker than the owner of their name, which is called their *home*.

A fork shares bytes with its source, so both are in one store. The home of such a name keeps a document
`placement/{name}` with the worker that stores the stream, and relays requests to it. The document is durable before the
stream is created, so a stream can always be found; a crash between the two leaves a placement without a stream, which
is harmless and removed when the two workers reconnect. The home performs creations and deletions of a placed name one
at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from headwater.cluster import frames
from headwater.cluster.peers import NO_ORIGIN, Peer, PeerLostError
from headwater.cluster.relay import Exchange, Relay, RelayingConnection, request_bytes
from headwater.cluster.shards import ShardMap
from headwater.core.errors import Refusal
from headwater.engine.engine import Engine
from headwater.http.context import Context
from headwater.http.create import fork_source
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Channel, Deferred, PiecewiseResponse, Response, problem
from headwater.http.routing import Handler

log = logging.getLogger("headwater.cluster")

PREFIX: Final = "placement/"
STREAMS_AT_ONCE: Final = 5_000
"""Streams that are checked in one iteration of the event loop."""


class Placements:
    """The placements of the names that this worker is the home of."""

    def __init__(self, engine: Engine, shard_map: ShardMap, relay: Relay) -> None:
        self.on_placed: Callable[[], None] | None = None
        """Called when a placement is added, because cached routes may be wrong then."""
        self._engine = engine
        self._map = shard_map
        self._relay = relay
        self._worker = relay.peers.worker
        self.by_name: dict[str, int] = {}
        """The worker that has each placed stream."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        for key, value in engine.catalog.documents.items():
            if key.startswith(PREFIX):
                self.by_name[key.removeprefix(PREFIX)] = shard_map.owner_of_shard(int(value))
        relay.peers.answers("locate", self._locate)
        relay.peers.answers("exists", self._exists)
        relay.peers.answers("placed", self._placed)
        relay.peers.on_connected.append(self._on_connected)

    def is_locked(self, name: str) -> bool:
        return name in self._locks

    def names(self) -> Iterable[str]:
        """The placed names, and those with a creation or deletion in progress."""
        return self.by_name.keys() | self._locks.keys()

    def run(self, work: Any) -> None:
        task = self._relay.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[None]:
        """Serialize creations and deletions of a name."""
        lock = self._locks.setdefault(name, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and not getattr(lock, "_waiters", None):
                self._locks.pop(name, None)

    async def find_place(self, name: str, source: str | None) -> int:
        """Choose where to create a stream; its name must be locked. The placement is durable on return."""
        placed = self.by_name.get(name)
        if placed is not None:
            if await self._relay.ask(placed, "exists", name):
                return placed
            await self.remove(name)
        if self._is_here(name) or source is None:
            return self._worker
        found: int = await self._relay.ask(self._map.owner_of(source), "locate", source)
        if found != self._worker:
            # The shard only identifies the worker: it is computed again when the number of workers changes.
            await self._save(name, found)
        return found

    async def remove(self, name: str) -> None:
        self.by_name.pop(name, None)
        await self._put(PREFIX + name, None)

    async def remove_if_gone(self, name: str) -> None:
        """Remove the placement after a deletion or a rejected creation, if the stream does not exist."""
        placed = self.by_name.get(name)
        if placed is not None and not await self._relay.ask(placed, "exists", name):
            await self.remove(name)

    async def forget(self, name: str) -> None:
        """Remove the placement of a stream that was deleted or has expired."""
        if not self.is_locked(name):
            try:
                async with self.lock(name):
                    await self.remove_if_gone(name)
            except Refusal as refusal:
                log.warning("the placement of %r could not be removed: %s", name, refusal.detail)

    # -- questions of other workers --------------------------------------------------------------------------------

    async def _locate(self, sender: int, name: str) -> int:
        return self.by_name.get(name, self._worker)

    async def _exists(self, sender: int, name: str) -> bool:
        return self._is_here(name)

    async def _placed(self, sender: int, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return which of these names exist, and the streams whose placement the sender should store."""
        streams = tuple(self._engine.catalog)
        placed: list[str] = []
        for start in range(0, len(streams), STREAMS_AT_ONCE):
            some = streams[start : start + STREAMS_AT_ONCE]
            placed += [stream.name for stream in some if self._map.owner_of(stream.name) == sender]
            await asyncio.sleep(0)
        return [name for name in names if self._is_here(name)], placed

    # -- implementation --------------------------------------------------------------------------------------------

    def _is_here(self, name: str) -> bool:
        self._engine.expire_due()
        return name in self._engine.catalog.by_name

    def _on_connected(self, peer: Peer) -> None:
        self.run(self._reconcile(peer))

    async def _reconcile(self, peer: Peer) -> None:
        """Remove placements without a stream, and add missing ones: a crash can cause both."""
        mine = [name for name, worker in self.by_name.items() if worker == peer.worker]
        try:
            existing, placed = await peer.ask("placed", mine)
            for name in set(mine) - set(existing):
                if not self.is_locked(name) and self.by_name.get(name) == peer.worker:
                    await self.remove(name)
            for name in placed:
                if name not in self.by_name and not self.is_locked(name):
                    if name in self._engine.catalog.by_name:
                        log.error("stream %r exists in two workers; the one in worker %d is hidden", name, peer.worker)
                    else:
                        await self._save(name, peer.worker)
        except PeerLostError:
            pass  # Repeated at the next connection.
        except Refusal as refusal:
            log.warning("placements could not be saved: %s", refusal.detail)

    async def _save(self, name: str, worker: int) -> None:
        await self._put(PREFIX + name, str(worker).encode())
        self.by_name[name] = worker
        if self.on_placed is not None:
            self.on_placed()

    async def _put(self, key: str, value: bytes | None) -> None:
        durable: asyncio.Future[Refusal | None] = self._relay.loop.create_future()

        def done(result: Refusal | None) -> None:
            if not durable.done():
                durable.set_result(result)

        self._engine.put_document(key, value, done, None)
        refusal = await durable
        if refusal is not None:
            raise refusal


class PlacedWrite:
    """The creation or deletion of a stream that may be placed; its home performs them one at a time.

    It is completed even if the client disconnects, so that the placement matches the outcome.
    """

    __slots__ = ("_address", "_channel", "_context", "_handler", "_placements", "_relay", "_request")

    def __init__(
        self,
        placements: Placements,
        relay: Relay,
        handler: Handler,
        context: Context,
        request: Request,
        address: Address,
    ) -> None:
        self._placements = placements
        self._relay = relay
        self._handler = handler
        self._context = context
        self._request = request
        self._address = address
        self._channel: Channel | None = None

    def start(self, channel: Channel) -> None:
        self._channel = channel
        self._placements.run(self._run())

    def on_writable(self) -> None:
        """Do nothing: the response is small and sent in one piece."""

    def on_drain(self) -> None:
        """Do nothing: the write is completed."""

    def on_disconnect(self) -> None:
        self._channel = None

    async def _run(self) -> None:
        name, placements = self._address.name, self._placements
        try:
            async with placements.lock(name):
                request = self._request
                bucket_id = self._address.bucket
                if bucket_id and not self._context.engine.buckets.exists(bucket_id):
                    worker = self._relay.peers.worker  # The handler reports that there is no bucket.
                elif request.method == b"PUT":
                    source = fork_source(self._context, request)
                    worker = await placements.find_place(name, source)
                else:
                    worker = placements.by_name.get(name, self._relay.peers.worker)
                if worker == self._relay.peers.worker:
                    self._respond(await self._handle_here())
                    return
                peer = await self._relay.peer(worker)
                channel = self._channel
                origin = channel.find_origin() if isinstance(channel, RelayingConnection) else NO_ORIGIN
                data = request_bytes(self._request)
                response, close = await Exchange(peer, data, frames.BEGIN_PLACED, origin).response
                self._pass_on(response, close=close)
                await placements.remove_if_gone(name)
        except Refusal as refusal:
            self._respond(problem(refusal))
        except PeerLostError:
            self._abort()  # Whether it was performed is unknown.
        except Exception:
            log.exception("%s %r failed unexpectedly", self._request.method, self._request.target)
            self._abort()

    async def _handle_here(self) -> Response | PiecewiseResponse:
        response = self._handler(self._context, self._request, self._address)
        if isinstance(response, Response | PiecewiseResponse):
            return response
        assert isinstance(response, Deferred), "a write is not live"
        result: asyncio.Future[Any] = self._context.loop.create_future()

        def done(value: Any) -> None:
            if not result.done():
                result.set_result(value)

        response.begin(done)
        value = await result
        return problem(value) if isinstance(value, Refusal) else response.render(value)

    def _respond(self, response: Response | PiecewiseResponse) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.respond(response)

    def _pass_on(self, response: bytes, *, close: bool) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            assert isinstance(channel, RelayingConnection)
            channel.write_chunk(response)
            channel.end_relayed(close=close)

    def _abort(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            assert isinstance(channel, RelayingConnection)
            channel.abort()


def placed_write(placements: Placements, relay: Relay, handler: Handler) -> Handler:
    """The handler of a creation or deletion that may involve another worker."""

    def handle(context: Context, request: Request, address: Address) -> PlacedWrite:
        return PlacedWrite(placements, relay, handler, context, request, address)

    return handle
