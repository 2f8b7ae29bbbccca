"""What happens at the limits of subscriptions: refusals while a client asks, and links that wait for room otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any

from headwater.core.errors import SubscriptionBusy, SubscriptionLimitReached, TooManyStreams
from headwater.core.subscriptions import SubscriptionLimits
from headwater.engine.subscriptions import Put, Subscriptions
from tests.model.subscription_world import WAKE, World, pull


def limited(**limits: int) -> World:
    make: Any = partial(Subscriptions, limits=SubscriptionLimits(**limits))
    world = World(make)
    world.create(WAKE)
    world.settle()
    return world


def put(world: World, id_: str, *arguments: Any) -> Any:
    answers = world.put(id_, pull(*arguments))
    world.settle()
    return answers[0]


def append_to(world: World, *names: str) -> None:
    for name in names:
        world.create(name, b"x")
    world.settle()


def test_requests_that_wait_for_one_id_are_limited() -> None:
    world = limited(max_waiting_requests=2)
    answers = [world.put("s", pull()) for _ in range(4)]
    assert [bool(answer) for answer in answers] == [False, False, False, True]
    assert isinstance(answers[3][0], SubscriptionBusy)
    assert answers[3][0].headers == (("Retry-After", "1"),)
    world.settle()
    assert [answer[0].is_new for answer in answers[:3]] == [True, False, False]


def test_subscriptions_that_are_being_created_count() -> None:
    world = limited(max_subscriptions=1)
    first, second = world.put("a", pull()), world.put("b", pull())
    world.settle()
    assert isinstance(first[0], Put)
    assert isinstance(second[0], SubscriptionLimitReached)
    assert not put(world, "a").is_new, "one that exists is confirmed"
    world.do(world.subscriptions.delete, "a")
    world.settle()
    assert put(world, "b").is_new


def test_a_pattern_that_matches_too_many_streams_creates_nothing() -> None:
    world = limited(max_links_per_subscription=2)
    append_to(world, "events/1", "events/2", "events/3")
    assert isinstance(put(world, "s"), TooManyStreams)
    assert world.alive == {}
    assert world.subscriptions._links._count == 0
    assert [key for key in world.engine.catalog.documents if key.startswith("link/")] == []


def test_streams_beyond_the_limit_are_linked_when_there_is_room_and_lose_nothing() -> None:
    world = limited(max_links_per_subscription=2)
    assert put(world, "s").is_new
    append_to(world, "events/1", "events/2", "events/3")
    subscription = world.alive["s"]
    assert set(subscription.links) == {"events/1", "events/2"}
    assert world.subscriptions.get("s").is_incomplete
    world.append("events/3", b"y")
    world.delete("events/1")
    world.settle()
    world.scheduler.advance(1_000)
    world.settle()
    assert set(subscription.pending) == {"events/2", "events/3"}
    assert subscription.links["events/3"].acked.message_index == 0, "from its beginning"
    assert not world.subscriptions.get("s").is_incomplete


def test_the_limit_of_all_links_holds_between_subscriptions() -> None:
    world = limited(max_links=3)
    append_to(world, "events/1", "events/2")
    assert put(world, "a").is_new
    assert isinstance(put(world, "b"), SubscriptionLimitReached)
    append_to(world, "events/3", "events/4")
    assert len(world.alive["a"].links) == 3
    assert world.subscriptions.get("a").is_incomplete
    assert isinstance(put(world, "c", None, ["x"]), SubscriptionLimitReached)
    refused = world.do(world.subscriptions.link, "a", ["x", "y"])
    assert isinstance(refused[0], SubscriptionLimitReached)
    world.do(world.subscriptions.delete, "a")
    world.settle()
    assert put(world, "c", None, ["x", "y"]).is_new


def test_links_beyond_the_limit_wait_after_a_restart_too() -> None:
    world = limited(max_links_per_subscription=2)
    assert put(world, "s").is_new
    append_to(world, "events/1", "events/2", "events/3")
    world.open()
    world.settle()
    assert len(world.alive["s"].links) == 2
    gone = next(iter(world.alive["s"].links))
    world.delete(gone)
    world.settle()
    world.scheduler.advance(1_000)
    world.settle()
    assert set(world.alive["s"].links) == {"events/1", "events/2", "events/3"} - {gone}


def test_cursors_that_are_saved_are_restored_beyond_a_limit_that_was_lowered() -> None:
    world = World()
    world.create(WAKE)
    append_to(world, "events/1", "events/2", "events/3")
    put(world, "s")
    world._make = partial(Subscriptions, limits=SubscriptionLimits(max_links=1, max_subscriptions=1))
    world.open()
    world.settle()
    assert {link.acked.message_index for link in world.alive["s"].links.values()} == {1}
    assert len(world.alive["s"].links) == 3


def test_the_segments_of_all_patterns_are_limited() -> None:
    world = limited(max_pattern_segments=5)
    assert put(world, "a", "events/a/*").is_new
    assert isinstance(put(world, "b", "events/b/*"), SubscriptionLimitReached)
    assert put(world, "c", "events/*").is_new
    world.do(world.subscriptions.delete, "a")
    world.settle()
    assert put(world, "b", "events/b/*").is_new
