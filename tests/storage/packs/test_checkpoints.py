"""Checkpoints, move by move: what is saved, what happens to streams that change, fork and go while one is made."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from headwater.core.producers import ProducerHeaders
from headwater.storage.journaled_store import StoreSettings
from tests.storage.faulty_filesystem import FaultyFilesystem
from tests.storage.model import difference, model_of
from tests.storage.simulation import Life, packs_of

ROOMY = StoreSettings(
    segment_bytes=4096,
    hot_tail_bytes=10**9,
    reserve_bytes=0,
    big_bytes=2048,
    segments_max=10**6,
    fanout=3,
    look_every=1,
)
"""Nothing happens by itself: checkpoints are asked for."""
ONE_STEP_PER_TEND_S = 0.01


class Bench:
    """A disk, and one life on it after the other."""

    def __init__(self, settings: StoreSettings = ROOMY) -> None:
        self.filesystem = FaultyFilesystem(Random(1))
        self.settings = settings
        self.random = Random(2)
        self.life = Life(self.filesystem, self.random, settings=settings, tick_s=ONE_STEP_PER_TEND_S)

    def maintain(self, times: int) -> None:
        for _ in range(times):
            self.life.maintain()

    def save(self) -> None:
        """A whole checkpoint, and the chores after it."""
        self.life.storage.checkpoint_soon()
        for _ in range(300):
            self.life.maintain()
            self.life.worker.step()

    def finish(self) -> None:
        """Whatever is under way, to its end."""
        for _ in range(300):
            self.life.maintain()
            self.life.worker.step()

    def files(self, suffix: str) -> list[str]:
        return [name for name in self.filesystem.snapshot() if name.endswith(suffix)]

    def restart(self, *, power: bool = True) -> Life:
        """Crash, recover, and find everything as it was."""
        before = self.life
        self.filesystem.crash(power=power)
        before.abandon()
        self.life = Life(self.filesystem, self.random, settings=self.settings, tick_s=ONE_STEP_PER_TEND_S)
        expected, found = before.model.dump(), model_of(self.life.catalog, self.life.storage).dump()
        assert expected == found, difference(expected, found)
        self.life.begin_from(before.model)
        self.life.now_ms = before.now_ms
        return self.life


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_checkpoint_frees_memory_and_shortens_the_log(bench: Bench) -> None:
    life = bench.life
    life.create("a")
    for number in range(100):
        life.append("a", b"%04d" % number * 25)
        life.commit()
    assert life.storage.usage().memory_bytes > 10_000
    assert len(bench.files(".log")) > 2
    bench.save()
    assert life.storage.usage() == (10_000, 0)
    assert len(bench.files(".log")) == 2, "the one being written, and the next"
    assert len(bench.files(".pack")) == 1
    life.check_state()
    bench.restart()


def test_reads_go_on_from_what_is_being_saved(bench: Bench) -> None:
    life = bench.life
    for name in "abc":
        life.create(name)
    for number in range(30):
        for name in "abc":
            life.append(name, b"%s%04d" % (name.encode(), number) * 9)
    life.commit()
    life.storage.checkpoint_soon()
    for _ in range(200):
        life.append("b", b"more")
        life.commit()
        life.check_state()
        life.worker.step()
    bench.restart()


def test_a_stream_that_is_always_ahead_is_saved_from_the_log(bench: Bench) -> None:
    """The event loop never has its state as of what is durable, because the next batch is always under way."""
    life = bench.life
    life.create("busy")
    life.append("busy", b"0", producer=ProducerHeaders("p", 0, 0))
    life.commit()
    bench.save()
    for number in range(1, 60):
        life.append("busy", b"%d" % number, producer=ProducerHeaders("p", 0, number))
    life.storage.checkpoint_soon()
    for _ in range(40):
        # One record more is always pending.
        life.commit(1)
        life.worker.step()
    assert life.queue
    assert life.image_of(life.catalog.by_name["busy"].id) is None
    assert life.storage.usage().memory_bytes < 3000
    life.queue.clear()
    recovered = bench.restart()
    state = recovered.catalog.by_name["busy"].producers
    assert state is not None
    assert state["p"].seq == recovered.catalog.by_name["busy"].message_index - 1


def test_a_stream_removed_before_it_was_frozen(bench: Bench) -> None:
    """The checkpoint began when it was there, so it saves it; its end is in the log after that."""
    life = bench.life
    for number in range(6):
        life.create(f"s{number}", b"x" * 50)
    life.commit()
    life.storage.checkpoint_soon()
    bench.maintain(2)
    for number in range(6):
        life.delete(f"s{number}")
        life.commit()
    bench.finish()
    bench.restart()
    bench.save()
    bench.restart()
    assert not bench.life.catalog.by_id


def test_a_rewrite_spares_removed_streams_that_the_manifest_knows(bench: Bench) -> None:
    life = bench.life
    life.create("gone", b"g" * 100)
    life.create("kept", b"k" * 30)
    life.commit()
    bench.save()
    life.delete("gone")
    life.commit()
    life.rest()
    bench.restart()
    bench.save()
    life = bench.life
    life.rest()
    assert life.storage.parts()["dead_bytes"] == 0
    bench.restart()


@pytest.mark.parametrize("freeze_first", [True, False])
def test_a_stream_deleted_while_a_checkpoint_is_made_stays_deleted(bench: Bench, freeze_first: bool) -> None:
    """It lives on for its fork, so it is not removed but marked, and that must not get lost between checkpoints."""
    life = bench.life
    life.create("source", b"s" * 30)
    life.commit()
    stream = life.catalog.by_name["source"]
    life.fork("fork", "source", stream.message_index, stream.byte_position)
    life.append("source", b"more")
    life.commit()
    life.storage.checkpoint_soon()
    if freeze_first:
        bench.maintain(3)
    else:
        bench.maintain(1)
    life.delete("source")
    life.commit()
    bench.finish()
    assert bench.restart().catalog.by_name["source"].deleted
    bench.save()
    assert bench.restart().catalog.by_name["source"].deleted
    bench.life.delete("fork")
    bench.life.commit()
    assert not bench.life.model.streams
    bench.restart()


def test_what_a_deletion_takes_with_it_is_replayed_as_it_was(bench: Bench) -> None:
    check_order_of_ends(bench)


def check_order_of_ends(bench: Bench) -> None:
    """While a checkpoint is made: a fork goes, another comes, then the source goes but lives on for the second.

    Were the source saved as deleted, replaying the end of the first fork would take it along before the second comes.
    """
    life = bench.life
    life.create("source", b"s" * 30)
    life.commit()
    stream = life.catalog.by_name["source"]
    life.fork("first", "source", stream.message_index, stream.byte_position)
    life.commit()
    bench.save()
    life.append("source", b"more")
    life.commit()
    life.storage.checkpoint_soon()
    life.delete("first")
    life.fork("second", "source", stream.message_index, stream.byte_position)
    life.delete("source")
    bench.maintain(1)
    life.commit(2)
    # Its end is still pending, which kept it from being frozen so far.
    life.commit()
    bench.finish()
    recovered = bench.restart()
    assert set(recovered.catalog.by_name) == {"source", "second"}
    assert recovered.catalog.by_name["source"].deleted
    assert recovered.catalog.by_name["source"].children == 1


def test_a_busy_stream_that_was_deleted_before_is_told_deleted_by_the_log(bench: Bench) -> None:
    """Its end came while an earlier checkpoint was made, and is in neither of its images."""
    life = bench.life
    life.create("source", b"s" * 30)
    life.commit()
    stream = life.catalog.by_name["source"]
    life.fork("fork", "source", stream.message_index, stream.byte_position)
    life.commit()
    life.storage.checkpoint_soon()
    life.touch("source")
    bench.maintain(1)
    life.commit()
    life.delete("source")
    life.commit()
    bench.finish()
    life.storage.checkpoint_soon()
    life.touch("fork")
    life.commit()
    life.delete("fork")
    bench.maintain(1)
    life.commit()
    bench.finish()
    assert not life.model.streams
    bench.restart()


def test_documents_are_saved_and_forgotten(bench: Bench) -> None:
    life = bench.life
    life.document("bucket/a", b"1")
    life.document("bucket/b", b"2")
    life.commit()
    bench.save()
    life.document("bucket/a", None)
    life.document("bucket/c", b"3")
    life.commit()
    bench.restart()
    bench.save()
    bench.life.document("bucket/b", b"22")
    bench.life.commit()
    bench.save()
    assert bench.restart().catalog.documents == {"bucket/b": b"22", "bucket/c": b"3"}


def test_packs_are_merged_so_that_extents_stay_few(bench: Bench) -> None:
    life = bench.life
    names = [f"s{number}" for number in range(5)]
    for name in names:
        life.create(name)
    life.commit()
    for round_ in range(30):
        for name in names:
            life.append(name, b"%s-%d;" % (name.encode(), round_))
        life.commit()
        bench.save()
    life.rest()
    life.check_state()
    # With a fan-out of 3, 30 rounds make at most 2 packs in each of 4 tiers.
    assert life.storage.parts()["packs"] <= 8
    for name in names:
        blob = life.storage._streams[life.catalog.by_name[name].id].extents
        assert len(blob) // 48 <= 8
    bench.restart()


def test_large_extents_are_merged_no_further() -> None:
    bench = Bench(ROOMY)
    life = bench.life
    life.create("large")
    life.create("small")
    life.commit()
    for _ in range(7):
        life.append("large", Random(1).randbytes(5000))
        life.append("small", b"tiny")
        life.commit()
        bench.save()
    life.rest()
    tiers = sorted(info.tier for info in packs_of(life.storage).pack_set.infos)
    assert tiers.count(255) == 7
    assert len(tiers) <= 10
    life.check_state()
    bench.restart()


def test_garbage_is_given_back_to_the_disk(bench: Bench) -> None:
    life = bench.life
    for number in range(10):
        life.create(f"s{number}", Random(number).randbytes(1000))
    life.commit()
    bench.save()
    full = sum(len(data) for name, data in bench.filesystem.snapshot().items() if name.endswith(".pack"))
    assert full > 10_000
    for number in range(9):
        life.delete(f"s{number}")
    life.commit()
    bench.save()
    life.rest()
    bench.save()
    life.rest()
    left = sum(len(data) for name, data in bench.filesystem.snapshot().items() if name.endswith(".pack"))
    assert left < 1500
    assert life.storage.usage().payload_bytes == 1000
    bench.restart()


def check_packs_are_counted_before_they_are_judged(bench: Bench) -> None:
    """A rewrite ends while streams are still being told of a checkpoint's packs: those are not dead."""
    life = bench.life
    for number in range(3):
        for name in "abcd":
            if number == 0:
                life.create(name)
            life.append(name, b"%04d" % number * 30)
        life.commit()
        life.storage.checkpoint_soon()
        for _ in range(300):
            life.maintain()
            if life.worker.urgent or life.worker.first:
                life.worker.step()
    assert life.worker.background, "three packs of a tier are to be merged"
    for number in range(100):
        life.create(f"more {number}", b"%04d" % number * 30)
    life.commit()
    packs = bench.files(".pack")
    life.storage.checkpoint_soon()
    for _ in range(300):
        if life.worker.urgent:
            break
        life.maintain()
    while life.worker.urgent:
        life.worker.step()
    assert len(bench.files(".pack")) > len(packs)
    bench.maintain(2)
    while life.worker.step():
        pass
    bench.finish()
    life.check_state()


