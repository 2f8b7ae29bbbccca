"""Subscriptions against a small model: anything that clients, workers, receivers, time and crashes do, in any order.

The model knows what was promised: which tokens speak for a wake, until when, how far every cursor was acknowledged
(it may never be found before that) and how far workers were told and said so (it may never be found beyond that).
What must hold whenever the server comes to rest is in the invariants; that work is always done in the end is tried
when a run is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.core.errors import AlreadyClaimed, Fenced, InvalidAck, NoPendingWork, Refusal, SubscriptionNotFound
from headwater.core.offsets import ZERO, Offset, parse_token
from headwater.core.subscriptions import Ack, Phase
from headwater.engine.subscription import Link, Subscription
from headwater.engine.subscriptions import Subscriptions
from headwater.engine.wakes import Claimed
from headwater.engine.webhooks import Answer
from tests.model.subscription_world import LEASE_MS, WAKE, Delivery, World, pull, webhook

STREAMS = ("events/a", "events/b/c", "other")
PATTERNS = ("events/*", "events/**", "**", "**", None)
ALIVE_MAX = 4
ROUNDS_MAX = 40

streams = st.sampled_from(STREAMS)
seldom = st.integers(0, 3).map(lambda number: number == 3)
fates = st.integers(0, 9).flatmap(
    lambda number: st.tuples(st.integers(0, 4), st.integers(0, 4)) if number == 9 else st.none()
)
"""None: the server comes to rest. Else it crashes, after so many ticks, and so many records into the next write."""


@dataclass(slots=True)
class Ticket:
    """A token that a worker was given, and what the model knows of it."""

    subscription_id: str
    generation: int
    wake_id: str
    token: str
    until_ms: int
    is_held: bool
    is_over: bool = False
    is_doubtful: bool = False
    """A crash fell into a request with it: it may be over or not."""


class SubscriptionMachine(RuleBasedStateMachine):
    make: ClassVar[Callable[..., Subscriptions]] = Subscriptions

    @initialize()
    def begin(self) -> None:
        self.world = World(type(self).make)
        self.numbers = 0
        self.tickets: list[Ticket] = []
        self.acked: dict[tuple[str, int], Offset] = {}
        self.said: dict[tuple[str, int], Offset] = {}
        self.wakes: dict[str, tuple[int, str]] = {}
        for name in (WAKE, *STREAMS):
            self._do(self.world.create(name), None)
        for kind in (pull, webhook):
            self.subscribe(kind, "**", [], None)

    # -- streams

    @rule(name=streams, size=st.sampled_from([0, 0, 3]), fate=fates)
    def create_stream(self, name: str, size: int, fate: tuple[int, int] | None) -> None:
        self._do(self.world.create(name, b"x" * size), fate)

    @rule(name=streams, size=st.integers(1, 5), fate=fates)
    def append(self, name: str, size: int, fate: tuple[int, int] | None) -> None:
        self._do(self.world.append(name, b"x" * size), fate)

    @precondition(lambda self: self._followed())
    @rule(data=st.data(), size=st.integers(1, 5), fate=fates)
    def append_where_it_matters(self, data: st.DataObject, size: int, fate: tuple[int, int] | None) -> None:
        self._do(self.world.append(data.draw(st.sampled_from(self._followed())), b"x" * size), fate)

    @rule(really=seldom, name=streams, fate=fates)
    def delete_stream(self, really: bool, name: str, fate: tuple[int, int] | None) -> None:
        if not really:
            return
        self._do(self.world.delete(name), fate)

    @rule(really=seldom, fate=fates)
    def take_the_wake_stream_away(self, really: bool, fate: tuple[int, int] | None) -> None:
        if not really:
            return
        self._do(self.world.delete(WAKE), fate)

    @rule(fate=fates)
    def create_the_wake_stream(self, fate: tuple[int, int] | None) -> None:
        self._do(self.world.create(WAKE), fate)

    # -- subscriptions

    @precondition(lambda self: len(self.world.alive) < ALIVE_MAX)
    @rule(
        kind=st.sampled_from([pull, webhook]),
        pattern=st.sampled_from(PATTERNS),
        names=st.lists(streams, max_size=2),
        fate=fates,
    )
    def subscribe(self, kind: Any, pattern: str | None, names: list[str], fate: tuple[int, int] | None) -> None:
        if pattern is None and not names:
            return
        self.numbers += 1
        id_ = f"s{self.numbers}"
        self._do(self.world.put(id_, kind(pattern, names)), fate)
        if fate is None:
            assert id_ in self.world.alive
        self._linked(self.world.alive.get(id_))

    @precondition(lambda self: self.world.alive)
    @rule(really=seldom, data=st.data(), fate=fates)
    def unsubscribe(self, really: bool, data: st.DataObject, fate: tuple[int, int] | None) -> None:
        if not really:
            return
        id_ = data.draw(st.sampled_from(sorted(self.world.alive)))
        self._do(self.world.do(self.world.subscriptions.delete, id_), fate)
        assert fate is not None or id_ not in self.world.alive

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), name=streams, fate=fates)
    def link(self, data: st.DataObject, name: str, fate: tuple[int, int] | None) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.world.alive)))
        self._do(self.world.do(self.world.subscriptions.link, id_, [name]), fate)
        self._linked(self.world.alive[id_])

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), name=streams, fate=fates)
    def unlink(self, data: st.DataObject, name: str, fate: tuple[int, int] | None) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.world.alive)))
        link = self.world.alive[id_].links.get(name)
        stream_id = link.stream.id if link is not None and link.stream is not None else 0
        self._do(self.world.do(self.world.subscriptions.unlink, id_, name), fate)
        if name not in self.world.alive[id_].links:
            self.acked.pop((id_, stream_id), None)
            self.said.pop((id_, stream_id), None)

    # -- workers

    @precondition(lambda self: self._of_kind("pull-wake"))
    @rule(data=st.data(), worker=st.sampled_from(["ann", "bob"]), fate=fates)
    def claim(self, data: st.DataObject, worker: str, fate: tuple[int, int] | None) -> None:
        id_ = data.draw(st.sampled_from(self._of_kind("pull-wake")))
        has_work = bool(self._pending(self.world.alive[id_]))
        held = [ticket for ticket in self._valid() if ticket.subscription_id == id_]
        answers = self.world.do(self.world.subscriptions.claim, id_, worker)
        self._do(answers, fate, *(ticket for ticket in self.tickets if ticket.subscription_id == id_))
        if fate is not None:
            return
        answer = answers[0]
        if held:
            assert isinstance(answer, AlreadyClaimed), f"{id_} is held by {held}, but answered {answer}"
        elif isinstance(answer, AlreadyClaimed):
            doubtful = [one for one in self.tickets if one.subscription_id == id_ and one.is_doubtful]
            assert doubtful or self._unknown_holder(id_), "nobody holds it"
        elif not has_work:
            assert isinstance(answer, NoPendingWork)
        else:
            assert isinstance(answer, Claimed), answer
            self._new_wake(id_, answer.generation, answer.wake_id)
            now_ms = self.world.clock.now_ms()
            self.tickets.append(Ticket(id_, answer.generation, answer.wake_id, answer.token, now_ms + LEASE_MS, True))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), done=st.booleans(), share=st.integers(0, 3), fate=fates)
    def ack(self, data: st.DataObject, done: bool, share: int, fate: tuple[int, int] | None) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        subscription = self.world.alive.get(ticket.subscription_id)
        links = list(subscription.links.values()) if subscription is not None else []
        acks = [_ack_of(link, share) for link in links if link.stream is not None]
        self._ack(ticket, acks, done, fate)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), wrong=st.sampled_from(["back", "beyond", "between", "stranger", "words"]))
    def ack_wrongly(self, data: st.DataObject, wrong: str) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        subscription = self.world.alive.get(ticket.subscription_id)
        links = [link for link in subscription.links.values() if link.stream is not None] if subscription else []
        if not links or (wrong == "back" and links[0].acked == ZERO):
            return
        link = links[0]
        before = link.acked
        offset = {
            "back": str(ZERO),
            "beyond": str(Offset(link.tail.message_index + 1, link.tail.byte_position + 1)),
            "between": str(Offset(link.tail.message_index, link.tail.byte_position + 1)),
            "words": "now",
        }.get(wrong, str(link.tail))
        stream = "not/linked" if wrong == "stranger" else link.name
        progress = self._progress(ticket)
        answers = self.world.do(
            progress,
            ticket.subscription_id,
            ticket.token,
            ticket.generation,
            ticket.wake_id,
            [Ack(stream, offset)],
            True,
        )
        self.world.settle()
        assert isinstance(answers[0], InvalidAck | Fenced)
        assert link.acked == before, "a refused ack moved a cursor"

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), fate=fates)
    def release(self, data: st.DataObject, fate: tuple[int, int] | None) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        subscription = self.world.alive.get(ticket.subscription_id)
        if subscription is None or subscription.config.kind != "pull-wake":
            return
        expected = self._expected(ticket)
        answers = self.world.do(
            self.world.subscriptions.release, ticket.subscription_id, ticket.token, ticket.generation, ticket.wake_id
        )
        self._do(answers, fate, ticket)
        if fate is None:
            self._compare(expected, answers[0])
            ticket.is_over = True

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), forged=st.sampled_from(["generation", "wake_id"]))
    def forge(self, data: st.DataObject, forged: str) -> None:
        """A token speaks for its own wake, whatever the body says."""
        ticket = data.draw(st.sampled_from(self.tickets))
        if ticket.subscription_id not in self.world.alive:
            return
        generation = ticket.generation + (forged == "generation")
        wake_id = ticket.wake_id + ("x" if forged == "wake_id" else "")
        answers = self.world.do(
            self._progress(ticket), ticket.subscription_id, ticket.token, generation, wake_id, [], True
        )
        self.world.settle()
        assert isinstance(answers[0], Fenced)

    # -- receivers

    @precondition(lambda self: self.world.receiver.calls)
    @rule(data=st.data(), answer=st.sampled_from(["done", "accepted", "failed"]), fate=fates)
    def answer(self, data: st.DataObject, answer: str, fate: tuple[int, int] | None) -> None:
        delivery = data.draw(st.sampled_from(self.world.receiver.calls))
        subscription = self.world.alive.get(delivery.subscription_id)
        ticket = self._received(delivery)
        current = self._is_current(ticket, subscription)
        if answer == "done":
            self._say_told(delivery)
        self.world.receiver.answer(delivery, Answer(answer != "failed", answer == "done"))
        self._do([], fate, ticket)
        if fate is not None:
            return
        if answer == "done":
            if current:
                self._acknowledge_told(delivery)
            ticket.is_over = True
        elif answer == "accepted" and current and not ticket.is_held:
            ticket.is_held = True
            ticket.until_ms = self.world.clock.now_ms() + LEASE_MS

    @precondition(lambda self: self.world.receiver.calls)
    @rule(data=st.data(), done=st.booleans(), share=st.integers(0, 3), fate=fates)
    def call_back(self, data: st.DataObject, done: bool, share: int, fate: tuple[int, int] | None) -> None:
        """A receiver calls back before it answers."""
        delivery = data.draw(st.sampled_from(self.world.receiver.calls))
        subscription = self.world.alive.get(delivery.subscription_id)
        links = list(subscription.links.values()) if subscription is not None else []
        acks = [_ack_of(link, share) for link in links if link.stream is not None]
        self._ack(self._received(delivery), acks, done, fate)

    # -- time

    @rule(milliseconds=st.sampled_from([1, 500, 1_000, 2_000, LEASE_MS - 1, LEASE_MS, 70_000]))
    def wait(self, milliseconds: int) -> None:
        self.world.scheduler.advance(milliseconds)
        self.world.settle()

    @rule(fate=st.tuples(st.integers(0, 2), st.integers(0, 2)))
    def crash(self, fate: tuple[int, int]) -> None:
        self._do([], fate)

    # -- what always holds

    @invariant()
    def pending_is_what_lies_between_cursor_and_tail(self) -> None:
        for subscription in self.world.alive.values():
            assert set(subscription.pending) == self._pending(subscription)

    @invariant()
    def no_wake_is_lost(self) -> None:
        """Where there is work, somebody has it, was told of it, or will be at a time that is set."""
        events = [(event["subscription_id"], event["generation"]) for event in self.world.wake_events()]
        now_ms = self.world.clock.now_ms()
        for id_, subscription in self.world.alive.items():
            wake = subscription.wake
            if not self._pending(subscription):
                assert wake.phase in (Phase.IDLE, Phase.HELD), f"{id_} is {wake.phase} without work"
                continue
            assert wake.phase is not Phase.IDLE, f"{id_} has work and nobody knows"
            if wake.phase is Phase.OUT and subscription.config.kind == "webhook":
                assert [call for call in self.world.receiver.calls if call.wake_id == wake.wake_id], f"{id_}: no call"
            elif wake.phase is Phase.OUT and self.world.stream(WAKE) is not None:
                assert (id_, wake.generation) in events, f"{id_} was not announced"
            elif wake.phase in (Phase.HELD, Phase.WAITING):
                assert wake.until_ms > now_ms, f"{id_} waits for a time that has passed"
                assert subscription.alarm_ms is not None
                assert subscription.alarm_ms <= wake.until_ms, f"{id_} will not be woken in time"

    @invariant()
    def no_wake_is_announced_twice(self) -> None:
        events = [(event["subscription_id"], event["generation"]) for event in self.world.wake_events()]
        assert len(events) == len(set(events))

    @invariant()
    def cursors_stand_where_they_were_acknowledged_and_no_further_than_was_said(self) -> None:
        for id_, subscription in self.world.alive.items():
            for link in subscription.links.values():
                if link.stream is None:
                    continue
                key = (id_, link.stream.id)
                assert link.acked >= self.acked.get(key, link.stream.base), f"{key} went back"
                assert link.acked <= self.said.get(key, link.stream.base), f"{key} skipped something"

    @invariant()
    def what_should_be_linked_is(self) -> None:
        for subscription in self.world.alive.values():
            pattern = subscription.config.pattern
            for name in STREAMS:
                if self.world.stream(name) is not None and pattern == "**":
                    assert name in subscription.links
            assert WAKE not in subscription.links or subscription.config.kind == "webhook"

    @invariant()
    def documents_are_of_what_there_is(self) -> None:
        for key in self.world.engine.catalog.documents:
            prefix, _, rest = key.partition("/")
            if prefix in ("subscription", "wake", "link"):
                assert rest.partition("/")[0] in self.world.alive, f"{key} stayed behind"

    # -- in the end

    def teardown(self) -> None:
        """Good workers and a good receiver come: all work is done, and done once it stays so."""
        if not hasattr(self, "world"):
            return
        self._do(self.world.create(WAKE), None)
        for _ in range(ROUNDS_MAX):
            self.world.settle()
            if not any(self._pending(subscription) for subscription in self.world.alive.values()):
                return
            for delivery in tuple(self.world.receiver.calls):
                self.world.receiver.answer(delivery, Answer(True, True))
                self.world.settle()
            for event in self.world.wake_events():
                self._work_on(event["subscription_id"])
            self.world.scheduler.advance(10_000)
        left = {id_: self._pending(subscription) for id_, subscription in self.world.alive.items()}
        raise AssertionError(f"work is left that nobody is woken for: {left}")

    def _work_on(self, id_: str) -> None:
        claimed = self.world.do(self.world.subscriptions.claim, id_, "eve")
        self.world.settle()
        if not isinstance(claimed[0], Claimed):
            return
        wake = claimed[0]
        acks = [Ack(told.path, str(told.tail)) for told in wake.streams if told.has_pending]
        answers = self.world.do(
            self.world.subscriptions.ack, id_, wake.token, wake.generation, wake.wake_id, acks, True
        )
        self.world.settle()
        assert not isinstance(answers[0], Refusal), answers

    # -- inside

    def _do(self, answers: list[Any], fate: tuple[int, int] | None, *involved: Ticket) -> None:
        """Let the request that gave `answers` come to its end, or crash on the way."""
        if fate is None:
            self.world.settle()
            return
        self.world.crash(*fate)
        for ticket in involved:
            ticket.is_doubtful = True

    def _ack(self, ticket: Ticket, acks: list[Ack], done: bool, fate: tuple[int, int] | None) -> None:
        subscription = self.world.alive.get(ticket.subscription_id)
        expected = self._expected(ticket)
        keys = {}
        if subscription is not None:
            for one in acks:
                stream = subscription.links[one.stream].stream
                token = parse_token(one.offset)
                assert stream is not None
                assert token is not None
                keys[ticket.subscription_id, stream.id] = token.offset
        if expected is not False:
            for key, offset in keys.items():
                self.said[key] = max(offset, self.said.get(key, ZERO))
        answers = self.world.do(
            self._progress(ticket), ticket.subscription_id, ticket.token, ticket.generation, ticket.wake_id, acks, done
        )
        self._do(answers, fate, ticket)
        if fate is not None:
            return
        answer = answers[0]
        self._compare(expected, answer)
        if isinstance(answer, Refusal):
            ticket.is_over = True
            return
        self.acked.update(keys)
        ticket.is_doubtful = False
        ticket.is_held = True
        ticket.until_ms = self.world.clock.now_ms() + LEASE_MS
        if done:
            ticket.is_over = True
            assert subscription is not None
            assert answer is (subscription.wake.phase is Phase.OUT), "next_wake tells whether there is one"

    def _progress(self, ticket: Ticket) -> Callable[..., bool]:
        subscription = self.world.alive.get(ticket.subscription_id)
        if subscription is not None and subscription.config.kind == "webhook":
            return self.world.subscriptions.call_back
        return self.world.subscriptions.ack

    def _expected(self, ticket: Ticket) -> bool | None:
        """Whether a worker with this ticket is heard; None where the model cannot tell."""
        if ticket.subscription_id not in self.world.alive or ticket.is_over:
            return False
        if ticket.generation < self.wakes.get(ticket.subscription_id, (0, ""))[0]:
            return False
        if ticket.is_doubtful:
            return None
        if ticket.is_held:
            return self.world.clock.now_ms() < ticket.until_ms
        return None

    def _compare(self, expected: bool | None, answer: object) -> None:
        if expected is True:
            assert not isinstance(answer, Refusal), f"a worker with a lease was refused: {answer!r}"
        elif expected is False:
            assert isinstance(answer, Fenced | SubscriptionNotFound), f"a stale worker was heard: {answer!r}"
        elif isinstance(answer, Refusal):
            assert isinstance(answer, Fenced), answer

    def _valid(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets if self._expected(ticket) is True]

    def _unknown_holder(self, id_: str) -> bool:
        """A claim whose answer a crash swallowed: its holder is known to the server alone."""
        wake = self.world.alive[id_].wake
        return not [one for one in self.tickets if one.subscription_id == id_ and one.wake_id == wake.wake_id]

    def _new_wake(self, id_: str, generation: int, wake_id: str) -> None:
        known, known_id = self.wakes.get(id_, (0, ""))
        assert wake_id == known_id or generation > known, "each wake has a generation of its own, and a higher one"
        self.wakes[id_] = (generation, wake_id)

    def _received(self, delivery: Delivery) -> Ticket:
        for ticket in self.tickets:
            if ticket.token == delivery.token:
                return ticket
        self._new_wake(delivery.subscription_id, delivery.generation, delivery.wake_id)
        ticket = Ticket(
            delivery.subscription_id, delivery.generation, delivery.wake_id, delivery.token, 0, is_held=False
        )
        self.tickets.append(ticket)
        return ticket

    def _is_current(self, ticket: Ticket, subscription: Subscription | None) -> bool:
        return subscription is not None and subscription.wake.wake_id == ticket.wake_id

    def _say_told(self, delivery: Delivery) -> None:
        for key, offset in _told_offsets(delivery):
            self.said[key] = max(offset, self.said.get(key, ZERO))

    def _acknowledge_told(self, delivery: Delivery) -> None:
        for key, offset in _told_offsets(delivery):
            self.acked[key] = max(offset, self.acked.get(key, ZERO))

    def _linked(self, subscription: Subscription | None) -> None:
        """New links stand at the tail of what was there; from then on they are watched."""
        if subscription is None:
            return
        for link in subscription.links.values():
            key = (subscription.id, link.stream.id if link.stream is not None else 0)
            if link.stream is not None and key not in self.said and not link.has_pending:
                self.acked[key] = self.said[key] = link.acked

    def _followed(self) -> list[str]:
        links = (link for one in self.world.alive.values() for link in one.links.values())
        return sorted({link.name for link in links if link.stream is not None and link.name != WAKE})

    def _pending(self, subscription: Subscription) -> set[str]:
        return {
            name
            for name, link in subscription.links.items()
            if link.stream is not None and link.stream.durable_index > link.acked.message_index
        }

    def _of_kind(self, kind: str) -> list[str]:
        return sorted(id_ for id_, one in self.world.alive.items() if one.config.kind == kind)


def _ack_of(link: Link, share: int) -> Ack:
    """An ack of a part of what is there, at a boundary."""
    assert link.stream is not None
    tail, cursor = link.tail, link.acked
    if share == 3 or tail.message_index == cursor.message_index:
        return Ack(link.name, str(tail))
    if share == 0:
        return Ack(link.name, str(cursor))
    index = cursor.message_index + 1
    position = link.subscription.owner._engine.reader.boundary(link.stream, index)  # type: ignore[attr-defined]
    return Ack(link.name, str(Offset(index, position)))


def _told_offsets(delivery: Delivery) -> list[tuple[tuple[str, int], Offset]]:
    found = []
    for stream_id, tail in delivery.told.items():
        token = parse_token(tail)
        assert token is not None
        found.append(((delivery.subscription_id, stream_id), token.offset))
    return found
