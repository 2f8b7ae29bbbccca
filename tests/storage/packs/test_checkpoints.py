"""Checkpoints, step by step: what is saved, and what happens to streams that change during one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from headwater.core.producers import ProducerHeaders
from headwater.storage.journaled_store import StoreSettings
from tests.storage.faulty_filesystem import FaultyFilesystem
from tests.storage.model import difference, model_of
from tests.storage.simulation import SimulatedProcess, packs_of

ROOMY = StoreSettings(
    segment_bytes=4096,
    hot_tail_bytes=10**9,
    reserve_bytes=0,
    big_bytes=2048,
    segments_max=10**6,
    fanout=3,
    clock_check_every=1,
)
"""No automatic checkpoints: the tests request them."""
ONE_STEP_PER_TEND_S = 0.01


class Bench:
    """A disk, and one process on it after the other."""

    def __init__(self, settings: StoreSettings = ROOMY) -> None:
        self.filesystem = FaultyFilesystem(Random(1))
        self.settings = settings
        self.random = Random(2)
        self.process = SimulatedProcess(self.filesystem, self.random, settings=settings, tick_s=ONE_STEP_PER_TEND_S)

    def maintain(self, times: int) -> None:
        for _ in range(times):
            self.process.maintain()

    def save(self) -> None:
        """Make a complete checkpoint, with the clean-up after it."""
        self.process.storage.checkpoint_soon()
        for _ in range(300):
            self.process.maintain()
            self.process.worker.step()

    def finish(self) -> None:
        """Finish the jobs in progress."""
        for _ in range(300):
            self.process.maintain()
            self.process.worker.step()

    def files(self, suffix: str) -> list[str]:
        return [name for name in self.filesystem.snapshot() if name.endswith(suffix)]

    def restart(self, *, power: bool = True) -> SimulatedProcess:
        """Crash, recover, and check that nothing has changed."""
        before = self.process
        self.filesystem.crash(power=power)
        before.abandon()
        self.process = SimulatedProcess(
            self.filesystem, self.random, settings=self.settings, tick_s=ONE_STEP_PER_TEND_S
        )
        expected, found = before.model.dump(), model_of(self.process.catalog, self.process.storage).dump()
        assert expected == found, difference(expected, found)
        self.process.begin_from(before.model)
        self.process.now_ms = before.now_ms
        return self.process


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_checkpoint_frees_memory_and_trims_the_journal(bench: Bench) -> None:
    process = bench.process
    process.create("a")
    for number in range(100):
        process.append("a", b"%04d" % number * 25)
        process.commit()
    assert process.storage.usage().memory_bytes > 10_000
    assert len(bench.files(".log")) > 2
    bench.save()
    assert process.storage.usage() == (10_000, 0)
    assert len(bench.files(".log")) == 2, "the one being written, and the next"
    assert len(bench.files(".pack")) == 1
    process.check_state()
    bench.restart()


def test_reads_still_work_while_a_checkpoint_saves_their_data(bench: Bench) -> None:
    process = bench.process
    for name in "abc":
        process.create(name)
    for number in range(30):
        for name in "abc":
            process.append(name, b"%s%04d" % (name.encode(), number) * 9)
    process.commit()
    process.storage.checkpoint_soon()
    for _ in range(200):
        process.append("b", b"more")
        process.commit()
        process.check_state()
        process.worker.step()
    bench.restart()


def test_stream_that_always_has_pending_records_is_saved_from_the_journal(bench: Bench) -> None:
    """The event loop never has exactly the durable state, because the next batch is always pending."""
    process = bench.process
    process.create("busy")
    process.append("busy", b"0", producer=ProducerHeaders("p", 0, 0))
    process.commit()
    bench.save()
    for number in range(1, 60):
        process.append("busy", b"%d" % number, producer=ProducerHeaders("p", 0, number))
    process.storage.checkpoint_soon()
    for _ in range(40):
        # One more record is always pending.
        process.commit(1)
        process.worker.step()
    assert process.queue
    assert process.image_of(process.catalog.by_name["busy"].id) is None
    assert process.storage.usage().memory_bytes < 3000
    process.queue.clear()
    recovered = bench.restart()
    state = recovered.catalog.by_name["busy"].producers
    assert state is not None
    assert state["p"].seq == recovered.catalog.by_name["busy"].message_index - 1


def test_stream_removed_before_it_was_frozen_is_saved(bench: Bench) -> None:
    """It existed when the checkpoint began, so it is saved; its deletion is in the journal after that."""
    process = bench.process
    for number in range(6):
        process.create(f"s{number}", b"x" * 50)
    process.commit()
    process.storage.checkpoint_soon()
    bench.maintain(2)
    for number in range(6):
        process.delete(f"s{number}")
        process.commit()
    bench.finish()
    bench.restart()
    bench.save()
    bench.restart()
    assert not bench.process.catalog.by_id


def test_rewrite_keeps_removed_streams_that_the_manifest_lists(bench: Bench) -> None:
    process = bench.process
    process.create("gone", b"g" * 100)
    process.create("kept", b"k" * 30)
    process.commit()
    bench.save()
    process.delete("gone")
    process.commit()
    process.rest()
    bench.restart()
    bench.save()
    process = bench.process
    process.rest()
    assert process.storage.parts()["dead_bytes"] == 0
    bench.restart()


@pytest.mark.parametrize("freeze_first", [True, False])
def test_a_stream_deleted_while_a_checkpoint_is_made_stays_deleted(bench: Bench, freeze_first: bool) -> None:
    """It is kept for its fork and only marked as deleted; the mark must not get lost between checkpoints."""
    process = bench.process
    process.create("source", b"s" * 30)
    process.commit()
    stream = process.catalog.by_name["source"]
    process.fork("fork", "source", stream.message_index, stream.byte_position)
    process.append("source", b"more")
    process.commit()
    process.storage.checkpoint_soon()
    if freeze_first:
        bench.maintain(3)
    else:
        bench.maintain(1)
    process.delete("source")
    process.commit()
    bench.finish()
    assert bench.restart().catalog.by_name["source"].deleted
    bench.save()
    assert bench.restart().catalog.by_name["source"].deleted
    bench.process.delete("fork")
    bench.process.commit()
    assert not bench.process.model.streams
    bench.restart()


def test_streams_removed_by_a_deletion_are_replayed_exactly(bench: Bench) -> None:
    check_order_of_deletions(bench)


def check_order_of_deletions(bench: Bench) -> None:
    """During a checkpoint, delete a fork, create another, then delete the source, which is kept for the second fork.

    If the source were saved as deleted, replaying the deletion of the first fork would remove it before the second fork
    is replayed.
    """
    process = bench.process
    process.create("source", b"s" * 30)
    process.commit()
    stream = process.catalog.by_name["source"]
    process.fork("first", "source", stream.message_index, stream.byte_position)
    process.commit()
    bench.save()
    process.append("source", b"more")
    process.commit()
    process.storage.checkpoint_soon()
    process.delete("first")
    process.fork("second", "source", stream.message_index, stream.byte_position)
    process.delete("source")
    bench.maintain(1)
    process.commit(2)
    # Its deletion is still pending, so it could not be frozen yet.
    process.commit()
    bench.finish()
    recovered = bench.restart()
    assert set(recovered.catalog.by_name) == {"source", "second"}
    assert recovered.catalog.by_name["source"].deleted
    assert recovered.catalog.by_name["source"].children == 1


def test_deletion_of_a_busy_stream_is_recovered_from_the_journal(bench: Bench) -> None:
    """It was deleted during an earlier checkpoint, and neither of its images contains the deletion."""
    process = bench.process
    process.create("source", b"s" * 30)
    process.commit()
    stream = process.catalog.by_name["source"]
    process.fork("fork", "source", stream.message_index, stream.byte_position)
    process.commit()
    process.storage.checkpoint_soon()
    process.touch("source")
    bench.maintain(1)
    process.commit()
    process.delete("source")
    process.commit()
    bench.finish()
    process.storage.checkpoint_soon()
    process.touch("fork")
    process.commit()
    process.delete("fork")
    bench.maintain(1)
    process.commit()
    bench.finish()
    assert not process.model.streams
    bench.restart()


def test_documents_are_saved_and_removed(bench: Bench) -> None:
    process = bench.process
    process.document("bucket/a", b"1")
    process.document("bucket/b", b"2")
    process.commit()
    bench.save()
    process.document("bucket/a", None)
    process.document("bucket/c", b"3")
    process.commit()
    bench.restart()
    bench.save()
    bench.process.document("bucket/b", b"22")
    bench.process.commit()
    bench.save()
    assert bench.restart().catalog.documents == {"bucket/b": b"22", "bucket/c": b"3"}


def test_packs_are_merged_so_that_extents_stay_few(bench: Bench) -> None:
    process = bench.process
    names = [f"s{number}" for number in range(5)]
    for name in names:
        process.create(name)
    process.commit()
    for round_ in range(30):
        for name in names:
            process.append(name, b"%s-%d;" % (name.encode(), round_))
        process.commit()
        bench.save()
    process.rest()
    process.check_state()
    # With a fan-out of 3, 30 rounds make at most 2 packs in each of 4 tiers.
    assert process.storage.parts()["packs"] <= 8
    for name in names:
        blob = process.storage._streams[process.catalog.by_name[name].id].extents
        assert len(blob) // 48 <= 8
    bench.restart()


def test_large_extents_are_not_merged_further() -> None:
    bench = Bench(ROOMY)
    process = bench.process
    process.create("large")
    process.create("small")
    process.commit()
    for _ in range(7):
        process.append("large", Random(1).randbytes(5000))
        process.append("small", b"tiny")
        process.commit()
        bench.save()
    process.rest()
    tiers = sorted(info.tier for info in packs_of(process.storage).pack_set.infos)
    assert tiers.count(255) == 7
    assert len(tiers) <= 10
    process.check_state()
    bench.restart()


def test_garbage_is_removed_from_the_disk(bench: Bench) -> None:
    process = bench.process
    for number in range(10):
        process.create(f"s{number}", Random(number).randbytes(1000))
    process.commit()
    bench.save()
    full = sum(len(data) for name, data in bench.filesystem.snapshot().items() if name.endswith(".pack"))
    assert full > 10_000
    for number in range(9):
        process.delete(f"s{number}")
    process.commit()
    bench.save()
    process.rest()
    bench.save()
    process.rest()
    left = sum(len(data) for name, data in bench.filesystem.snapshot().items() if name.endswith(".pack"))
    assert left < 1500
    assert process.storage.usage().payload_bytes == 1000
    bench.restart()


def check_packs_are_counted_before_they_are_checked(bench: Bench) -> None:
    """A rewrite ends before all streams are updated with a checkpoint's packs: those packs are not dead."""
    process = bench.process
    for number in range(3):
        for name in "abcd":
            if number == 0:
                process.create(name)
            process.append(name, b"%04d" % number * 30)
        process.commit()
        process.storage.checkpoint_soon()
        for _ in range(300):
            process.maintain()
            if process.worker.urgent or process.worker.first:
                process.worker.step()
    assert process.worker.background, "three packs of a tier are to be merged"
    for number in range(100):
        process.create(f"more {number}", b"%04d" % number * 30)
    process.commit()
    packs = bench.files(".pack")
    process.storage.checkpoint_soon()
    for _ in range(300):
        if process.worker.urgent:
            break
        process.maintain()
    while process.worker.urgent:
        process.worker.step()
    assert len(bench.files(".pack")) > len(packs)
    bench.maintain(2)
    while process.worker.step():
        pass
    bench.finish()
    process.check_state()