def test_packs_are_counted_before_they_are_judged(bench: Bench) -> None:
    check_packs_are_counted_before_they_are_judged(bench)


def test_dead_packs_are_removed_unread() -> None:
    """However many there are, and though one is damaged."""
    bench = Bench(replace(ROOMY, fanout=10**6))
    for number in range(40):
        bench.life.create(f"s{number}", b"%04d" % number * 100)
        bench.life.commit()
        bench.save()
    packs = bench.files(".pack")
    assert len(packs) == 40
    disk = bench.filesystem.snapshot()
    damaged = bytearray(disk[packs[7]])
    damaged[50] ^= 1
    model = bench.life.model
    bench.filesystem.restore(disk | {packs[7]: bytes(damaged)})
    bench.life = Life(bench.filesystem, bench.random, settings=bench.settings, tick_s=ONE_STEP_PER_TEND_S)
    bench.life.begin_from(model)
    for number in range(40):
        bench.life.delete(f"s{number}")
    bench.life.commit()
    bench.filesystem.traces = True
    bench.save()
    assert bench.files(".pack") == []
    opened = [call for call in bench.filesystem.log if " map " in call and ".pack" in call]
    assert not opened


def test_a_damaged_pack_keeps_only_itself_from_being_merged(bench: Bench) -> None:
    """With a fan-out of three, the other packs are merged without it."""
    for number in range(2):
        bench.life.create(f"s{number}", b"%04d" % number * 100)
        bench.life.commit()
        bench.save()
    disk = bench.filesystem.snapshot()
    first = bench.files(".pack")[0]
    damaged = bytearray(disk[first])
    damaged[50] ^= 1
    model = bench.life.model
    bench.filesystem.restore(disk | {first: bytes(damaged)})
    bench.life = Life(bench.filesystem, bench.random, settings=bench.settings, tick_s=ONE_STEP_PER_TEND_S)
    bench.life.begin_from(model)
    for number in range(2, 5):
        bench.life.create(f"s{number}", b"%04d" % number * 100)
        bench.life.commit()
        bench.save()
        bench.life.clock.now_s += 100.0
        bench.finish()
    assert len(bench.files(".pack")) < 5
    assert first in bench.files(".pack")


