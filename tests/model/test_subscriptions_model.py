"""Check subscriptions against the model, and check that the model detects each fault in a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from headwater.core.offsets import Offset
from headwater.core.subscriptions import Phase as WakePhase
from headwater.core.subscriptions import Wake
from headwater.engine.stream import LiveStream
from headwater.engine.subscription import Link, Subscription
from headwater.engine.subscriptions import Subscriptions
from tests.model.subscription_machine import SubscriptionMachine


def run(machine: type[SubscriptionMachine], examples: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
            # Faulty versions must be detected in every run, so they get the same examples every time.
            derandomize=Phase.shrink not in phases,
            database=None,
        ),
    )


def test_subscriptions_match_the_model(long: bool) -> None:
    run(SubscriptionMachine, 5_000 if long else 50, Phase.generate, Phase.shrink)


# -- deliberate faults: each leaves out one step of the code and must be detected


def leases_are_not_saved(broken: Subscriptions) -> None:
    wakes = broken._wakes

    def save(subscription: Subscription, wake: Wake) -> None:
        if wake.phase is not WakePhase.HELD:
            type(wakes)._save(wakes, subscription, wake)
            return
        subscription.wake = wake
        wakes._alarms.set(subscription)

    wakes._save = save  # type: ignore[method-assign]


def wakes_are_not_saved(broken: Subscriptions) -> None:
    wakes = broken._wakes

    def save(subscription: Subscription, wake: Wake) -> None:
        if wake.phase is not WakePhase.OUT:
            type(wakes)._save(wakes, subscription, wake)
            return
        subscription.wake = wake

    wakes._save = save  # type: ignore[method-assign]


def cursors_are_not_saved(broken: Subscriptions) -> None:
    broken._links.move = Link.move  # type: ignore[method-assign,assignment]


def stale_workers_are_not_fenced(broken: Subscriptions) -> None:
    broken._wakes._check_current = lambda *_: None  # type: ignore[method-assign]


def leases_never_end(broken: Subscriptions) -> None:
    wakes = broken._wakes
    on_deadline = wakes._on_deadline

    def ignore(subscription: Subscription) -> None:
        if subscription.wake.phase is not WakePhase.HELD:
            on_deadline(subscription)

    wakes._on_deadline = ignore  # type: ignore[method-assign]


def retries_never_happen(broken: Subscriptions) -> None:
    wakes = broken._wakes
    on_deadline = wakes._on_deadline

    def ignore(subscription: Subscription) -> None:
        if subscription.wake.phase is not WakePhase.WAITING:
            on_deadline(subscription)

    wakes._on_deadline = ignore  # type: ignore[method-assign]


def wakes_stay_without_work(broken: Subscriptions) -> None:
    wakes = broken._wakes
    process = wakes._process

    def ignore(subscription: Subscription) -> None:
        if subscription.pending:
            process(subscription)

    wakes._process = ignore  # type: ignore[method-assign]


def wake_events_have_no_sequence_number(broken: Subscriptions) -> None:
    engine = broken._engine
    append = engine.append

    def unnumbered(name: str, content_type: Any, body: Any, producer: Any, *rest: Any) -> None:
        append(name, content_type, body, None, *rest)

    engine.append = unnumbered  # type: ignore[method-assign,assignment]


def done_acks_more_than_was_reported(broken: Subscriptions) -> None:
    def everything(subscription: Subscription, _: object) -> None:
        for link in tuple(subscription.pending.values()):
            broken._links.move(link, link.tail)

    broken._wakes._ack_reported = everything  # type: ignore[method-assign,assignment]


def new_streams_are_linked_at_their_tail(broken: Subscriptions) -> None:
    links = broken._links
    attach = links._attach

    def late(link: Link, stream: LiveStream, cursor: Offset) -> None:
        attach(link, stream, Offset(stream.durable_index, stream.durable_position))

    links._attach = late  # type: ignore[method-assign]


def late_wake_stream_stays_empty(broken: Subscriptions) -> None:
    broken._by_wake_stream = {}
    broken._stream_created = broken._links.stream_created  # type: ignore[method-assign]


def acks_may_move_back(broken: Subscriptions) -> None:
    wakes = broken._wakes

    def careless(subscription: Subscription, acks: Any) -> list[tuple[Link, Offset]]:
        found = [(subscription.links[one.stream], one.offset) for one in acks if one.stream in subscription.links]
        return [(link, Offset(int(text[:16], 16), int(text[17:], 16))) for link, text in found if len(text) == 33]

    def move(link: Link, offset: Offset) -> None:
        link.acked = offset
        link.subscription.pending.pop(link.name, None)
        link.wake()

    wakes._check_acks = careless  # type: ignore[method-assign]
    broken._links.move = move  # type: ignore[method-assign]


def orphaned_links_stay(broken: Subscriptions) -> None:
    broken._links.remove_document = lambda _: True  # type: ignore[method-assign,assignment]


BROKEN: list[Callable[[Subscriptions], None]] = [
    leases_are_not_saved,
    wakes_are_not_saved,
    cursors_are_not_saved,
    stale_workers_are_not_fenced,
    leases_never_end,
    retries_never_happen,
    wakes_stay_without_work,
    wake_events_have_no_sequence_number,
    done_acks_more_than_was_reported,
    new_streams_are_linked_at_their_tail,
    late_wake_stream_stays_empty,
    acks_may_move_back,
    orphaned_links_stay,
]


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_model_detects_each_fault(breaks: Callable[[Subscriptions], None]) -> None:
    def make(*arguments: Any, **settings: Any) -> Subscriptions:
        broken = Subscriptions(*arguments, **settings)
        breaks(broken)
        return broken

    machine = type("BrokenMachine", (SubscriptionMachine,), {"make": staticmethod(make)})
    with pytest.raises(AssertionError):
        run(machine, 400, Phase.generate)
