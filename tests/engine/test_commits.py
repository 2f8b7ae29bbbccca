"""Commits: a request is answered when everything it depends on is durable, and no write is accepted after a failure."""

from __future__ import annotations

import pytest

from headwater.core.errors import StorageBusy, StreamNotFound
from headwater.core.rules import AppendOutcome
from headwater.engine.commit_placement import CommitMode
from headwater.engine.quota import EngineLimits, stream_bytes
from headwater.engine.results import Created, Deleted
from tests.engine.rig import TEXT, Rig, appended, status

BOTH = pytest.mark.parametrize("commit", ["inline", "thread"])


def test_append_is_answered_at_once_in_memory_mode() -> None:
    rig = Rig(disk=False)
    assert isinstance(rig.put("a")[0], Created)
    assert appended(rig.post("a")).outcome is AppendOutcome.ACCEPTED
    assert isinstance(rig.delete("a")[0], Deleted)


def test_appends_of_one_tick_are_one_batch() -> None:
    rig = Rig()
    rig.created("a")
    rig.created("b")
    answers = [rig.post("a"), rig.post("b"), rig.post("a"), rig.put("c"), rig.delete("b")]
    assert not any(answers)
    rig.scheduler.tick()
    assert all(answers)
    assert rig.storage.batches[-1] == 5


def test_next_batch_is_collected_while_the_thread_writes() -> None:
    rig = Rig(commit="thread")
    rig.created("a")
    first = rig.post("a")
    rig.scheduler.tick()
    rest = [rig.post("a"), rig.post("a"), rig.put("b")]
    rig.scheduler.tick()
    rig.scheduler.work()
    rig.scheduler.report()
    assert first
    assert not any(rest)
    rig.scheduler.work()
    rig.scheduler.report()
    assert all(rest)
    assert rig.storage.batches[-2:] == [1, 3]


