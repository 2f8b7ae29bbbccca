"""Drive a store as the engine does, and read back everything it holds; shared by the tests of `acid`.

A `Driver` decides like the engine (against its catalog), queues records, and commits them as one batch: write, then
publish, then maintain. `contents` reads a store back in every way that the interface offers and checks that they agree.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from headwater.core.catalog import Catalog, StreamState
from headwater.core.offsets import Offset
from headwater.core.producers import digest
from headwater.core.records import Append, Create, Delete, Document, Evict, ForkPoint, Image, Record, Retain, Touch
from headwater.storage.acid.shard_store import SAVE_AFTER_S, ShardStore, acid_storage
from headwater.storage.interface import Committed, Storage
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from tests.waiting import wait_until

MIB: Final = 2**20


class State(NamedTuple):
    """The complete state of a catalog."""

    images: dict[int, Image]
    documents: dict[str, bytes]


@dataclass
class Driver:
    """A catalog, and the stores that follow it."""

    stores: Sequence[Storage]
    catalog: Catalog[StreamState] = field(default_factory=lambda: Catalog(StreamState))
    queue: list[Committed] = field(default_factory=list)
    now_ms: int = 1_000
    floors: dict[int, Offset] = field(default_factory=dict)
    """The first retained message of each trimmed stream."""
    ids: random.Random = field(default_factory=lambda: random.Random(1))

    def recover(self, store: Storage) -> None:
        for record in store.recover():
            self.catalog.apply(record)

    def create(
        self, name: str, messages: Sequence[bytes] = (), *, fork: ForkPoint | None = None, closed: bool = False
    ) -> StreamState:
        stream_id = self.ids.getrandbits(63)
        payload, lengths = b"".join(messages), tuple(map(len, messages))
        self._queue(Create(stream_id, name, self._tick(), "text/plain", 60, None, closed, payload, lengths, fork))
        return self.catalog.by_id[stream_id]

    def append(
        self,
        stream: StreamState,
        messages: Sequence[bytes],
        *,
        producer: tuple[str, int, int] | None = None,
        stream_seq: str | None = None,
        close: bool = False,
    ) -> None:
        who, epoch, seq = producer or (None, 0, 0)
        payload, lengths = b"".join(messages), tuple(map(len, messages))
        self._queue(
            Append(
                stream.id,
                self._tick(),
                stream.message_index,
                stream.byte_position,
                payload,
                lengths,
                who,
                epoch,
                seq,
                stream_seq,
                close,
                digest(payload) if producer is not None else 0,
            )
        )

    def touch(self, stream: StreamState) -> None:
        self._queue(Touch(stream.id, self._tick()))

    def evict(self, stream: StreamState, producers: Sequence[str]) -> None:
        self._queue(Evict(stream.id, self._tick(), tuple(producers)))

    def retain(self, stream: StreamState, message_index: int, byte_position: int) -> None:
        self._queue(Retain(stream.id, self._tick(), message_index, byte_position))

    def trim(self, stream: StreamState, floor: Offset) -> None:
        """Commit first: the engine trims only after the retention record is committed."""
        self.commit()
        self.floors[stream.id] = floor
        for store in self.stores:
            store.trim(stream.id, floor.message_index, floor.byte_position)

    def floor(self, stream: StreamState) -> Offset:
        return self.floors.get(stream.id, stream.base)

    def document(self, key: str, value: bytes | None) -> None:
        self._queue(Document(key, value))

    def delete(self, stream: StreamState) -> tuple[int, ...]:
        return self._queue(Delete(stream.id, self._tick()))

    def commit(self) -> None:
        batch, self.queue = self.queue, []
        if not batch:
            return
        for store in self.stores:
            store.write(batch)
            store.publish(batch)
            store.maintain(lambda _: None)

    def state(self) -> State:
        return state_of(self.catalog)

    def _queue(self, record: Record) -> tuple[int, ...]:
        removed = self.catalog.apply(record)
        self.queue.append(Committed(record, removed))
        return removed

    def _tick(self) -> int:
        self.now_ms += 1
        return self.now_ms


def state_of(catalog: Catalog[StreamState]) -> State:
    return State({stream.id: stream.image() for stream in catalog}, dict(catalog.documents))


def recovered(store: Storage) -> State:
    """Return the state that a new process recovers."""
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in store.recover():
        catalog.apply(record)
    return state_of(catalog)


def messages_of(store: Storage, stream: StreamState, floor: Offset | None = None) -> list[bytes]:
    """Read an incarnation's own messages, split at the boundaries that the store returns."""
    floor = floor or stream.base
    if stream.message_index == floor.message_index:
        return []
    data = b"".join(store.read(stream.id, floor.byte_position, stream.byte_position))
    messages = []
    at = 0
    for length in store.lengths(stream.id, floor.message_index, stream.message_index):
        messages.append(data[at : at + length])
        at += length
    assert at == len(data)
    return messages


def open_acid(
    directory: Path,
    shard_count: int = 4,
    map_bytes: int = 2**26,
    hot_tail_bytes: int = 2**20,
    *,
    save_after_s: float = SAVE_AFTER_S,
    segment_bytes: int = 64 * MIB,
    busy_floor_bytes: int = 16 * MIB,
) -> JournaledStorage:
    """With `save_after_s=0` every batch is followed by a checkpoint."""
    settings = StoreSettings(
        segment_bytes=segment_bytes, hot_tail_bytes=hot_tail_bytes, busy_floor_bytes=busy_floor_bytes, reserve_bytes=0
    )
    return acid_storage(directory, shard_count, map_bytes, settings=settings, save_after_s=save_after_s)


def open_lazy(directory: Path, shard_count: int = 4, map_bytes: int = 2**26) -> JournaledStorage:
    """Open a store without checkpoints: all records stay in the journal until it is closed."""
    return open_acid(directory, shard_count, map_bytes, 2**40, save_after_s=1e6)


def shards_of(store: JournaledStorage) -> ShardStore:
    """Return the cold store of an `acid` store."""
    assert isinstance(store._cold, ShardStore)
    return store._cold


def save_all(store: JournaledStorage) -> None:
    """Wait until a checkpoint has saved everything and removed deleted data, or the store has failed."""
    maintenance, journal = store._maintenance, store._journal
    assert maintenance is not None
    assert journal is not None

    def is_done() -> bool:
        if maintenance.idle and maintenance._saved_lsn != store._unsaved.lsn:
            store.checkpoint_soon()
        maintenance._chores_at = 0.0
        store.maintain(lambda _: None)
        is_saved = maintenance.idle and maintenance._saved_lsn == store._unsaved.lsn
        return journal.failure is not None or (
            is_saved and not any(shard.has_graves for shard in shards_of(store).shards)
        )

    wait_until(is_done, what="everything is saved", every_s=0.0005)
