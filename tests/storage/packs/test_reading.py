"""Boundaries, cuts, lengths and bytes of data in packs, in a running checkpoint, or in memory."""

from __future__ import annotations

import errno
import os
from array import array
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.core.records import Append, Create
from headwater.storage import extents
from headwater.storage.arrival_times import TimeRun, TimeTable
from headwater.storage.extents import Extent
from headwater.storage.filesystem import MappedFile, RealFilesystem
from headwater.storage.interface import Committed, CorruptError, StorageError
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.memory import MemoryStorage
from headwater.storage.packs.pack import Pack, PackWriter
from headwater.storage.packs.pack_store import file_storage
from headwater.storage.tail import Tail
from tests.storage.model import expanded
from tests.storage.packs.test_checkpoints import Bench
from tests.storage.packs.test_threads import image_of, maintain_until

MESSAGES = st.lists(st.integers(1, 400), min_size=1, max_size=60)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=MESSAGES, saves=st.sets(st.integers(0, 59), max_size=6), data=st.data())
def test_reads_match_memory_mode(lengths: list[int], saves: set[int], data: st.DataObject) -> None:
    """A checkpoint after any message does not change the result of any read."""
    bench = Bench()
    process = bench.process
    memory = MemoryStorage()
    stream_id = process.create("s")
    process.commit()
    memory.publish([Committed(Create(stream_id, "s", 1, "text/plain"))])
    ends = [0]
    for number, length in enumerate(lengths):
        payload = Random(number).randbytes(length)
        process.append("s", payload)
        memory.publish([Committed(Append(stream_id, process.now_ms, number, ends[-1], payload, (length,)))])
        process.commit()
        ends.append(ends[-1] + length)
        if number in saves:
            bench.save()
    if data.draw(st.booleans(), label="leave a checkpoint half done"):
        process.storage.checkpoint_soon()
        bench.maintain(3)
    storage = process.storage
    count = len(lengths)
    for message_index in range(-1, count + 2):
        assert storage.boundary(stream_id, message_index) == memory.boundary(stream_id, message_index)
    for _ in range(12):
        low = data.draw(st.integers(0, count - 1), label="from")
        high = data.draw(st.integers(low + 1, count), label="to")
        most = data.draw(st.sampled_from([0, 1, 50, 300, 1000, 10**6]), label="most bytes")
        asked = (stream_id, low, ends[low], high, most)
        assert storage.cut(*asked) == memory.cut(*asked)
        assert list(storage.lengths(stream_id, low, high)) == list(memory.lengths(stream_id, low, high))
        assert expanded(storage.arrivals(stream_id, low, high)) == expanded(memory.arrivals(stream_id, low, high))
        at_ms = process.now_ms - data.draw(st.integers(-2, count + 2), label="since")
        assert storage.first_since(stream_id, at_ms) == memory.first_since(stream_id, at_ms)
        found = b"".join(storage.read(stream_id, ends[low], ends[high]))
        assert found == b"".join(memory.read(stream_id, ends[low], ends[high]))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), min_size=1, max_size=30), st.data())
