"""Linking to very many streams: in slices, while everything else goes on, and all or nothing."""

from __future__ import annotations

import pytest

from headwater.core.errors import InternalError, StorageFull, SubscriptionExists
from headwater.core.offsets import Offset
from headwater.core.subscriptions import SavedLink
from headwater.engine.slices import STEPS_MAX
from headwater.engine.subscription import Link
from headwater.engine.subscriptions import Put
from tests.model.subscription_world import WAKE, World, pull

COUNT = 2 * STEPS_MAX + 10
LAST = f"events/{COUNT - 1:05}"


@pytest.fixture
def world() -> World:
    """A world with more streams than one tick links, each with one message."""
    made = World()
    made.create(WAKE)
    for number in range(COUNT):
        made.create(f"events/{number:05}", b"old")
    made.settle()
    return made


def test_a_subscription_to_many_streams_takes_several_ticks(world: World) -> None:
    answers = world.put("s", pull())
    assert "s" not in world.alive
    world.scheduler.tick()
    assert answers == []
    world.settle()
    assert isinstance(answers[0], Put)
    links = world.alive["s"].links
    assert len(links) == COUNT
    assert {link.acked for link in links.values()} == {Offset(1, 3)}
    assert world.wake_events() == []


def test_what_happens_meanwhile_is_neither_lost_nor_told_too_early(world: World) -> None:
    answers = world.put("s", pull())
    world.scheduler.tick()
    world.append("events/00000", b"after its link")
    world.append(LAST, b"before its link")
    world.create("events/new", b"linked where it begins")
    world.delete("events/00001")
    world.scheduler.tick()
    assert answers == []
    assert world.wake_events() == [], "nobody is woken for what is not there yet"
    world.settle()
    subscription = world.alive["s"]
    assert set(subscription.pending) == {"events/00000", "events/new"}
    assert subscription.links[LAST].acked == Offset(2, 18)
    assert "events/00001" not in subscription.links
    assert len(world.wake_events()) == 1


def test_a_crash_in_between_leaves_nothing(world: World) -> None:
    world.put("s", pull())
    world.crash(ticks=1, torn_after=5)
    assert world.alive == {}
    assert [key for key in world.engine.catalog.documents if key.startswith(("link/", "wake/"))] == []
    answers = world.put("s", pull())
    world.settle()
    assert answers[0].is_new


def test_who_asks_for_the_same_id_meanwhile_waits(world: World) -> None:
    first, second, other = world.put("s", pull()), world.put("s", pull()), world.put("s", pull("**"))
    assert second == other == []
    world.settle()
    assert first[0].is_new
    assert not second[0].is_new
    assert isinstance(other[0], SubscriptionExists)


def test_a_disk_that_fills_up_in_between_refuses_the_whole(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = world.put("s", pull())
    monkeypatch.setattr(world.storage, "refusal", lambda: "the disk is full")
    world.settle()
    assert isinstance(answers[0], StorageFull)
    assert world.alive == {}
    monkeypatch.undo()
    world.append("events/00000", b"x")
    world.settle()
    assert world.wake_events() == []
    stream = world.stream("events/00000")
    assert stream is not None
    assert stream.followers is None, "nothing follows for a subscription that is not"


def test_a_bug_while_linking_is_answered_and_frees_the_id(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, waiting = world.put("s", pull()), world.put("s", pull())

    working = Link.saved

    def broken_once(link: Link) -> SavedLink:
        monkeypatch.setattr(Link, "saved", working)
        raise RuntimeError("a bug")

    monkeypatch.setattr(Link, "saved", broken_once)
    world.settle()
    assert isinstance(answers[0], InternalError)
    assert waiting[0].is_new, "the next request for the id creates it"


def test_a_bug_while_creating_is_answered_and_frees_the_id(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr("headwater.engine.signing_keys.SigningKeys.secret", broken)
    assert isinstance(world.put("s", pull())[0], InternalError)
    monkeypatch.undo()
    answers = world.put("s", pull())
    world.settle()
    assert answers[0].is_new