@BOTH
def test_nothing_is_answered_before_it_is_durable(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    answers = [rig.put("a", b"x"), rig.post("a", b"y"), rig.post("a", b"z", close=True)]
    assert not any(answers)
    with pytest.raises(StreamNotFound):
        rig.engine.look_up("a")
    rig.scheduler.run_until_idle()
    assert all(answers)
    assert rig.read("a") == b"xyz"


@BOTH
def test_duplicate_of_a_pending_append_is_answered_after_the_original(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    rig.created("a")
    original = rig.post("a", b"x", ("p", 0, 0))
    if commit == "thread":
        rig.scheduler.tick()
    repeat = rig.post("a", b"x", ("p", 0, 0))
    assert (original, repeat) == ([], [])
    rig.scheduler.run_until_idle()
    assert appended(original).outcome is AppendOutcome.ACCEPTED
    assert appended(repeat).outcome is AppendOutcome.DUPLICATE
    assert rig.read("a") == b"x"


@BOTH
def test_conflict_with_a_pending_record_is_answered_when_that_is_durable(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    rig.created("a")
    rig.post("a", b"", close=True)
    late = rig.post("a", b"late")
    again = rig.put("a")
    assert (late, again) == ([], [])
    rig.scheduler.run_until_idle()
    assert (status(late), status(again)) == (409, 409)


@BOTH
def test_answer_that_depends_only_on_durable_data_is_immediate(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    rig.created("a")
    rig.created("b")
    rig.post("b")
    assert rig.put("a"), "pending records of another stream do not delay the answer"


def test_writers_see_pending_records() -> None:
    rig = Rig()
    rig.put("a", b"x")
    second, third = rig.post("a", b"y", ("p", 0, 0)), rig.post("a", b"z", ("p", 0, 1))
    rig.scheduler.run_until_idle()
    assert (appended(second).tail_index, appended(third).tail_index) == (2, 3)


def test_a_name_is_free_for_writers_at_once_and_for_readers_when_durable() -> None:
    rig = Rig(commit="thread")
    rig.created("a", b"old")
    gone, made = rig.delete("a"), rig.put("a", b"new")
    rig.scheduler.tick()
    assert rig.engine.look_up("a").durable_position == 3
    rig.scheduler.run_until_idle()
    assert gone
    assert made
    assert rig.read("a") == b"new"


# -- a failed write


@BOTH
def test_failed_write_refuses_its_batch_and_all_queued_ones(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    rig.created("a", b"kept")
    rig.storage.fails_in = 0
    failed = [rig.post("a"), rig.put("b"), rig.post("a", b"x", ("p", 0, 0))]
    rig.scheduler.tick()
    queued = [rig.post("a"), rig.post("a", b"x", ("p", 0, 0)), rig.delete("a")] if commit == "thread" else []
    rig.scheduler.run_until_idle()
    assert [status(answers) for answers in failed + queued] == [503] * len(failed + queued)
    assert rig.engine.idle
    assert rig.engine.failure is not None


@BOTH
def test_after_a_failed_write_appends_are_refused_and_reads_still_work(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    stream = rig.created("a", b"kept")
    reader = rig.follow(stream, from_start=True)
    rig.storage.fails_in = 0
    rig.post("a", b"lost")
    rig.scheduler.run_until_idle()
    refused = [rig.post("a"), rig.put("new"), rig.delete("a"), rig.post("a", b"", close=True)]
    rig.scheduler.run_until_idle()
    assert [status(answers) for answers in refused] == [503] * 4
    assert rig.read("a") == reader.data == b"kept"
    assert (reader.wakes, reader.refusal) == (0, None)
    with pytest.raises(StreamNotFound):
        rig.engine.look_up("new")


@BOTH
def test_a_failed_write_is_never_tried_again(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    rig.created("a")
    rig.storage.fails_in = 0
    rig.post("a")
    rig.scheduler.run_until_idle()
    rig.storage.fails_in = None
    later = rig.post("a")
    rig.scheduler.run_until_idle()
    assert status(later) == 503
    assert rig.storage.failures == 1


@BOTH
@pytest.mark.parametrize("batch", range(6))
def test_answered_appends_survive_a_failed_write(commit: CommitMode, batch: int) -> None:
    rig = Rig(commit=commit)
    rig.storage.fails_in = batch
    answers = [rig.put("a")]
    for number in range(6):
        rig.scheduler.run_until_idle()
        answers.append(rig.post("a", b"%d" % number))
    rig.scheduler.run_until_idle()
    promised = sum(1 for answer in answers if status(answer) is None)
    assert promised == batch
    if batch:
        assert rig.read("a") == b"0123456789"[: batch - 1]


@BOTH
def test_duplicate_of_a_failed_append_is_refused(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    rig.created("a")
    rig.storage.fails_in = 0
    rig.post("a", b"x", ("p", 0, 0))
    rig.scheduler.run_until_idle()
    repeat = rig.post("a", b"x", ("p", 0, 0))
    rig.scheduler.run_until_idle()
    assert status(repeat) == 503, "it is unknown whether the original was stored"


# -- limits


@pytest.mark.parametrize("disk", [False, True])
def test_append_beyond_the_stream_limit_is_refused_and_counts_nothing(disk: bool) -> None:
    rig = Rig(disk=disk, limits=EngineLimits(max_stream_bytes=5))
    rig.created("a", b"123")
    assert status(rig.post("a", b"456")) == 413
    rig.post("a", b"45")
    rig.scheduler.run_until_idle()
    assert rig.read("a") == b"12345"
    assert rig.engine.total_bytes == 5


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("ending", ["delete", "expire"])
def test_total_limit_holds_and_deletion_frees_its_share(disk: bool, ending: str) -> None:
    rig = Rig(disk=disk, limits=EngineLimits(max_total_bytes=5 + 2 * stream_bytes("a", TEXT)))
    rig.created("a", b"1234", ttl_secs=1)
    assert status(rig.put("b", b"56")) == 413
    if ending == "delete":
        rig.delete("a")
    else:
        rig.scheduler.advance(2001)
    rig.scheduler.run_until_idle()
    assert rig.engine.total_bytes == 0
    assert rig.created("b", b"56").byte_position == 2


def test_fork_counts_only_its_own_data() -> None:
    rig = Rig(limits=EngineLimits(max_stream_bytes=5, max_total_bytes=9 + 2 * stream_bytes("a", TEXT)))
    rig.created("a", b"1234")
    rig.created("b", b"5", source="a")
    assert rig.engine.total_bytes == 5
    rig.post("b", b"6789")
    rig.scheduler.run_until_idle()
    assert rig.read("b") == b"123456789"
    assert status(rig.post("b", b"x")) == 413


def test_writes_are_refused_with_retry_after_while_storage_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.created("a")
    monkeypatch.setattr(rig.storage, "busy", lambda: "Data arrives faster than the disk can save it.")
    [refusal] = rig.post("a")
    assert isinstance(refusal, StorageBusy)
    assert (refusal.status, refusal.headers) == (503, (("Retry-After", "1"),))
    assert rig.engine.failure is None, "the server stays ready"
    monkeypatch.undo()
    answers = rig.post("a")
    rig.scheduler.tick()
    assert appended(answers).outcome is AppendOutcome.ACCEPTED
