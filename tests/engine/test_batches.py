"""Commit batches: each entry is completed separately, so a failing callback does not prevent other answers."""

from __future__ import annotations

import pytest

from headwater.core.errors import Refusal
from headwater.engine.commit_placement import CommitMode
from headwater.engine.results import Appended, Created
from headwater.engine.stream import LiveStream
from tests.engine.rig import TEXT, Rig

CALLBACKS_MAY_FAIL = True
BOTH = pytest.mark.parametrize("commit", ["inline", "thread"])


def broken_callback(_: object) -> None:
    raise RuntimeError("this callback is broken")


def broken_hook(_: LiveStream) -> None:
    raise RuntimeError("this hook is broken")


class BrokenFollower:
    def wake(self) -> None:
        raise RuntimeError("this follower is broken")

    def gone(self, refusal: Refusal) -> None:
        raise RuntimeError("this follower is broken")


@BOTH
def test_broken_callback_does_not_keep_others_from_their_answers(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    reader = rig.follow(rig.created("followed"))
    rig.created("a")
    before = rig.post("a")
    rig.engine.append("a", TEXT, b"x", None, None, False, broken_callback)
    after, published = rig.post("a"), rig.post("followed", b"news")
    rig.scheduler.run_until_idle()
    assert [type(answer) for answers in (before, after, published) for answer in answers] == [Appended] * 3
    assert reader.data == b"news"
    assert rig.read("a") == b"xxx"
    assert rig.engine.idle


def test_appends_received_while_a_batch_with_a_broken_callback_is_written_are_committed() -> None:
    rig = Rig(commit="thread")
    rig.created("a")
    rig.engine.append("a", TEXT, b"x", None, None, False, broken_callback)
    rig.scheduler.tick()
    queued = rig.post("a")
    rig.scheduler.run_until_idle()
    assert [type(answer) for answer in queued] == [Appended]


@BOTH
def test_broken_callback_does_not_keep_others_from_their_refusals(commit: CommitMode) -> None:
    rig = Rig(commit=commit)
    rig.created("a")
    rig.storage.fails_in = 0
    rig.engine.append("a", TEXT, b"x", None, None, False, broken_callback)
    after = rig.post("a")
    rig.scheduler.run_until_idle()
    assert isinstance(after[0], Refusal)
    assert rig.engine.idle


@BOTH
@pytest.mark.parametrize("hook", ["on_created", "on_deleted", "retention", "snapshots", "buckets"])
def test_broken_hook_does_not_break_a_batch(commit: CommitMode, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(commit=commit)
    reader = rig.follow(rig.created("followed"))
    rig.created("deleted")
    seen: list[str] = []
    if hook.startswith("on_"):
        getattr(rig.engine.publisher, hook).append(broken_hook)
    else:
        broken = {"retention": "created", "snapshots": "inherited", "buckets": "stream_created"}[hook]
        monkeypatch.setattr(getattr(rig.engine, hook), broken, broken_hook)
    rig.engine.publisher.on_created.append(lambda stream: seen.append(stream.name))
    rig.engine.publisher.on_deleted.append(lambda stream: seen.append(stream.name))
    gone, made, published = rig.delete("deleted"), rig.put("made"), rig.post("followed", b"news")
    rig.scheduler.run_until_idle()
    assert gone
    assert isinstance(made[0], Created)
    assert isinstance(published[0], Appended)
    assert reader.data == b"news"
    assert seen == ["deleted", "made"]


def test_broken_followers_do_not_keep_others_from_the_end_of_a_stream() -> None:
    rig = Rig()
    stream = rig.created("a")
    rig.engine.follow(stream, BrokenFollower())
    reader = rig.follow(stream)
    other = rig.follow(rig.created("b"))
    rig.delete("a")
    rig.post("b", b"news")
    rig.scheduler.run_until_idle()
    assert reader.refusal is not None
    assert other.data == b"news"


def test_without_a_disk_a_broken_callback_does_not_keep_followers_from_an_append() -> None:
    rig = Rig(disk=False)
    reader = rig.follow(rig.created("a"))
    with pytest.raises(RuntimeError, match="this callback is broken"):
        rig.engine.append("a", TEXT, b"news", None, None, False, broken_callback)
    assert reader.data == b"news"
