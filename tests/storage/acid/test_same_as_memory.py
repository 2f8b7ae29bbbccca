"""`acid` behaves like `memory` through checkpoints, closing, reopening and crashes between batches.

A state machine drives both stores with the same random records. The pieces and the hot tail are very small, so that
messages span pieces, reads span shard and tail, and removals take several transactions.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from headwater.core.catalog import StreamState
from headwater.core.offsets import Offset
from headwater.core.records import ForkPoint
from headwater.storage.acid import pieces, shard
from headwater.storage.cold_store import document_bytes
from headwater.storage.journaled_store import JournaledStorage
from headwater.storage.memory import MemoryStorage
from headwater.storage.offline.check import check
from headwater.storage.stream_data import memory_of
from tests.storage.acid.driver import Driver, messages_of, open_acid, open_lazy, recovered, save_all
from tests.storage.model import expanded

NAMES = [f"name-{n}" for n in range(8)]
MESSAGES = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5)
PRODUCERS = st.sampled_from(["p", "q", "x" * 700])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp(prefix="headwater-acid-"))
        self.generation = 0
        self.memory = MemoryStorage()
        self.acid: JournaledStorage | None = None

    @initialize(shards=st.sampled_from([1, 2, 8]), hot=st.sampled_from([1, 3_000, 10**6]), eager=st.booleans())
    def begin(self, shards: int, hot: int, eager: bool) -> None:
        self.options: dict[str, Any] = {"shard_count": shards, "map_bytes": 2**26, "hot_tail_bytes": hot}
        self.eager = eager
        self.acid = self.open()
        assert recovered(self.acid) == ({}, {})
        self.driver = Driver([self.memory, self.acid])

    def path(self) -> Path:
        return self.home / str(self.generation)

    def open(self) -> JournaledStorage:
        # Either every batch is followed by a checkpoint, or there is none and all records stay in the journal.
        if self.eager:
            return open_acid(self.path(), **self.options, save_after_s=0.0, segment_bytes=2_000)
        return open_lazy(self.path(), self.options["shard_count"])

    def some(self, draw: Any) -> StreamState | None:
        streams = [stream for stream in self.driver.catalog if not stream.deleted]
        return streams[draw % len(streams)] if streams else None

    # -- operations of clients -----------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), messages=st.one_of(st.just([]), MESSAGES), closed=st.booleans())
    def create(self, name: str, messages: list[bytes], closed: bool) -> None:
        if name not in self.driver.catalog.by_name:
            self.driver.create(name, messages, closed=closed)

    @rule(name=st.sampled_from(NAMES), draw=st.integers(0, 99), cut=st.integers(0, 99), messages=MESSAGES)
    def fork(self, name: str, draw: int, cut: int, messages: list[bytes]) -> None:
        source = self.some(draw)
        if source is None or name in self.driver.catalog.by_name:
            return
        self.driver.commit()
        floor = self.driver.floor(source)
        message_index = floor.message_index + cut % (source.message_index - floor.message_index + 1)
        byte_position = self.memory.boundary(source.id, message_index)
        assert byte_position is not None
        self.driver.create(name, messages, fork=ForkPoint(source.id, source.name, message_index, byte_position))

    @rule(draw=st.integers(0, 99), messages=MESSAGES, close=st.booleans(), seq=st.one_of(st.none(), st.text("abc")))
    def append(self, draw: int, messages: list[bytes], close: bool, seq: str | None) -> None:
        stream = self.some(draw)
        if stream is not None and not stream.closed:
            self.driver.append(stream, messages, stream_seq=seq, close=close and draw % 4 == 0)

    @rule(draw=st.integers(0, 99), who=PRODUCERS, messages=MESSAGES, bump=st.booleans(), close=st.booleans())
    def produce(self, draw: int, who: str, messages: list[bytes], bump: bool, close: bool) -> None:
        stream = self.some(draw)
        if stream is None or stream.closed:
            return
        known = (stream.producers or {}).get(who)
        if known is None:
            epoch, seq = 0, 0
        else:
            epoch, seq = (known.epoch + 1, 0) if bump else (known.epoch, known.seq + 1)
        self.driver.append(stream, messages, producer=(who, epoch, seq), close=close and draw % 4 == 0)

    @rule(draw=st.integers(0, 99), who=st.sets(PRODUCERS, min_size=1))
    def evict(self, draw: int, who: set[str]) -> None:
        stream = self.some(draw)
        if stream is not None:
            self.driver.evict(stream, sorted(who))

    @rule(draw=st.integers(0, 99))
    def touch(self, draw: int) -> None:
        stream = self.some(draw)
        if stream is not None:
            self.driver.touch(stream)

    @rule(draw=st.integers(0, 99), cut=st.integers(0, 99))
    def retain(self, draw: int, cut: int) -> None:
        stream = self.some(draw)
        if stream is None:
            return
        self.driver.commit()
        floor = self.driver.floor(stream)
        message_index = floor.message_index + cut % (stream.message_index - floor.message_index + 1)
        byte_position = self.memory.boundary(stream.id, message_index)
        assert byte_position is not None
        if message_index < stream.retained_index:
            return
        self.driver.retain(stream, message_index, byte_position)
        if not stream.children:
            self.driver.trim(stream, Offset(message_index, byte_position))

    @rule(key=st.sampled_from(["a", "b", "k" * 900]), value=st.one_of(st.none(), st.binary(max_size=20)))
    def document(self, key: str, value: bytes | None) -> None:
        self.driver.document(key, value)

    @rule(draw=st.integers(0, 99))
    def delete(self, draw: int) -> None:
        stream = self.some(draw)
        if stream is not None:
            self.driver.delete(stream)

    # -- operations of the store ---------------------------------------------------------------------------------

    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @precondition(lambda self: self.eager)
    @rule()
    def save(self) -> None:
        assert self.acid is not None
        self.driver.commit()
        save_all(self.acid)

    @rule(eager=st.booleans())
    def reopen(self, eager: bool) -> None:
        assert self.acid is not None
        self.driver.commit()
        self.acid.close()
        self.eager = eager
        self.replace(self.open())

    @precondition(lambda self: not self.eager)
    @rule(eager=st.booleans())
    def crash(self, eager: bool) -> None:
        """Open a copy of the files as another store; queued records are lost, as they were not acknowledged."""
        assert self.acid is not None
        self.driver.commit()
        before = self.path()
        self.generation += 1
        shutil.copytree(before, self.path(), ignore=shutil.ignore_patterns("LOCK", "lock.mdb"))
        self.acid.close()
        shutil.rmtree(before)
        self.eager = eager
        self.replace(self.open())

    def replace(self, store: JournaledStorage) -> None:
        self.acid = store
        self.driver.stores = [self.memory, store]
        assert recovered(store) == self.driver.state()
        for stream in self.driver.catalog:
            floor = self.driver.floor(stream)
            store.trim(stream.id, floor.message_index, floor.byte_position)

    # -- invariants -------------------------------------------------------------------------------------

    @rule(draw=st.integers(0, 99), low=st.integers(0, 99), high=st.integers(0, 99), room=st.integers(0, 200))
    def read(self, draw: int, low: int, high: int, room: int) -> None:
        self.driver.commit()
        streams = list(self.driver.catalog)
        if not streams:
            return
        assert self.acid is not None
        stream = streams[draw % len(streams)]
        base = self.driver.floor(stream).message_index
        count = stream.message_index - base
        begin, end = sorted((base + low % (count + 1), base + high % (count + 1)))
        for store_side, memory_side in (
            (begin, begin),
            (end, end),
            (stream.message_index + 1, stream.message_index + 1),
        ):
            assert self.acid.boundary(stream.id, store_side) == self.memory.boundary(stream.id, memory_side)
        at, until = self.memory.boundary(stream.id, begin), self.memory.boundary(stream.id, end)
        assert at is not None
        assert until is not None
        inside = at + room % (until - at + 1)
        for first, last in ((at, until), (inside, until), (at, inside)):
            assert b"".join(self.acid.read(stream.id, first, last)) == b"".join(
                self.memory.read(stream.id, first, last)
            )
        if begin < end:
            assert list(self.acid.lengths(stream.id, begin, end)) == self.memory.lengths(stream.id, begin, end)
            acid, memory = self.acid.arrivals(stream.id, begin, end), self.memory.arrivals(stream.id, begin, end)
            assert expanded(acid) == expanded(memory)
            for at_ms in (memory[0].at_ms, memory[-1].at_ms, memory[-1].at_ms + 1):
                found, expected = self.acid.first_since(stream.id, at_ms), self.memory.first_since(stream.id, at_ms)
                assert found == expected or max(found, expected) <= begin, "trimmed bytes may still be readable"
            assert self.acid.cut(stream.id, begin, at, end, room) == self.memory.cut(stream.id, begin, at, end, room)

    @invariant()
    def all_bytes_are_stored(self) -> None:
        if self.acid is None or self.driver.queue:
            return
        for stream in self.driver.catalog:
            floor = self.driver.floor(stream)
            assert messages_of(self.acid, stream, floor) == messages_of(self.memory, stream, floor)
        assert self.acid.usage().payload_bytes == self.memory.usage().payload_bytes
        self.check_memory(self.acid)

    def check_memory(self, store: JournaledStorage) -> None:
        """Check that every byte in memory is counted once, as unsaved or as cached."""
        unsaved = store._unsaved
        documents = sum(document_bytes(key, value) for key, value in unsaved.documents.items())
        assert unsaved.bytes == documents + sum(stored.unsaved_memory for stored in unsaved.streams.values())
        cached = sum(memory_of(stored.tail) - stored.unsaved_memory for stored in unsaved.streams.values())
        assert unsaved.cached_bytes == cached
        assert cached <= store._settings.hot_tail_bytes // 2

    def teardown(self) -> None:
        if self.acid is not None:
            self.driver.commit()
            self.all_bytes_are_stored()
            self.acid.close()
            assert list(check(self.path())) == []
            again = open_acid(self.path(), **self.options)
            assert recovered(again) == self.driver.state()
            again.close()
        shutil.rmtree(self.home)


@pytest.mark.timeout(900)
def test_acid_behaves_as_memory_does(long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 37)
    monkeypatch.setattr(shard, "REAPED_AT_ONCE", 3)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=400 if long else 20,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
