"""What readers and writers see until a deletion is durable; a failing reader does not affect others."""

from __future__ import annotations

import pytest

from headwater.core.errors import Refusal
from headwater.core.records import Touch
from headwater.engine.commit_placement import CommitMode
from headwater.engine.quota import EngineLimits
from tests.engine.rig import Rig, status

BOTH = pytest.mark.parametrize("commit", ["inline", "thread"])


@BOTH
def test_a_stream_can_be_read_in_pieces_until_its_deletion_is_durable(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    stream = rig.created("a", b"one")
    rig.post("a", b"two")
    rig.scheduler.run_until_idle()
    rig.delete("a")
    assert rig.read("a", limit=3) == b"onetwo"
    chunk = rig.engine.reader.chunk(stream, rig.engine.reader.resolve(stream, "-1"), 100)
    assert rig.engine.reader.lengths(chunk) == [3, 3]


@BOTH
@pytest.mark.parametrize("has_fork", [False, True])
@pytest.mark.parametrize("use", ["read", "unfollow"])
def test_reading_extends_the_ttl_until_the_deletion_is_durable(use: str, has_fork: bool, commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    stream = rig.created("a", b"x", ttl_secs=2)
    if has_fork:
        rig.created("b", source="a", ttl_secs=60)
    reader = rig.follow(stream)
    rig.delete("a")
    if use == "unfollow":
        rig.clock.at_ms += 31_000
        rig.engine.unfollow(stream, reader)
    else:
        rig.engine.unfollow(stream, reader)
        rig.clock.at_ms += 1999
        assert rig.read("a") == b"x"
    rig.clock.at_ms += 1999
    assert rig.engine.look_up("a") is stream
    assert not any(type(entry.record) is Touch for entry in rig.engine._committer._queue)
    rig.clock.at_ms += 1
    assert seen_as(rig, "a") == 404
    rig.engine.touch(stream)
    assert seen_as(rig, "a") == 404, "a late use must not revive an expired stream"
    rig.scheduler.run_until_idle()
    assert seen_as(rig, "a") == (410 if has_fork else 404)


def test_a_fork_can_be_read_until_its_deletion_is_durable() -> None:
    rig = Rig()
    rig.created("a", b"shared")
    rig.created("b", b"own", source="a")
    rig.delete("a")
    rig.scheduler.run_until_idle()
    rig.delete("b")
    assert rig.read("b") == b"sharedown"


@pytest.mark.parametrize("disk", [False, True])
def test_failing_reader_does_not_affect_the_others(disk: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(disk=disk)
    stream = rig.created("a")
    failing, other = rig.follow(stream), rig.follow(stream)

    def fail() -> None:
        raise RuntimeError("this reader cannot be woken")

    failing.wake = fail  # type: ignore[method-assign]
    rig.post("a", b"x")
    rig.scheduler.run_until_idle()
    assert other.data == b"x"
    assert "a callback of the engine failed" in caplog.text
    caplog.clear()


def test_readers_see_a_source_until_its_deletion_is_durable() -> None:
    rig = Rig()
    rig.created("a", b"x")
    rig.created("b", source="a")
    rig.delete("a")
    assert rig.read("a") == b"x"


@BOTH
@pytest.mark.parametrize("expires", [False, True])
def test_source_stays_410_until_the_deletion_of_its_last_fork_is_durable(commit: CommitMode, expires: bool) -> None:
    """Otherwise a reader could get 404 and, after a crash that loses the fork's deletion, 410 again."""
    rig = Rig(commit=commit)
    rig.created("a", b"x")
    rig.created("b", source="a", ttl_secs=1 if expires else None)
    rig.created("c", source="b", ttl_secs=1 if expires else None)
    rig.delete("a")
    rig.delete("b")
    rig.scheduler.run_until_idle()
    if expires:
        rig.clock.at_ms += 1000
        rig.engine.expire_due()
    else:
        rig.delete("c")
    assert [seen_as(rig, name) for name in "ab"] == [410, 410]
    rig.put("d", b"y")
    rig.scheduler.run_until_idle()
    assert [seen_as(rig, name) for name in "abc"] == [404, 404, 404]
    assert rig.engine._view.is_empty


def seen_as(rig: Rig, name: str) -> int:
    with pytest.raises(Refusal) as caught:
        rig.engine.look_up(name)
    return caught.value.status


@pytest.mark.parametrize("forked", [False, True])
def test_deletion_is_answered_when_it_is_durable(forked: bool) -> None:
    rig = Rig()
    rig.created("a")
    if forked:
        rig.created("b", source="a")
    rig.delete("a")
    assert rig.post("a") == []


def test_after_a_failed_write_an_expired_stream_is_not_confirmed() -> None:
    rig = Rig()
    rig.created("a", ttl_secs=1)
    rig.created("b")
    rig.storage.fails_in = 0
    rig.post("b")
    rig.scheduler.run_until_idle()
    rig.clock.at_ms += 1000
    assert status(rig.put("a", ttl_secs=1)) == 503


def test_expired_source_with_forks_is_410_from_the_first_look_up() -> None:
    rig = Rig(disk=False, limits=EngineLimits())
    rig.created("a", ttl_secs=1)
    rig.created("b", source="a", ttl_secs=60)
    rig.clock.at_ms += 1000
    looks = []
    for _ in range(2):
        try:
            rig.engine.look_up("a")
        except Exception as refusal:
            looks.append(type(refusal).__name__)
    assert looks == ["StreamDeleted", "StreamDeleted"]


@pytest.mark.parametrize("disk", [False, True])
def test_reading_a_stream_wakes_no_reader(disk: bool) -> None:
    rig = Rig(disk=disk)
    stream = rig.created("a", ttl_secs=10)
    reader = rig.follow(stream)
    rig.clock.at_ms += 5000
    rig.engine.touch(stream)
    rig.scheduler.run_until_idle()
    assert reader.wakes == 0