def test_deleting_alone_gives_space_back() -> None:
    """Deletes bring nothing into memory, so the bytes that they condemn must drive a checkpoint themselves."""
    bench = Bench(StoreSettings(segment_bytes=4096, hot_tail_bytes=8000, reserve_bytes=0, big_bytes=2048, look_every=1))
    life = bench.life
    for number in range(8):
        life.create(f"s{number}", Random(number).randbytes(3000))
        life.commit()
        bench.finish()
    for number in range(8):
        life.delete(f"s{number}")
        life.commit()
        bench.finish()
    life.rest()
    assert life.storage.parts()["live_bytes"] <= 4000
    bench.restart()


def test_on_a_full_disk_deleting_gives_space_back() -> None:
    """Little is deleted, too little to make a checkpoint worth while, but it is what there is."""
    bench = Bench(StoreSettings(segment_bytes=4096, hot_tail_bytes=10**6, reserve_bytes=1000, look_every=1))
    life = bench.life
    for number in range(4):
        life.create(f"s{number}", Random(number).randbytes(3000))
    life.commit()
    bench.save()
    life.delete("s0")
    life.delete("s1")
    life.delete("s2")
    life.commit()
    bench.finish()
    assert life.storage.parts()["live_bytes"] == 12_000
    bench.filesystem.free = 10
    life.clock.now_s += 2
    assert life.storage.refusal() is not None
    bench.finish()
    life.rest()
    assert life.storage.parts()["live_bytes"] == 3000
    bench.restart()