def test_packs_are_counted_before_they_are_checked(bench: Bench) -> None:
    check_packs_are_counted_before_they_are_checked(bench)


def test_dead_packs_are_removed_without_reading_them() -> None:
    """This holds for any number of packs, and if one is damaged."""
    bench = Bench(replace(ROOMY, fanout=10**6))
    for number in range(40):
        bench.process.create(f"s{number}", b"%04d" % number * 100)
        bench.process.commit()
        bench.save()
    packs = bench.files(".pack")
    assert len(packs) == 40
    disk = bench.filesystem.snapshot()
    damaged = bytearray(disk[packs[7]])
    damaged[50] ^= 1
    model = bench.process.model
    bench.filesystem.restore(disk | {packs[7]: bytes(damaged)})
    bench.process = SimulatedProcess(
        bench.filesystem, bench.random, settings=bench.settings, tick_s=ONE_STEP_PER_TEND_S
    )
    bench.process.begin_from(model)
    for number in range(40):
        bench.process.delete(f"s{number}")
    bench.process.commit()
    bench.filesystem.traces = True
    bench.save()
    assert bench.files(".pack") == []
    opened = [call for call in bench.filesystem.log if " map " in call and ".pack" in call]
    assert not opened


def test_damaged_pack_does_not_prevent_merging_of_others(bench: Bench) -> None:
    """With a fan-out of three, the other packs are merged without it."""
    for number in range(2):
        bench.process.create(f"s{number}", b"%04d" % number * 100)
        bench.process.commit()
        bench.save()
    disk = bench.filesystem.snapshot()
    first = bench.files(".pack")[0]
    damaged = bytearray(disk[first])
    damaged[50] ^= 1
    model = bench.process.model
    bench.filesystem.restore(disk | {first: bytes(damaged)})
    bench.process = SimulatedProcess(
        bench.filesystem, bench.random, settings=bench.settings, tick_s=ONE_STEP_PER_TEND_S
    )
    bench.process.begin_from(model)
    for number in range(2, 5):
        bench.process.create(f"s{number}", b"%04d" % number * 100)
        bench.process.commit()
        bench.save()
        bench.process.clock.now_s += 100.0
        bench.finish()
    assert len(bench.files(".pack")) < 5
    assert first in bench.files(".pack")


