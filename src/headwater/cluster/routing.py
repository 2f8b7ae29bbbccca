"""The routes of a worker: it handles requests for its own shards, and relays all others to their owners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from headwater.cluster import frames
from headwater.cluster.coordination import COORDINATED
from headwater.cluster.multi_worker_follow import worker_of
from headwater.cluster.placements import Placements, placed_write
from headwater.cluster.relay import Relay, unavailable
from headwater.cluster.shards import COORDINATOR, OWNERS_CACHE_MAX, ShardMap
from headwater.cluster.shared_reads import EVENTS, LONG_POLL, SharedReads
from headwater.cluster.standby_relay import to_standby
from headwater.cluster.uploads import RelayedUpload
from headwater.engine.uploads import BlobUpload
from headwater.http import paths
from headwater.http.context import Context
from headwater.http.create import fork_source
from headwater.http.paths import Address
from headwater.http.request import Request, UploadRequest
from headwater.http.routing import Route, Router
from headwater.http.snapshots import IN_MEMORY_MAX_BYTES

_ANYWHERE: Final = frozenset(
    (paths.SERVER, paths.HEALTH, paths.READY, paths.METRICS, paths.UI, paths.BUCKETS, paths.FOLLOW, paths.CLUSTER)
)
"""Operations that every worker can process."""
_OF_STREAMS: Final = frozenset(
    (paths.STREAM, paths.BUCKET_STREAM, paths.LATEST_SNAPSHOT, paths.SNAPSHOT, paths.BOOTSTRAP)
)
"""Operations on one stream, which may be placed at another worker."""


def _finish_upload(_context: Context, request: Request, _address: Address) -> RelayedUpload:
    assert isinstance(request, UploadRequest)
    assert isinstance(request.upload, RelayedUpload)
    return request.upload


class WorkerRouter(Router):
    """The routes of one worker."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        shard_map: ShardMap,
        worker: int,
        relay: Relay,
        placements: Placements,
        reads: SharedReads,
    ) -> None:
        super().__init__(routes, self._is_local)
        self._reads = reads
        self._placements = placements
        placements.on_placed = self.head_cache.clear
        self._relay = relay
        self._map = shard_map
        self._worker = worker
        self._owners: dict[str, int] = {}
        self._relays: Mapping[int, Route] = {
            other: Route("*", "*", relay.to(other), "relayed") for other in range(shard_map.workers) if other != worker
        }
        self._standby_relays: Mapping[tuple[int, Route], Route] = {
            (other, route): Route("*", "*", to_standby(relay, other, route.operation), "relayed")
            for other in self._relays
            for route in routes
            if route.standby_may_answer
        }
        if relay.standbys is not None:
            relay.standbys.on_connected.append(lambda _: self.head_cache.clear())
        self._placed_relays: Mapping[int, Route] = {
            other: Route("*", "*", relay.to(other, frames.BEGIN_PLACED), "relayed") for other in self._relays
        }

    def resolve(self, context: Context, request: Request) -> tuple[Route, Address]:
        route, address = super().resolve(context, request)
        owner = self._owners.get(address.name)
        if owner is None or address.pattern is not paths.STREAM:
            owner = self._owner_of(address)
        if request.method == b"OPTIONS":
            return route, address
        if type(request) is UploadRequest and isinstance(request.upload, RelayedUpload):
            return replace(route, handler=_finish_upload), address
        if owner != self._worker:
            return self._elsewhere(route, owner, self._relay_to(route, owner)), address
        if address.pattern in _OF_STREAMS:
            return self._at_home(context, request, route, address), address
        return route, address

    def begin_upload(self, context: Context, request: Request, *, is_next: bool) -> BlobUpload | None:
        address = self._address(context, request)
        route = self._methods[address.pattern].get(request.method)
        owner, begin = self._owner_of(address), frames.BEGIN
        if owner == self._worker and address.name in self._placements.by_name:
            owner, begin = self._placements.by_name[address.name], frames.BEGIN_PLACED
        if route is None or route.begin_upload is None or owner == self._worker:
            return super().begin_upload(context, request, is_next=is_next)
        length = request.headers.get(b"content-length")
        if length is None and b"transfer-encoding" not in request.headers:
            return None
        if length is not None and int(length) <= min(IN_MEMORY_MAX_BYTES, context.limits.max_body_bytes):
            return None
        peer = self._relay.peers.get(owner)
        if peer is None:
            raise unavailable(owner, 0)
        return RelayedUpload(peer, request, begin, is_next=is_next)

    def _is_local(self, name: str) -> bool:
        """Whether this worker handles the appends to a stream."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._map.owner_of(name)
        return owner == self._worker and name not in self._placements.by_name

    def _at_home(self, context: Context, request: Request, route: Route, address: Address) -> Route:
        """The route of a stream that this worker is the home of: it may be placed at another worker."""
        name, method, placements = address.name, request.method, self._placements
        placed = placements.by_name.get(name) if placements.by_name else None
        if method in (b"PUT", b"DELETE") and not address.snapshot:
            is_plain = placed is None and not placements.is_locked(name)
            if is_plain and method == b"PUT" and b"stream-forked-from" in request.headers:
                source = fork_source(context, request)
                is_plain = source is None or (
                    self._map.owner_of(source) == self._worker and source not in placements.by_name
                )
            if is_plain:
                return route
            handler = placed_write(placements, self._relay, route.handler)
            return Route(route.method, route.pattern, handler, route.operation)
        return route if placed is None else self._elsewhere(route, placed, self._placed_relays[placed])

    def _relay_to(self, route: Route, owner: int) -> Route:
        """The route that relays a request to the owner of its stream, or to the standby of the owner's shard here."""
        standbys = self._relay.standbys
        if standbys is None or standbys.get(owner) is None or not route.standby_may_answer:
            return self._relays[owner]
        return self._standby_relays[owner, route]

    def _elsewhere(self, route: Route, owner: int, relay: Route) -> Route:
        """The route of a request for a stream of another worker."""
        if not route.live or route.live not in (EVENTS, LONG_POLL) or route.pattern not in _OF_STREAMS:
            return relay
        return self._reads.route(route, owner, relay)

    def _owner_of(self, address: Address) -> int:
        pattern = address.pattern
        if pattern is paths.STREAM:
            if len(self._owners) >= OWNERS_CACHE_MAX:
                self._owners.clear()
            owner = self._owners[address.name] = self._map.owner_of(address.name)
            return owner
        if pattern in COORDINATED:
            return COORDINATOR
        if pattern in _ANYWHERE:
            return self._worker
        if pattern is paths.FOLLOW_EVENTS:
            given_by = worker_of(address.subscription, self._map.workers)
            return self._worker if given_by is None else given_by
        return self._map.owner_of_bucket(address.bucket)
