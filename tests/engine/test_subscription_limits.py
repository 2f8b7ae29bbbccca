"""Limits of subscriptions: requests beyond them are refused, and automatic links wait until there is room."""

from __future__ import annotations

from functools import partial
from typing import Any

from headwater.core.subscription_errors import SubscriptionBusy, SubscriptionLimitReached, TooManyStreams
from headwater.core.subscriptions import SubscriptionLimits
from headwater.engine.subscriptions import Put, Subscriptions
from tests.model.simulated_server import WAKE, SimulatedServer, pull


def limited(**limits: int) -> SimulatedServer:
    make: Any = partial(Subscriptions, limits=SubscriptionLimits(**limits))
    server = SimulatedServer(make)
    server.create(WAKE)
    server.run_until_idle()
    return server


def put(server: SimulatedServer, id_: str, *arguments: Any) -> Any:
    answers = server.put(id_, pull(*arguments))
    server.run_until_idle()
    return answers[0]


def append_to(server: SimulatedServer, *names: str) -> None:
    for name in names:
        server.create(name, b"x")
    server.run_until_idle()


def test_requests_that_wait_for_one_id_are_limited() -> None:
    server = limited(max_waiting_requests=2)
    answers = [server.put("s", pull()) for _ in range(4)]
    assert [bool(answer) for answer in answers] == [False, False, False, True]
    assert isinstance(answers[3][0], SubscriptionBusy)
    assert answers[3][0].headers == (("Retry-After", "1"),)
    server.run_until_idle()
    assert [answer[0].is_new for answer in answers[:3]] == [True, False, False]


def test_subscriptions_that_are_being_created_count() -> None:
    server = limited(max_subscriptions=1)
    first, second = server.put("a", pull()), server.put("b", pull())
    server.run_until_idle()
    assert isinstance(first[0], Put)
    assert isinstance(second[0], SubscriptionLimitReached)
    assert not put(server, "a").is_new, "an existing subscription is confirmed"
    server.do(server.subscriptions.delete, "a")
    server.run_until_idle()
    assert put(server, "b").is_new


def test_a_pattern_that_matches_too_many_streams_creates_nothing() -> None:
    server = limited(max_links_per_subscription=2)
    append_to(server, "events/1", "events/2", "events/3")
    assert isinstance(put(server, "s"), TooManyStreams)
    assert server.alive == {}
    assert server.subscriptions._links._count == 0
    assert [key for key in server.engine.catalog.documents if key.startswith("link/")] == []


def test_streams_beyond_the_limit_are_linked_later_without_losing_messages() -> None:
    server = limited(max_links_per_subscription=2)
    assert put(server, "s").is_new
    append_to(server, "events/1", "events/2", "events/3")
    subscription = server.alive["s"]
    assert set(subscription.links) == {"events/1", "events/2"}
    assert server.subscriptions.get("s").is_incomplete
    server.append("events/3", b"y")
    server.delete("events/1")
    server.run_until_idle()
    server.scheduler.advance(1_000)
    server.run_until_idle()
    assert set(subscription.pending) == {"events/2", "events/3"}
    assert subscription.links["events/3"].acked.message_index == 0, "from its beginning"
    assert not server.subscriptions.get("s").is_incomplete


def test_the_limit_of_all_links_holds_between_subscriptions() -> None:
    server = limited(max_links=3)
    append_to(server, "events/1", "events/2")
    assert put(server, "a").is_new
    assert isinstance(put(server, "b"), SubscriptionLimitReached)
    append_to(server, "events/3", "events/4")
    assert len(server.alive["a"].links) == 3
    assert server.subscriptions.get("a").is_incomplete
    assert isinstance(put(server, "c", None, ["x"]), SubscriptionLimitReached)
    refused = server.do(server.subscriptions.link, "a", ["x", "y"])
    assert isinstance(refused[0], SubscriptionLimitReached)
    server.do(server.subscriptions.delete, "a")
    server.run_until_idle()
    assert put(server, "c", None, ["x", "y"]).is_new


def test_links_beyond_the_limit_wait_after_a_restart_too() -> None:
    server = limited(max_links_per_subscription=2)
    assert put(server, "s").is_new
    append_to(server, "events/1", "events/2", "events/3")
    server.open()
    server.run_until_idle()
    assert len(server.alive["s"].links) == 2
    gone = next(iter(server.alive["s"].links))
    server.delete(gone)
    server.run_until_idle()
    server.scheduler.advance(1_000)
    server.run_until_idle()
    assert set(server.alive["s"].links) == {"events/1", "events/2", "events/3"} - {gone}


def test_saved_cursors_beyond_a_lowered_limit_are_restored() -> None:
    server = SimulatedServer()
    server.create(WAKE)
    append_to(server, "events/1", "events/2", "events/3")
    put(server, "s")
    server._make = partial(Subscriptions, limits=SubscriptionLimits(max_links=1, max_subscriptions=1))
    server.open()
    server.run_until_idle()
    assert {link.acked.message_index for link in server.alive["s"].links.values()} == {1}
    assert len(server.alive["s"].links) == 3


def test_the_segments_of_all_patterns_are_limited() -> None:
    server = limited(max_pattern_segments=5)
    assert put(server, "a", "events/a/*").is_new
    assert isinstance(put(server, "b", "events/b/*"), SubscriptionLimitReached)
    assert put(server, "c", "events/*").is_new
    server.do(server.subscriptions.delete, "a")
    server.run_until_idle()
    assert put(server, "b", "events/b/*").is_new
