"""Linking a subscription to very many streams: in slices between other work, and all or nothing."""

from __future__ import annotations

import pytest

from headwater.core.errors import InternalError, StorageFull
from headwater.core.offsets import Offset
from headwater.core.subscription_errors import SubscriptionAlreadyExists
from headwater.core.subscriptions import SavedLink
from headwater.engine.slices import STEPS_MAX
from headwater.engine.subscription import Link
from headwater.engine.subscriptions import Put
from tests.model.simulated_server import WAKE, SimulatedServer, pull

COUNT = 2 * STEPS_MAX + 10
LAST = f"events/{COUNT - 1:05}"


@pytest.fixture
def server() -> SimulatedServer:
    """A server with more streams than one tick links, each with one message."""
    made = SimulatedServer()
    made.create(WAKE)
    for number in range(COUNT):
        made.create(f"events/{number:05}", b"old")
    made.run_until_idle()
    return made


def test_a_subscription_to_many_streams_takes_several_ticks(server: SimulatedServer) -> None:
    answers = server.put("s", pull())
    assert "s" not in server.alive
    server.scheduler.tick()
    assert answers == []
    server.run_until_idle()
    assert isinstance(answers[0], Put)
    links = server.alive["s"].links
    assert len(links) == COUNT
    assert {link.acked for link in links.values()} == {Offset(1, 3)}
    assert server.wake_events() == []


def test_changes_during_a_snapshot_are_neither_lost_nor_published_too_early(server: SimulatedServer) -> None:
    answers = server.put("s", pull())
    server.scheduler.tick()
    server.append("events/00000", b"after its link")
    server.append(LAST, b"before its link")
    server.create("events/new", b"linked where it begins")
    server.delete("events/00001")
    server.scheduler.tick()
    assert answers == []
    assert server.wake_events() == [], "no wake before the subscription exists"
    server.run_until_idle()
    subscription = server.alive["s"]
    assert set(subscription.pending) == {"events/00000", "events/new"}
    assert subscription.links[LAST].acked == Offset(2, 18)
    assert "events/00001" not in subscription.links
    assert len(server.wake_events()) == 1


def test_crash_while_linking_leaves_nothing(server: SimulatedServer) -> None:
    server.put("s", pull())
    server.crash(ticks=1, torn_after=5)
    assert server.alive == {}
    assert [key for key in server.engine.catalog.documents if key.startswith(("link/", "wake/"))] == []
    answers = server.put("s", pull())
    server.run_until_idle()
    assert answers[0].is_new


def test_second_request_for_the_same_id_waits(server: SimulatedServer) -> None:
    first, second, other = server.put("s", pull()), server.put("s", pull()), server.put("s", pull("**"))
    assert second == other == []
    server.run_until_idle()
    assert first[0].is_new
    assert not second[0].is_new
    assert isinstance(other[0], SubscriptionAlreadyExists)


def test_full_disk_while_linking_refuses_the_subscription(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = server.put("s", pull())
    monkeypatch.setattr(server.storage, "refusal", lambda: "the disk is full")
    server.run_until_idle()
    assert isinstance(answers[0], StorageFull)
    assert server.alive == {}
    monkeypatch.undo()
    server.append("events/00000", b"x")
    server.run_until_idle()
    assert server.wake_events() == []
    stream = server.stream("events/00000")
    assert stream is not None
    assert stream.followers is None, "no follower stays for a refused subscription"


def test_a_bug_while_linking_is_answered_and_frees_the_id(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, waiting = server.put("s", pull()), server.put("s", pull())

    working = Link.saved

    def broken_once(link: Link) -> SavedLink:
        monkeypatch.setattr(Link, "saved", working)
        raise RuntimeError("a bug")

    monkeypatch.setattr(Link, "saved", broken_once)
    server.run_until_idle()
    assert isinstance(answers[0], InternalError)
    assert waiting[0].is_new, "the next request for the id creates it"


def test_a_bug_while_creating_is_answered_and_frees_the_id(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr("headwater.engine.signing_keys.SigningKeys.secret", broken)
    assert isinstance(server.put("s", pull())[0], InternalError)
    monkeypatch.undo()
    answers = server.put("s", pull())
    server.run_until_idle()
    assert answers[0].is_new
