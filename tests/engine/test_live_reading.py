"""Live readers: they are woken for new data, not otherwise, and notified when the stream ends (T-19, T-21, T-26)."""

from __future__ import annotations

import itertools

import pytest

from headwater.engine import slices
from headwater.engine.commit_placement import CommitMode
from headwater.engine.publisher import AT_ONCE_MAX, STEP_FOLLOWERS
from headwater.engine.stream import LiveStream
from tests.engine.rig import Reader, Rig, status

MODES = pytest.mark.parametrize(
    ("disk", "commit"), [(False, "inline"), (True, "inline"), (True, "thread")], ids=["memory", "disk", "thread"]
)


@MODES
def test_an_append_wakes_a_reader_once(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    reader = rig.follow(rig.created("a"))
    rig.post("a", b"one")
    rig.scheduler.run_until_idle()
    assert (reader.data, reader.wakes) == (b"one", 1)


@MODES
def test_appends_of_one_batch_wake_a_reader_once(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    reader = rig.follow(rig.created("a"))
    for body in (b"1", b"2", b"3"):
        rig.post("a", body)
    rig.scheduler.run_until_idle()
    assert reader.data == b"123"
    assert reader.wakes == (1 if disk else 3)


@MODES
def test_close_wakes_readers_together_with_the_last_message(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    reader = rig.follow(rig.created("a"))
    rig.post("a", b"last", close=True)
    rig.scheduler.run_until_idle()
    assert (reader.data, reader.closed) == (b"last", True)


def test_readers_are_not_woken_before_data_is_durable() -> None:
    rig = Rig(commit="thread")
    reader = rig.follow(rig.created("a"))
    rig.post("a", b"one")
    assert reader.wakes == 0
    rig.scheduler.tick()
    assert reader.wakes == 0
    rig.scheduler.work()
    assert reader.wakes == 0, "the record is on disk, but the loop has not been notified"
    rig.scheduler.report()
    assert (reader.data, reader.wakes) == (b"one", 1)


def many_readers(rig: Rig, stream: LiveStream, count: int) -> list[Reader]:
    return [rig.follow(stream) for _ in range(count)]


@MODES
def test_many_readers_are_woken_in_slices(disk: bool, commit: CommitMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waking a reader may take 80 microseconds, so 10,000 of them would block the loop for most of a second."""
    monkeypatch.setattr(slices, "STEPS_MAX", 50 // STEP_FOLLOWERS)
    rig = Rig(disk=disk, commit=commit)
    readers = many_readers(rig, rig.created("a"), 3 * AT_ONCE_MAX)
    rig.post("a", b"one")
    woken = [0]
    while woken[-1] < len(readers):
        rig.scheduler.tick()
        rig.scheduler.work()
        rig.scheduler.report()
        woken.append(sum(reader.wakes for reader in readers))
    assert max(after - before for before, after in itertools.pairwise(woken)) <= 50
    rig.scheduler.run_until_idle()
    assert {(reader.data, reader.wakes) for reader in readers} == {(b"one", 1)}


def test_append_while_many_readers_are_woken_reaches_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STEPS_MAX", 50)
    rig = Rig(disk=False)
    readers = many_readers(rig, rig.created("a"), 3 * AT_ONCE_MAX)
    rig.post("a", b"one")
    rig.scheduler.tick()
    rig.post("a", b"two")
    rig.engine.unfollow(readers[-1].stream, readers[-1])
    rig.scheduler.run_until_idle()
    assert {reader.data for reader in readers[:-1]} == {b"onetwo"}
    assert readers[-1].wakes == 0, "it has left"


def test_end_of_a_stream_reaches_many_readers_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "STEPS_MAX", 50)
    rig = Rig(disk=False)
    readers = many_readers(rig, rig.created("a"), 3 * AT_ONCE_MAX)
    rig.delete("a")
    rig.scheduler.tick()
    assert 0 < sum(reader.refusal is not None for reader in readers) <= 100
    rig.scheduler.run_until_idle()
    assert all(reader.refusal is not None for reader in readers)


STEPS = ("post", "tick", "work", "report", "post", "tick", "work", "report")


@pytest.mark.parametrize("commit", ["inline", "thread"])
@pytest.mark.parametrize("when", range(len(STEPS) + 1))
def test_no_wake_up_is_missed_whenever_a_reader_joins(commit: CommitMode, when: int) -> None:
    rig = Rig(commit=commit)
    stream = rig.created("a")
    reader = None
    for at, step in enumerate((*STEPS, "end")):
        if at == when:
            reader = rig.follow(stream, from_start=True)
        if step == "post":
            rig.post("a", b"x")
        elif step != "end":
            getattr(rig.scheduler, step)()
        if reader is not None:
            assert len(reader.data) == stream.durable_index, "the reader was not woken for this data"
    rig.scheduler.run_until_idle()
    assert reader is not None
    assert reader.data == b"xx"


@pytest.mark.parametrize(
    "order", sorted(set(itertools.permutations(["post", "post", "tick", "work", "report", "follow"])))
)
def test_no_interleaving_of_writers_readers_and_the_disk_loses_anything(order: tuple[str, ...]) -> None:
    rig = Rig(commit="thread")
    stream = rig.created("a")
    readers = []
    for step in order:
        if step == "post":
            rig.post("a", b"x")
        elif step == "follow":
            readers.append(rig.follow(stream))
            readers.append(rig.follow(stream, from_start=True))
        else:
            getattr(rig.scheduler, step)()
    rig.scheduler.run_until_idle()
    assert readers[1].data == b"xx"
    assert b"xx".endswith(readers[0].data)
    assert all(reader.at.message_index == 2 for reader in readers)


@MODES
def test_readers_of_other_streams_are_not_woken(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    rig.created("a")
    other = rig.follow(rig.created("b"))
    rig.post("a", b"x")
    rig.delete("a")
    rig.scheduler.run_until_idle()
    assert (other.wakes, other.refusal) == (0, None)


@MODES
def test_source_appends_neither_reach_nor_wake_readers_of_a_fork(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    rig.created("a", b"shared")
    fork = rig.follow(rig.created("b", source="a"), from_start=True)
    rig.post("a", b"later", close=True)
    rig.scheduler.run_until_idle()
    assert (fork.data, fork.wakes, fork.closed) == (b"shared", 0, False)


@MODES
def test_fork_appends_neither_reach_nor_wake_readers_of_the_source(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    source = rig.follow(rig.created("a", b"shared"))
    rig.created("b", b"own", source="a")
    rig.post("b", b"more")
    rig.scheduler.run_until_idle()
    assert (source.data, source.wakes) == (b"", 0)


@MODES
def test_deleting_the_source_leaves_readers_of_the_fork_reading(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    source = rig.follow(rig.created("a", b"shared"))
    fork = rig.follow(rig.created("b", source="a"), from_start=True)
    rig.delete("a")
    rig.scheduler.run_until_idle()
    rig.post("b", b"+")
    rig.scheduler.run_until_idle()
    assert source.refusal is not None
    assert (fork.data, fork.refusal) == (b"shared+", None)


@MODES
def test_deletion_ends_every_reader_once(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    stream = rig.created("a")
    readers = [rig.follow(stream) for _ in range(3)]
    rig.delete("a")
    rig.scheduler.run_until_idle()
    assert [reader.refusal.status for reader in readers if reader.refusal is not None] == [404] * 3
    assert [reader.wakes for reader in readers] == [0] * 3
    assert stream.followers is None


def test_readers_continue_until_the_deletion_is_durable() -> None:
    rig = Rig(commit="thread")
    reader = rig.follow(rig.created("a"))
    rig.delete("a")
    for step in (rig.scheduler.tick, rig.scheduler.work):
        step()
        assert reader.refusal is None
    rig.scheduler.report()
    assert reader.refusal is not None


@MODES
def test_absolute_expiry_ends_readers_without_a_request(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    reader = rig.follow(rig.created("a", b"", expires_at_ms=1_800_000_002_000))
    ends = []
    for wait_ms in (1999, 1001):
        rig.scheduler.advance(wait_ms)
        rig.scheduler.run_until_idle()
        ends.append(reader.refusal.status if reader.refusal is not None else None)
    assert ends == [None, 404]


@MODES
def test_reader_of_a_deleted_stream_is_not_woken_by_its_successor(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    reader = rig.follow(rig.created("a", b"old"))
    rig.delete("a")
    rig.put("a", b"new")
    rig.post("a", b"newer")
    rig.scheduler.run_until_idle()
    assert (reader.data, reader.wakes) == (b"", 0)
    assert rig.read("a") == b"newnewer"


def test_readers_that_leave_while_others_are_woken_are_not_woken() -> None:
    rig = Rig()
    stream = rig.created("a")
    last = rig.follow(stream)
    first = rig.follow(stream)
    first.wake = lambda: rig.engine.unfollow(stream, first)  # type: ignore[method-assign]
    rig.post("a", b"x")
    rig.scheduler.run_until_idle()
    assert last.data == b"x"
    assert list(stream.followers or ()) == [last]


def test_shared_frame_is_freed_with_the_last_reader() -> None:
    rig = Rig()
    stream = rig.created("a")
    reader = rig.follow(stream)
    stream.frame = object()
    rig.engine.unfollow(stream, reader)
    rig.engine.unfollow(stream, reader)
    assert (stream.followers, stream.frame) == (None, None)


@MODES
def test_refused_or_duplicate_append_does_not_wake_readers(disk: bool, commit: CommitMode) -> None:
    rig = Rig(disk=disk, commit=commit)
    stream = rig.created("a")
    rig.post("a", b"x", ("p", 0, 0))
    rig.scheduler.run_until_idle()
    reader = rig.follow(stream)
    assert status(rig.post("a", b"x", ("p", 0, 0))) is None
    assert status(rig.post("a", b"x", ("p", 0, 7))) == 409
    rig.scheduler.run_until_idle()
    assert (reader.data, reader.wakes) == (b"", 0)