def test_trimmed_bytes_leave_memory_at_once_and_the_disk_soon(bench: Bench) -> None:
    life = bench.life
    life.create("log")
    for number in range(40):
        life.append("log", b"%04d" % number * 100)
        life.commit()
        if number % 10 == 9 and number < 30:
            bench.save()
    life.retain("log", 35, 35 * 400)
    life.commit()
    assert life.storage.usage().payload_bytes == 5 * 400
    assert life.storage.usage().memory_bytes < 2500
    life.rest()
    assert not bench.files(".pack")
    life.check_state()
    bench.restart()
    bench.save()
    bench.life.check_state()
    bench.restart()


def test_the_manifest_is_written_anew_when_most_of_it_is_outdated() -> None:
    bench = Bench(
        StoreSettings(
            segment_bytes=10**6,
            hot_tail_bytes=10**9,
            reserve_bytes=0,
            segments_max=10**6,
            manifest_floor_bytes=1000,
            look_every=1,
        )
    )
    life = bench.life
    life.create("a")
    life.document("d", b"kept")
    life.commit()
    sizes = []
    for _ in range(40):
        life.touch("a")
        life.commit()
        bench.save()
        sizes.append(len(bench.filesystem.snapshot()["/data/MANIFEST"]))
    assert max(sizes) < 2500
    assert any(later < earlier for earlier, later in pairwise(sizes))
    bench.restart()
