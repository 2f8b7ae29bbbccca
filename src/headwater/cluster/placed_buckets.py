"""Buckets with streams at other workers, as seen by the owner of the bucket.

A fork is stored with its source, so a stream may be placed at another worker than its bucket. The mirror contains such
streams. Responses about a whole bucket wait for everything that other workers have acknowledged, if any of them has
streams of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Final

from headwater.cluster.mirror import AllStreams, Mirror
from headwater.cluster.placements import Placements
from headwater.cluster.prepared_responses import prepared
from headwater.cluster.shards import ShardMap
from headwater.core.buckets import stream_name
from headwater.engine.engine import Engine
from headwater.engine.stream import LiveStream
from headwater.http import paths
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import AnyResponse
from headwater.http.routing import Handler, Route

_OF_BUCKETS: Final = frozenset((paths.BUCKET, paths.BUCKET_LISTING))


class PlacedBuckets:
    """Created before the engine starts, because the engine must know which buckets this worker owns."""

    def __init__(self, shard_map: ShardMap, worker: int, mirror: Mirror) -> None:
        self._map = shard_map
        self._worker = worker
        self._mirror = mirror
        self._streams: AllStreams | None = None
        self._placements: Placements | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def attach(self, engine: Engine, streams: AllStreams, placements: Placements) -> None:
        self._streams, self._placements = streams, placements

        def created(stream: LiveStream) -> None:
            if self._map.owner_of(stream.name) == self._worker:
                engine.buckets.stream_created(stream)

        def deleted(stream: LiveStream) -> None:
            if self._map.owner_of(stream.name) == self._worker:
                engine.buckets.stream_ended(stream)
                self._run(placements.forget(stream.name))

        self._mirror.on_created.append(created)
        self._mirror.on_deleted.append(deleted)
        self._mirror.on_removed.append(lambda name: self._run(placements.forget(name)))

    # -- the interface of buckets ------------------------------------------------------------------------------------

    def owns(self, bucket_id: str) -> bool:
        return self._map.owner_of_bucket(bucket_id) == self._worker

    def has_any(self, bucket_id: str) -> bool:
        assert self._placements is not None
        root = stream_name(bucket_id, "")
        return any(name.startswith(root) for name in self._placements.names())

    def seen(self, name: str) -> LiveStream | None:
        return self._mirror.by_name.get(name)

    # -- responses ---------------------------------------------------------------------------------------------------

    def routes(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The routes, with those about a whole bucket postponed if other workers have streams of it."""

        def synced(route: Route) -> Route:
            if route.pattern not in _OF_BUCKETS or route.method not in ("GET", "HEAD", "DELETE"):
                return route
            return replace(route, handler=self._synced(route.handler))

        return tuple(synced(route) for route in routes)

    def _synced(self, handler: Handler) -> Handler:
        async def prepare(_context: Context, _request: Request, _address: Address) -> None:
            assert self._streams is not None
            await self._streams.sync()

        after_sync = prepared(self._run, prepare, handler)

        def handle(context: Context, request: Request, address: Address) -> AnyResponse:
            return (after_sync if self.has_any(address.bucket) else handler)(context, request, address)

        return handle

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
