"""The feed: sends descriptions of a worker's streams to other workers as changes become durable.

The coordinator gets all streams, every other worker those that it is the home of (see `placements`). The feed starts
with the existing streams when the two are connected, in slices; then creations and deletions follow. The home of a
deleted stream that forks still need is also informed when it is removed with the last of them. The tail offsets
of placed streams are always sent, those of all streams only after the coordinator asks for them, once per stream and
iteration of the event loop. Everything is sent in order on one connection, so the answer to a later question arrives
after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from headwater.cluster.peers import Peer, Peers
from headwater.cluster.shards import COORDINATOR, ShardMap
from headwater.core.errors import Refusal
from headwater.core.producers import ProducerHeaders
from headwater.core.records import ForkPoint, SnapshotRef
from headwater.engine.engine import Engine
from headwater.engine.stream import LiveStream

BEGIN: Final = "begin"
STREAMS: Final = "streams"
GONE: Final = "gone"
REMOVED: Final = "removed"
COMPLETE: Final = "complete"

STREAMS_PER_FRAME: Final = 500


class FedStream(msgspec.Struct, frozen=True, array_like=True):
    """The durable state of a stream, as sent in the feed."""

    id: int
    name: str
    created_ms: int
    content_type: str
    ttl_secs: int | None
    expires_at_ms: int | None
    written_ms: int
    fork: ForkPoint | None
    message_index: int
    byte_position: int
    closed: bool
    retained_index: int
    retained_position: int
    snapshot: SnapshotRef | None
    is_fenced: bool = False


def described(stream: LiveStream, *, is_fenced: bool = False) -> FedStream:
    return FedStream(
        stream.id,
        stream.name,
        stream.created_ms,
        stream.type.header,
        stream.ttl_secs,
        stream.expires_at_ms,
        stream.written_ms,
        stream.fork,
        stream.durable_index,
        stream.durable_position,
        stream.durable_closed,
        stream.durable_retained_index,
        stream.durable_retained_position,
        stream.durable_snapshot,
        is_fenced,
    )


class Feed:
    """The sending side."""

    def __init__(self, engine: Engine, shard_map: ShardMap, peers: Peers) -> None:
        self._engine = engine
        self._map = shard_map
        self._peers = peers
        self._is_watching = False
        self._is_sending_tails = False
        self._changed: dict[int, LiveStream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listing = asyncio.Lock()
        self._homes: dict[int, int] = {}
        """The home of each stream that is placed here, by incarnation."""
        self._kept: dict[int, LiveStream] = {}
        """Deleted streams that forks still need, by incarnation."""
        for stream in engine.catalog:
            self._place(stream)
            if stream.deleted:
                self._kept[stream.id] = stream
        engine.publisher.on_created.append(self._on_created)
        engine.publisher.on_deleted.append(self._on_deleted)
        peers.on_connected.append(self._on_connected)
        peers.answers("sync", self._sync)
        peers.answers("tails", self._send_tails)
        peers.answers("append", self._append)
        peers.answers("check-offsets", self._check_offsets)

    # -- events ----------------------------------------------------------------------------------------------------

    def _on_connected(self, peer: Peer) -> None:
        task = asyncio.get_running_loop().create_task(self._send_all(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_created(self, stream: LiveStream) -> None:
        self._place(stream)
        for peer in self._receivers(stream):
            peer.feed((STREAMS, (self._described(stream),)))

    def _on_deleted(self, stream: LiveStream) -> None:
        self._changed.pop(stream.id, None)
        for peer in self._receivers(stream):
            peer.feed((GONE, (stream.id,)))
        if stream.id in self._engine.catalog.by_id:
            self._kept[stream.id] = stream
            return
        self._homes.pop(stream.id, None)
        self._report_removed(stream.fork)

    def _report_removed(self, fork: ForkPoint | None) -> None:
        """Report the deleted sources that were removed with their last fork to their homes."""
        while fork is not None:
            source = self._kept.get(fork.source_id)
            if source is None or source.id in self._engine.catalog.by_id:
                return
            del self._kept[source.id]
            home = self._homes.pop(source.id, None)
            peer = self._peers.get(home) if home is not None else None
            if peer is not None:
                peer.feed((REMOVED, (source.name,)))
            fork = source.fork

    def _on_changed(self, stream: LiveStream) -> None:
        if self._is_sending_tails or stream.id in self._homes:
            if not self._changed:
                asyncio.get_running_loop().call_soon(self._flush)
            self._changed[stream.id] = stream

    def _flush(self) -> None:
        changed, self._changed = self._changed, {}
        by_peer: dict[Peer, list[FedStream]] = {}
        for stream in self._alive(changed.values()):
            for peer in self._receivers(stream):
                by_peer.setdefault(peer, []).append(self._described(stream))
        for peer, streams in by_peer.items():
            peer.feed((STREAMS, streams))

    def _place(self, stream: LiveStream) -> None:
        home = self._map.owner_of(stream.name)
        if home != self._peers.worker:
            self._homes[stream.id] = home
            self._watch()

    def _receivers(self, stream: LiveStream) -> Iterable[Peer]:
        """The workers that a stream is reported to."""
        for worker in {COORDINATOR, self._homes.get(stream.id, COORDINATOR)}:
            peer = self._peers.get(worker)
            if peer is not None:
                yield peer

    def _watch(self) -> None:
        if not self._is_watching:
            self._is_watching = True
            self._engine.watch_changes(self._on_changed)

    # -- requests of the coordinator --------------------------------------------------------------------------------

    async def _sync(self, sender: int, arguments: Any) -> None:
        """Send everything that was acknowledged before the answer."""
        self._engine.expire_due()
        self._flush()

    async def _send_tails(self, sender: int, arguments: Any) -> None:
        """Also send tail offsets, from now on."""
        self._is_sending_tails = True
        self._watch()
        peer = self._peers.get(COORDINATOR)
        if peer is not None:
            await self._send_all(peer)

    async def _append(self, sender: int, arguments: Any) -> str:
        """Append for the coordinator; return why it was rejected, or an empty string."""
        name, content_type, body, producer = arguments
        result: asyncio.Future[object] = asyncio.get_running_loop().create_future()

        def done(value: object) -> None:
            if not result.done():
                result.set_result(value)

        try:
            self._engine.append(name, content_type, body, ProducerHeaders(*producer), None, False, done)
            value = await result
        except Refusal as refusal:
            value = refusal
        return value.detail if isinstance(value, Refusal) else ""

    async def _check_offsets(self, sender: int, arguments: Any) -> list[str]:
        """For each stream and offset: why the offset is not a message boundary of the stream, or an empty string."""
        return [self._offset_problem(name, text) for name, text in arguments]

    def _offset_problem(self, name: str, text: str) -> str:
        stream = self._engine.catalog.by_name.get(name)
        if stream is None:
            return ""
        reader = self._engine.reader
        try:
            offset = reader.parse_offset(stream, text)
            if offset.message_index < stream.retained_index or offset.message_index > stream.durable_index:
                return ""
            is_boundary = reader.boundary(stream, offset.message_index) == offset.byte_position
        except Refusal as refusal:
            return refusal.detail
        return "" if is_boundary else f"{text} is not a message boundary of {name!r}. Ack one that the server returned."

    # -- implementation --------------------------------------------------------------------------------------------

    def _described(self, stream: LiveStream) -> FedStream:
        return described(stream, is_fenced=stream.id in self._engine.fences.streams)

    def _alive(self, streams: Iterable[LiveStream]) -> Iterable[LiveStream]:
        by_id = self._engine.catalog.by_id
        return (stream for stream in streams if stream.visible and not stream.deleted and stream.id in by_id)

    async def _send_all(self, peer: Peer) -> None:
        """Send all streams to a worker, in slices. Concurrent creations and deletions are sent as well, in order."""
        # One at a time: the receiver removes the streams that were not sent between the beginning and the end.
        async with self._listing:
            peer.feed((BEGIN, ()))
            if peer.worker == COORDINATOR:
                streams = tuple(self._engine.catalog)
            else:
                by_id = self._engine.catalog.by_id
                placed = [stream_id for stream_id, home in self._homes.items() if home == peer.worker]
                streams = tuple(by_id[stream_id] for stream_id in placed if stream_id in by_id)
            for start in range(0, len(streams), STREAMS_PER_FRAME):
                alive = self._alive(streams[start : start + STREAMS_PER_FRAME])
                peer.feed((STREAMS, tuple(self._described(stream) for stream in alive)))
                await asyncio.sleep(0)
            peer.feed((COMPLETE, ()))
