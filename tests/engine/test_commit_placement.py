"""Where a batch is committed: on the event loop or on the thread, by its size and by how slow recent writes were."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headwater.core.errors import PayloadTooLarge
from headwater.core.records import Append, Document
from headwater.engine import quota
from headwater.engine.commit_placement import (
    INLINE_MAX_S,
    LONG_STALL_HOLD_S,
    LONG_STALL_S,
    PROBE_EVERY_S,
    PROBE_MAX_BYTES,
    SMALL_BATCH_BYTES,
    STALL_HOLD_MIN_S,
    STALLED_WRITE_S,
    CommitMode,
)
from headwater.engine.committer import RECORD_OVERHEAD_BYTES, CommitEntry, Committer, record_bytes
from headwater.engine.metrics import Metrics
from headwater.engine.results import Created
from headwater.storage.interface import Committed
from tests.engine.rig import Rig, status
from tests.engine.seams import JournalStorage, ManualClock, ManualScheduler

FAST_S = 0.0001


class TimedStorage(JournalStorage):
    """A store whose writes take a time that the test sets."""

    def __init__(self) -> None:
        super().__init__([])
        self.now_s = 0.0
        self.write_s = FAST_S
        self.begins_segment = False
        self.sizes: list[int] = []

    def takes_long(self) -> bool:
        return self.begins_segment

    def write(self, batch: Sequence[Committed]) -> None:
        self.now_s += self.write_s
        self.sizes.append(len(batch))

    def publish(self, batch: Sequence[Committed]) -> None:
        """There are no readers."""


class Bench:
    def __init__(self, mode: CommitMode = "auto", max_batch_bytes: int = 1 << 30) -> None:
        self.storage = TimedStorage()
        self.scheduler = ManualScheduler(ManualClock())
        self.scheduler.timer_s = lambda: self.storage.now_s  # type: ignore[method-assign]
        self.answers: list[object] = []
        self.committer = Committer(
            self.storage,
            self.scheduler,
            Metrics(),
            lambda *_: None,
            lambda *_: None,
            mode,
            max_batch_bytes=max_batch_bytes,
        )

    def submit(self, size_bytes: int, answer: object = None) -> None:
        record = Document("key", b"x" * (size_bytes - RECORD_OVERHEAD_BYTES))
        self.committer.submit(CommitEntry(None, record, (), self.answers.append, answer), record_bytes(record))

    def runs_inline(self, size_bytes: int = 1000) -> bool:
        """Whether a batch of this size is written within the tick."""
        written = len(self.storage.sizes)
        self.submit(size_bytes)
        self.scheduler.tick()
        inline = len(self.storage.sizes) > written
        self.scheduler.run_until_idle()
        assert len(self.storage.sizes) == written + 1
        return inline


def test_small_batches_on_a_fast_disk_are_written_inline() -> None:
    bench = Bench()
    assert all(bench.runs_inline() for _ in range(100))


@pytest.mark.parametrize("size", [PROBE_MAX_BYTES + 1, 8 * PROBE_MAX_BYTES])
def test_large_batch_goes_to_the_thread_and_the_next_small_one_does_not(size: int) -> None:
    bench = Bench()
    for _ in range(3):
        bench.storage.write_s = 0.1
        assert not bench.runs_inline(size)
        bench.storage.write_s = FAST_S
        assert bench.runs_inline()


def test_large_batches_are_written_inline_while_the_disk_writes_them_in_a_short_time() -> None:
    bench = Bench()
    size = 8 * SMALL_BATCH_BYTES
    bench.storage.write_s = INLINE_MAX_S / 2
    assert [bench.runs_inline(size) for _ in range(20)][-1] is True
    bench.storage.write_s = 10 * INLINE_MAX_S
    assert [bench.runs_inline(size) for _ in range(5)][-1] is False
    bench.storage.write_s = FAST_S
    assert bench.runs_inline(), "small ones are short"


def test_batch_that_begins_a_segment_goes_to_the_thread_and_the_next_one_does_not() -> None:
    bench = Bench()
    for _ in range(3):
        bench.storage.begins_segment, bench.storage.write_s = True, 2 * STALLED_WRITE_S
        assert not bench.runs_inline(), "it waits for two syncs"
        bench.storage.begins_segment, bench.storage.write_s = False, FAST_S
        assert bench.runs_inline(), "two syncs do not indicate a slow disk"


def test_batch_that_begins_a_segment_is_written_inline_where_a_setting_says_so() -> None:
    bench = Bench("inline")
    bench.storage.begins_segment = True
    assert bench.runs_inline()


def test_many_small_records_are_one_large_batch() -> None:
    bench = Bench()
    for _ in range(3000):
        bench.submit(1000)
    bench.scheduler.tick()
    assert bench.storage.sizes == []
    bench.scheduler.run_until_idle()
    assert bench.storage.sizes == [3000]


def test_one_stalled_write_keeps_commits_on_the_thread_for_a_while() -> None:
    bench = Bench()
    assert all(bench.runs_inline() for _ in range(1000)), "a long fast past does not outweigh it"
    bench.storage.write_s = 2 * STALLED_WRITE_S
    assert bench.runs_inline(), "the first one cannot be predicted"
    bench.storage.write_s = FAST_S
    ends_s = bench.storage.now_s + STALL_HOLD_MIN_S
    while bench.storage.now_s < ends_s - 0.2:
        assert not bench.runs_inline()
        bench.storage.now_s += 0.1
    bench.storage.now_s = ends_s
    assert bench.runs_inline()


def test_long_stall_keeps_commits_on_the_thread_for_ten_seconds() -> None:
    bench = Bench()
    bench.storage.write_s = LONG_STALL_S
    assert bench.runs_inline()
    began_s = bench.storage.now_s
    bench.storage.write_s = FAST_S
    while not bench.runs_inline():
        bench.storage.now_s += 0.1
    assert bench.storage.now_s - began_s >= LONG_STALL_HOLD_S


def test_slow_write_on_the_thread_extends_the_time() -> None:
    bench = Bench()
    bench.storage.write_s = 2 * STALLED_WRITE_S
    bench.runs_inline()
    for _ in range(3):
        bench.storage.now_s += STALL_HOLD_MIN_S - 0.1
        assert not bench.runs_inline()


def test_each_stall_soon_after_another_doubles_the_time_on_the_thread() -> None:
    bench = Bench()
    holds = []
    for _ in range(3):
        bench.storage.write_s = 2 * STALLED_WRITE_S
        assert bench.runs_inline()
        began_s = bench.storage.now_s
        bench.storage.write_s = FAST_S
        while not bench.runs_inline():
            bench.storage.now_s += 0.1
        holds.append(round(bench.storage.now_s - began_s))
    assert holds == [1, 2, 4]


def test_disk_that_is_steadily_slow_moves_commits_to_the_thread_and_a_fast_one_back() -> None:
    bench = Bench()
    bench.storage.write_s = 2 * INLINE_MAX_S
    placed = [bench.runs_inline() for _ in range(200)]
    seconds = 200 * bench.storage.write_s
    assert sum(placed[10:]) <= seconds / PROBE_EVERY_S + 1, "the loop is probed only occasionally"
    bench.storage.write_s = FAST_S
    assert [bench.runs_inline() for _ in range(100)][-1] is True


@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_records_beyond_the_batch_limit_are_committed_in_several_batches(mode: CommitMode) -> None:
    bench = Bench(mode, max_batch_bytes=10_000)
    for number in range(25):
        bench.submit(1000, number)
    bench.scheduler.run_until_idle()
    assert bench.storage.sizes == [10, 10, 5]
    assert bench.answers == list(range(25))
    assert bench.committer.idle


def test_record_larger_than_the_limit_is_a_batch_alone() -> None:
    bench = Bench(max_batch_bytes=10_000)
    for size in (1000, 50_000, 1000, 1000):
        bench.submit(size)
    bench.scheduler.run_until_idle()
    assert bench.storage.sizes == [1, 1, 2]


def test_message_lengths_count_towards_the_batch_size() -> None:
    bench = Bench(max_batch_bytes=10_000)
    for _ in range(2):
        record = Append(1, 1, 0, 0, b"0," * 1000, (2,) * 1000)
        bench.committer.submit(CommitEntry(None, record, (), None, None), record_bytes(record))
    bench.scheduler.run_until_idle()
    assert bench.storage.sizes == [1, 1]


def test_failed_write_refuses_every_batch_that_is_queued() -> None:
    rig = Rig(commit="thread")
    rig.engine._committer._max_batch_bytes = 10
    rig.created("a")
    rig.storage.fails_in = 0
    answers = [rig.post("a", b"x" * 10) for _ in range(5)]
    rig.scheduler.run_until_idle()
    assert [status(each) for each in answers] == [503] * 5
    assert rig.engine.idle
    assert rig.storage.failures == 1


@pytest.mark.parametrize("disk", [False, True])
def test_record_too_large_for_the_journal_is_refused_alone(disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(disk=disk)
    rig.created("a")
    monkeypatch.setattr(quota, "RECORD_MAX_BYTES", 1000)
    refused = [rig.post("a", b"x" * 1000), rig.put("b", b"x" * 1000)]
    with pytest.raises(PayloadTooLarge):
        rig.engine.put_document("key", b"x" * 1000, None, None)
    accepted = [rig.post("a", b"y"), rig.put("b")]
    rig.scheduler.run_until_idle()
    assert [status(each) for each in refused] == [413, 413]
    assert [status(each) for each in accepted] == [None, None]
    assert isinstance(accepted[1][0], Created)
    assert rig.read("a") == b"y"
    assert rig.engine.failure is None
