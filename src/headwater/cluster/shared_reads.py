"""Live reads of another worker's stream: this worker follows the stream once and serves all its readers.

The last messages of a followed stream are kept in memory. The readers are the same as in a single process; only the
stream and the source of its bytes differ. Before a reader starts, the owner sends everything that it has acknowledged,
so a client finds what it wrote. A reader that starts before the kept messages is relayed, and so is a long-poll that
can no longer be served; an event stream ends instead, and its client reconnects.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, cast

from headwater.cluster.delegating import DelegatingResponse
from headwater.cluster.followed_streams import FollowedStreams
from headwater.cluster.relay import RelayingConnection
from headwater.core.buckets import is_bucketed
from headwater.core.errors import Refusal, StreamNotFound
from headwater.engine.engine import Engine
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Channel, LiveResponse, PiecewiseResponse, Response
from headwater.http.routing import Handler, Route

log = logging.getLogger("headwater.cluster")

EVENTS: Final = "sse"
LONG_POLL: Final = "long-poll"


class SharedContext(Context):
    """The context of this worker, with the streams that it follows instead of those that it owns."""

    def __init__(self, base: Context, streams: FollowedStreams) -> None:
        # No initialization: missing attributes are read from the worker's context, which changes at run time.
        self._base = base
        self.engine = cast("Engine", streams)
        # Attributes that every reader uses for every event and that never change are copied.
        self.metrics = base.metrics
        self.limits = base.limits
        self.loop = base.loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


class SharedReads:
    """Creates the handlers of live reads of other workers' streams."""

    def __init__(self, context: Context, streams: FollowedStreams) -> None:
        self.streams: Final = streams
        self.context: Final = SharedContext(context, streams)
        self._tasks: set[asyncio.Task[None]] = set()

    def route(self, route: Route, owner: int, relay: Route) -> Route:
        """The route of a live read: shared if the stream can be followed, otherwise relayed."""

        def handle(context: Context, request: Request, address: Address) -> SharedRead:
            return SharedRead(self, route, owner, relay.handler, context, request, address)

        return Route(route.method, route.pattern, handle, route.operation, route.live)

    def run(self, read: SharedRead) -> None:
        task = asyncio.get_running_loop().create_task(read.begin())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SharedRead(DelegatingResponse):
    """One live read."""

    __slots__ = ("_address", "_context", "_is_draining", "_owner", "_reads", "_relay", "_request", "_route")

    def __init__(
        self,
        reads: SharedReads,
        route: Route,
        owner: int,
        relay: Handler,
        context: Context,
        request: Request,
        address: Address,
    ) -> None:
        super().__init__()
        self._reads = reads
        self._route = route
        self._owner = owner
        self._relay = relay
        self._context = context
        self._request = request
        self._address = address
        self._is_draining = False

    # -- as a live response ----------------------------------------------------------------------------------------

    def start(self, channel: Channel) -> None:
        self._channel = channel
        self._reads.run(self)

    def on_drain(self) -> None:
        self._is_draining = True
        super().on_drain()

    # -- implementation --------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        try:
            name, query = self._address.name, self._address.query
            found = await self._reads.streams.ready(self._owner, name)
            if self._channel is None:
                return
            last_event = self._request.header(b"last-event-id") if self._route.live == EVENTS else None
            token = last_event or query.get("offset")
            is_plain = "since" not in query or bool(last_event)
            if found is None or not is_plain or not found.serves(token, is_bucketed=is_bucketed(name)):
                self.relay()
            else:
                self._share(self._channel)
            if self._is_draining and self._inner is not None:
                self._inner.on_drain()
        except Exception:
            log.exception("%s %r failed unexpectedly", self._request.method, self._request.target)
            if isinstance(self._channel, RelayingConnection):
                self._channel.abort()

    def _share(self, channel: Channel) -> None:
        try:
            inner = self._route.handler(self._reads.context, self._request, self._address)
        except Refusal:
            self.relay()  # The owner reports the error.
            return
        self._inner = cast("LiveResponse", inner)
        self._inner.start(channel if self._route.live == EVENTS else PollChannel(self, channel))

    def relay(self) -> None:
        """Relay the request to the owner."""
        if self._channel is not None:
            self._inner = cast("LiveResponse", self._relay(self._context, self._request, self._address))
            self._inner.start(self._channel)


class PollChannel:
    """The channel of a shared long-poll. It is relayed if it is refused, unless its stream was deleted: then the owner
    may have another one with the same name."""

    __slots__ = ("_channel", "_read")

    def __init__(self, read: SharedRead, channel: Channel) -> None:
        self._read = read
        self._channel = channel

    @property
    def writable(self) -> bool:
        return self._channel.writable

    def respond(self, response: Response | PiecewiseResponse) -> None:
        self._channel.respond(response)

    def refuse(self, refusal: Refusal) -> None:
        if isinstance(refusal, StreamNotFound):
            self._channel.refuse(refusal)
        else:
            self._read.relay()

    def begin_body(self, headers: bytes) -> None:
        self._channel.begin_body(headers)

    def write(self, data: bytes) -> None:
        self._channel.write(data)

    def write_chunk(self, chunk: bytes) -> None:
        self._channel.write_chunk(chunk)

    def offer_chunk(self, chunk: bytes) -> bool:
        return self._channel.offer_chunk(chunk)

    def yield_turn(self) -> None:
        self._channel.yield_turn()

    def end_body(self) -> None:
        self._channel.end_body()
