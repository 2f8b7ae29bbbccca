"""The coordinator's tasks for all workers: subscriptions, the registry, and the listing of all streams.

They start when every worker has reported its streams. Their requests wait for that, and then for everything that other
workers have acknowledged: a client that appended to a stream of any worker finds the append in the response.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

import msgspec

from headwater.cluster.mirror import AllStreams, Mirror
from headwater.cluster.prepared_responses import prepared
from headwater.cluster.relay import Relay, unavailable
from headwater.cluster.shards import COORDINATOR
from headwater.core.errors import Refusal
from headwater.core.subscriptions import linked_name
from headwater.engine.registry import StreamRegistry
from headwater.engine.subscriptions import Subscriptions
from headwater.http import paths
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.routing import Route

START_S: Final = 5.0
"""How long startup waits for the streams of the other workers before the coordinator serves its own."""


class _SentAck(msgspec.Struct):
    offset: str = ""
    stream: str | None = None
    path: str | None = None


class _SentAcks(msgspec.Struct):
    acks: list[_SentAck] | None = None


_sent_acks: Final = msgspec.json.Decoder(_SentAcks)


class Coordination:
    def __init__(self, streams: AllStreams, mirror: Mirror, relay: Relay) -> None:
        self._relay = relay
        self._mirror = mirror
        self._started = asyncio.Event()
        self._is_following = False
        self._registry: StreamRegistry | None = None
        self._subscriptions: Subscriptions | None = None
        self._starting: asyncio.Task[None] | None = None
        self.streams: Final = streams
        relay.peers.on_connected.append(self._on_connected)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, registry: StreamRegistry | None, subscriptions: Subscriptions | None) -> None:
        """Start when all workers have reported their streams; return after a few seconds even if some have not."""
        self._registry, self._subscriptions = registry, subscriptions
        self._starting = asyncio.create_task(self._start())
        await asyncio.wait((self._starting,), timeout=START_S)

    async def _start(self) -> None:
        await self._mirror.is_complete.wait()
        if self._registry is not None:
            self._registry.start()
        if self._subscriptions is not None:
            if self._has_subscriptions():
                await self._follow_tails()
            self._subscriptions.start()
            self._subscriptions.begin()
        self._started.set()

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        if self._subscriptions is not None:
            await self._subscriptions.stop()
        if self._registry is not None:
            self._registry.stop()

    def routes(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The routes, with those of the coordinator postponed until it has the state that they need."""
        return tuple(self._postponed(route) if route.pattern in COORDINATED else route for route in routes)

    def _postponed(self, route: Route) -> Route:
        if route.method == "OPTIONS":
            return route
        prepare = self._prepare_acks if route.pattern in (paths.ACK, paths.CALLBACK) else self._prepare
        return replace(route, handler=prepared(self.run, prepare, route.handler))

    async def _prepare(self, context: Context, request: Request, address: Address) -> None:
        wait_s = self._relay.wait_s
        try:
            await asyncio.wait_for(self._started.wait(), wait_s or None)
        except TimeoutError:
            raise unavailable(COORDINATOR, wait_s) from None
        if not self._is_following and (address.pattern is paths.STREAM_LISTING or request.method == b"PUT"):
            await self._follow_tails()
        await self.streams.sync()

    async def _prepare_acks(self, context: Context, request: Request, address: Address) -> None:
        await self._prepare(context, request, address)
        try:
            acks = _sent_acks.decode(request.body).acks or ()
            sent = [(linked_name(ack.stream or ack.path or ""), ack.offset) for ack in acks]
        except (msgspec.MsgspecError, UnicodeDecodeError, Refusal):
            return  # The handler reports the error.
        await self.streams.check_offsets(sent)

    async def _follow_tails(self) -> None:
        self._is_following = True
        await self.streams.follow_tails()

    def _has_subscriptions(self) -> bool:
        return any(key.startswith("subscription/") for key in self.streams.catalog.documents)

    def _on_connected(self, peer: object) -> None:
        if self._is_following:
            self.run(self.streams.follow_tails())

    def run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


COORDINATED: Final = frozenset(
    (
        paths.STREAM_LISTING,
        paths.KEY_SET,
        paths.SUBSCRIPTIONS,
        paths.SUBSCRIPTION,
        paths.SUBSCRIPTION_STREAMS,
        paths.SUBSCRIPTION_STREAM,
        paths.CLAIM,
        paths.ACK,
        paths.RELEASE,
        paths.CALLBACK,
    )
)
"""Routes that the coordinator handles for all workers."""