def test_deletions_alone_free_disk_space() -> None:
    """Deletions add nothing to memory, so the bytes that they make dead must trigger a checkpoint."""
    bench = Bench(
        StoreSettings(segment_bytes=4096, hot_tail_bytes=8000, reserve_bytes=0, big_bytes=2048, clock_check_every=1)
    )
    process = bench.process
    for number in range(8):
        process.create(f"s{number}", Random(number).randbytes(3000))
        process.commit()
        bench.finish()
    for number in range(8):
        process.delete(f"s{number}")
        process.commit()
        bench.finish()
    process.rest()
    assert process.storage.parts()["live_bytes"] <= 4000
    bench.restart()


def test_deletions_free_space_on_a_full_disk() -> None:
    """Too little is deleted to trigger a checkpoint normally, but on a full disk it counts."""
    bench = Bench(StoreSettings(segment_bytes=4096, hot_tail_bytes=10**6, reserve_bytes=1000, clock_check_every=1))
    process = bench.process
    for number in range(4):
        process.create(f"s{number}", Random(number).randbytes(3000))
    process.commit()
    bench.save()
    process.delete("s0")
    process.delete("s1")
    process.delete("s2")
    process.commit()
    bench.finish()
    assert process.storage.parts()["live_bytes"] == 12_000
    bench.filesystem.free = 10
    process.clock.now_s += 2
    assert process.storage.refusal() is not None
    bench.finish()
    process.rest()
    assert process.storage.parts()["live_bytes"] == 3000
    bench.restart()