def test_compact_extents_find_what_a_plain_search_finds(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    chain, message_index, byte_position = [], 0, 0
    for number, (messages, length) in enumerate(shapes):
        chain.append(Extent(number, 16, message_index, byte_position, messages, length))
        message_index, byte_position = chain[-1].end_index, chain[-1].end_position
    blob = extents.join(chain)
    assert list(extents.split(blob)) == chain
    assert extents.last(blob) == chain[-1]
    assert extents.is_chain(blob, 0, 0, message_index, byte_position)
    assert not extents.is_chain(blob, 0, 0, message_index + 1, byte_position)
    wanted = data.draw(st.integers(0, byte_position - 1))
    holds = next(number for number, extent in enumerate(chain) if wanted < extent.end_position)
    assert extents.find_byte_position(blob, wanted) == holds
    wanted = data.draw(st.integers(0, message_index - 1))
    holds = next(number for number, extent in enumerate(chain) if wanted < extent.end_index)
    assert extents.find_message_index(blob, wanted) == holds
    floor = data.draw(st.integers(0, byte_position))
    rest = [extent for extent in chain if extent.end_position > floor]
    assert list(extents.split(extents.after(blob, floor))) == rest
    shuffled = data.draw(st.permutations(chain))
    assert extents.chain(shuffled, message_index, byte_position) == blob
    low = data.draw(st.integers(0, len(chain) - 1))
    high = data.draw(st.integers(low + 1, len(chain)))
    group = chain[low:high]
    merged = Extent(
        99,
        8,
        group[0].first_index,
        group[0].byte_position,
        sum(each.messages for each in group),
        sum(each.length for each in group),
    )
    assert list(extents.split(extents.merge(blob, merged))) == [*chain[:low], merged, *chain[high:]]
    assert extents.merge(extents.join(chain[high:]), merged) == extents.join(chain[high:])


def test_pack_reads_back_unchanged(tmp_path: Path) -> None:
    filesystem = RealFilesystem()
    writer = PackWriter(filesystem, tmp_path, 7, tier=0, born=7)
    random = Random(1)
    put = []
    for stream_id in range(300):
        lengths = [random.randint(1, 20_000) for _ in range(random.randint(1, 4))]
        payload = random.randbytes(sum(lengths))
        ends = array("I", [sum(lengths[: at + 1]) for at in range(len(lengths))])
        times = TimeTable(TimeRun(1, 1_000 + at // 2) for at in range(len(lengths)))
        extent = writer.add(stream_id, stream_id * 10, stream_id * 1000, (payload[:5], payload[5:]), ends, times)
        put.append((stream_id, extent, payload, ends.tolist()))
    info = writer.finish()
    assert info.size == (tmp_path / "0000000000000007.pack").stat().st_size
    pack = Pack(filesystem, tmp_path, info)
    assert [tuple(located) for located in pack.extents()] == [(stream_id, extent) for stream_id, extent, _, _ in put]
    random.shuffle(put)
    for _, extent, payload, expected in put:
        assert bytes(pack.data(extent.offset, extent.offset + extent.length)) == payload
        assert pack.ends(extent)[:].tolist() == expected
        assert [pack.ends(extent)[at] for at in range(extent.messages)] == expected
        times_ms = [run.at_ms for run in pack.times(extent).between(0, extent.messages) for _ in range(run.messages)]
        assert times_ms == [1_000 + at // 2 for at in range(extent.messages)]
        assert pack.times(extent).first_since(1_001) == min(2, extent.messages)
    assert list(pack.check_all()) == []
    pack.close()


def test_slice_stays_readable_after_its_pack_is_removed(tmp_path: Path) -> None:
    """A response that is still being sent keeps its data, though its pack was merged and unlinked."""
    storage = file_storage(
        RealFilesystem(),
        tmp_path,
        durable=False,
        settings=StoreSettings(hot_tail_bytes=10_000, big_bytes=1, open_packs_max=1, reserve_bytes=0),
    )
    list(storage.recover())
    payload = Random(1).randbytes(100_000)
    batch = [Committed(Create(1, "s", 1, "text/plain", payload=payload, lengths=(100_000,)))]
    storage.write(batch)
    storage.publish(batch)
    image = image_of(Create(1, "s", 1, "text/plain", payload=payload, lengths=(100_000,)))
    maintain_until(storage, image, lambda: storage.usage().memory_bytes == 0)
    (piece,) = storage.read(1, 10, 99_990)
    assert isinstance(piece, memoryview)
    storage.close()
    for path in (tmp_path / "packs").iterdir():
        path.unlink()
    assert piece == payload[10:99_990]


def test_reading_before_the_first_retained_byte_is_an_error() -> None:
    bench = Bench()
    process = bench.process
    stream_id = process.create("s")
    for number in range(10):
        process.append("s", b"%03d" % number)
    process.commit()
    bench.save()
    process.retain("s", 5, 15)
    process.commit()
    assert process.storage.boundary(stream_id, 5) == 15
    assert process.storage.boundary(stream_id, 4) is None
    with pytest.raises(CorruptError, match="before 15 are no longer stored"):
        process.storage.read(stream_id, 12, 30)
    with pytest.raises(CorruptError, match="no longer stored"):
        process.storage.cut(stream_id, 4, 12, 10, 100)


def test_a_tail_larger_than_an_extent_may_be_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.storage.packs.checkpoint.EXTENT_MAX_BYTES", 1000)
    bench = Bench()
    process = bench.process
    stream_id = process.create("s")
    for number in range(40):
        process.append("s", b"%02d" % number * 45)
    process.append("s", b"large" * 500)
    process.commit()
    bench.save()
    assert extents.count(process.storage._streams[stream_id].extents) >= 5
    process.check_state()
    bench.restart()


def test_tail_matches_the_reference_implementation() -> None:
    tail = Tail(3, 100)
    tail.extend(b"abcdef", (1, 2, 3), 1)
    assert [tail.boundary(message_index) for message_index in range(2, 8)] == [None, 100, 101, 103, 106, None]
    assert tail.lengths(4, 6) == [2, 3]
    assert tail.cut(3, 100, 6, 3) == (5, 103)


def test_a_long_read_is_prefetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slice but the first is requested before it is read, so the event loop does not wait for the disk."""
    writer = PackWriter(RealFilesystem(), tmp_path, 1, 0, 1)
    size, slice_bytes = 4 * 2**20, 256 * 1024
    extent = writer.add(7, 0, 0, [Random(1).randbytes(size)], array("I", [size]), TimeTable([TimeRun(1, 1)]))
    pack = Pack(RealFilesystem(), tmp_path, writer.finish())
    wanted: list[tuple[int, int]] = []
    monkeypatch.setattr(type(pack._mapped), "will_need", lambda _, offset, length: wanted.append((offset, length)))
    for start in range(extent.offset, extent.offset + size, slice_bytes):
        end = start + slice_bytes
        if start > extent.offset:
            assert any(offset <= start and end <= offset + length for offset, length in wanted)
        pack.data(start, end)
    wanted.clear()
    pack.data(extent.offset, extent.offset + 4)
    assert not wanted, "looking up a boundary is not a long read"
    pack.close()


class ScarceDescriptors(RealFilesystem):
    """A file system on which at most `free` more files can be mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 1_000

    def map(self, path: Path) -> MappedFile:
        if self.free <= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        self.free -= 1
        return ReturningMapped(self, super().map(path))


class ReturningMapped:
    """A mapped file that is free for another one when it is closed."""

    def __init__(self, filesystem: ScarceDescriptors, mapped: MappedFile) -> None:
        self._filesystem = filesystem
        self._mapped = mapped

    def close(self) -> None:
        self._mapped.close()
        self._filesystem.free += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mapped, name)


def test_packs_are_closed_for_others_without_descriptors_and_an_unread_pack_is_not_damage(tmp_path: Path) -> None:
    filesystem = ScarceDescriptors()
    storage = file_storage(
        filesystem,
        tmp_path,
        durable=False,
        settings=StoreSettings(hot_tail_bytes=1_000, reserve_bytes=0),
    )
    list(storage.recover())
    created = Create(1, "s", 1, "text/plain")
    records: list[Create | Append] = [created]
    records += [Append(1, 1, number, 5_000 * number, b"%d" % number * 5_000, (5_000,)) for number in range(4)]
    for count, record in enumerate(records, 1):
        storage.write([Committed(record)])
        storage.publish([Committed(record)])
        maintain_until(storage, image_of(*records[:count]), lambda: storage.usage().memory_bytes == 0)
    assert len(list((tmp_path / "packs").iterdir())) == 4
    filesystem.free = 1
    assert b"".join(storage.read(1, 0, 20_000)) == b"".join(b"%d" % number * 5_000 for number in range(4))
    storage.read(1, 15_000, 20_000)
    filesystem.free = -1  # The pack that is open is closed, and its descriptor is taken by something else.
    with pytest.raises(StorageError) as raised:
        storage.read(1, 0, 5_000)
    assert not isinstance(raised.value, CorruptError)
    filesystem.free = 1
    assert b"".join(storage.read(1, 0, 5_000)) == b"0" * 5_000
    storage.close()