def test_trimmed_bytes_leave_memory_at_once_and_the_disk_soon(bench: Bench) -> None:
    process = bench.process
    process.create("log")
    for number in range(40):
        process.append("log", b"%04d" % number * 100)
        process.commit()
        if number % 10 == 9 and number < 30:
            bench.save()
    process.retain("log", 35, 35 * 400)
    process.commit()
    assert process.storage.usage().payload_bytes == 5 * 400
    assert process.storage.usage().memory_bytes < 2600
    process.rest()
    assert not bench.files(".pack")
    process.check_state()
    bench.restart()
    bench.save()
    bench.process.check_state()
    bench.restart()


def test_manifest_is_rewritten_when_most_of_it_is_outdated() -> None:
    bench = Bench(
        StoreSettings(
            segment_bytes=10**6,
            hot_tail_bytes=10**9,
            reserve_bytes=0,
            segments_max=10**6,
            manifest_floor_bytes=1000,
            clock_check_every=1,
        )
    )
    process = bench.process
    process.create("a")
    process.document("d", b"kept")
    process.commit()
    sizes = []
    for _ in range(40):
        process.touch("a")
        process.commit()
        bench.save()
        sizes.append(len(bench.filesystem.snapshot()["/data/MANIFEST"]))
    assert max(sizes) < 2500
    assert any(later < earlier for earlier, later in pairwise(sizes))
    bench.restart()
