"""A state machine that checks subscriptions against a small model, with every order of requests, timers and crashes.

The model records which tokens are valid for a wake and until when, the offset up to which every cursor was acked (the
cursor must never be lower) and the highest ack that was sent (the cursor must never be higher). The invariants are
checked whenever the server is idle; the teardown checks that all work is done in the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.core.errors import Refusal
from headwater.core.offsets import ZERO, Offset, parse_token
from headwater.core.subscription_errors import AlreadyClaimed, Fenced, InvalidAck, NoPendingWork, SubscriptionNotFound
from headwater.core.subscriptions import Ack, Phase
from headwater.engine.subscription import Link, Subscription
from headwater.engine.subscriptions import Subscriptions
from headwater.engine.wakes import Claimed
from headwater.engine.webhooks import Answer
from tests.model.simulated_server import LEASE_MS, WAKE, Delivery, SimulatedServer, pull, webhook

STREAMS = ("events/a", "events/b/c", "other")
PATTERNS = ("events/*", "events/**", "**", "**", None)
ALIVE_MAX = 4
ROUNDS_MAX = 40

streams = st.sampled_from(STREAMS)
rarely = st.integers(0, 3).map(lambda number: number == 3)
fates = st.integers(0, 9).flatmap(
    lambda number: st.tuples(st.integers(0, 4), st.integers(0, 4)) if number == 9 else st.none()
)
"""None: run until the server is idle. Otherwise crash it after some ticks, some records into the next write."""


@dataclass(slots=True)
class WorkerLease:
    """A token that the server gave to a worker, and its state in the model."""

    subscription_id: str
    generation: int
    wake_id: str
    token: str
    until_ms: int
    is_held: bool
    has_ended: bool = False
    is_uncertain: bool = False
    """A request with this token was interrupted by a crash, so the lease may or may not have ended."""


class SubscriptionMachine(RuleBasedStateMachine):
    make: ClassVar[Callable[..., Subscriptions]] = Subscriptions

    @initialize()
    def begin(self) -> None:
        self.server = SimulatedServer(type(self).make)
        self.numbers = 0
        self.leases: list[WorkerLease] = []
        self.acked: dict[tuple[str, int], Offset] = {}
        self.sent_acks: dict[tuple[str, int], Offset] = {}
        self.wakes: dict[str, tuple[int, str]] = {}
        for name in (WAKE, *STREAMS):
            self._do(self.server.create(name), None)
        for kind in (pull, webhook):
            self.subscribe(kind, "**", [], None)

    # -- streams

    @rule(name=streams, size=st.sampled_from([0, 0, 3]), fate=fates)
    def create_stream(self, name: str, size: int, fate: tuple[int, int] | None) -> None:
        self._do(self.server.create(name, b"x" * size), fate)

    @rule(name=streams, size=st.integers(1, 5), fate=fates)
    def append(self, name: str, size: int, fate: tuple[int, int] | None) -> None:
        self._do(self.server.append(name, b"x" * size), fate)

    @precondition(lambda self: self._followed())
    @rule(data=st.data(), size=st.integers(1, 5), fate=fates)
    def append_to_linked_stream(self, data: st.DataObject, size: int, fate: tuple[int, int] | None) -> None:
        self._do(self.server.append(data.draw(st.sampled_from(self._followed())), b"x" * size), fate)

    @rule(sure=rarely, name=streams, fate=fates)
    def delete_stream(self, sure: bool, name: str, fate: tuple[int, int] | None) -> None:
        if not sure:
            return
        self._do(self.server.delete(name), fate)

    @rule(sure=rarely, fate=fates)
    def delete_wake_stream(self, sure: bool, fate: tuple[int, int] | None) -> None:
        if not sure:
            return
        self._do(self.server.delete(WAKE), fate)

    @rule(fate=fates)
    def create_wake_stream(self, fate: tuple[int, int] | None) -> None:
        self._do(self.server.create(WAKE), fate)

    # -- subscriptions

    @precondition(lambda self: len(self.server.alive) < ALIVE_MAX)
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
        self._do(self.server.put(id_, kind(pattern, names)), fate)
        if fate is None:
            assert id_ in self.server.alive
        self._linked(self.server.alive.get(id_))

    @precondition(lambda self: self.server.alive)
    @rule(sure=rarely, data=st.data(), fate=fates)
    def unsubscribe(self, sure: bool, data: st.DataObject, fate: tuple[int, int] | None) -> None:
        if not sure:
            return
        id_ = data.draw(st.sampled_from(sorted(self.server.alive)))
        self._do(self.server.do(self.server.subscriptions.delete, id_), fate)
        assert fate is not None or id_ not in self.server.alive

    @precondition(lambda self: self.server.alive)
    @rule(data=st.data(), name=streams, fate=fates)
    def link(self, data: st.DataObject, name: str, fate: tuple[int, int] | None) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.server.alive)))
        self._do(self.server.do(self.server.subscriptions.link, id_, [name]), fate)
        self._linked(self.server.alive[id_])

    @precondition(lambda self: self.server.alive)
    @rule(data=st.data(), name=streams, fate=fates)
    def unlink(self, data: st.DataObject, name: str, fate: tuple[int, int] | None) -> None:
        id_ = data.draw(st.sampled_from(sorted(self.server.alive)))
        link = self.server.alive[id_].links.get(name)
        stream_id = link.stream.id if link is not None and link.stream is not None else 0
        self._do(self.server.do(self.server.subscriptions.unlink, id_, name), fate)
        if name not in self.server.alive[id_].links:
            self.acked.pop((id_, stream_id), None)
            self.sent_acks.pop((id_, stream_id), None)

    # -- workers

    @precondition(lambda self: self._of_kind("pull-wake"))
    @rule(data=st.data(), worker=st.sampled_from(["ann", "bob"]), fate=fates)
    def claim(self, data: st.DataObject, worker: str, fate: tuple[int, int] | None) -> None:
        id_ = data.draw(st.sampled_from(self._of_kind("pull-wake")))
        has_work = bool(self._pending(self.server.alive[id_]))
        held = [lease for lease in self._valid() if lease.subscription_id == id_]
        answers = self.server.do(self.server.subscriptions.claim, id_, worker)
        self._do(answers, fate, *(lease for lease in self.leases if lease.subscription_id == id_))
        if fate is not None:
            return
        answer = answers[0]
        if held:
            assert isinstance(answer, AlreadyClaimed), f"{id_} is held by {held}, but answered {answer}"
        elif isinstance(answer, AlreadyClaimed):
            uncertain = [one for one in self.leases if one.subscription_id == id_ and one.is_uncertain]
            assert uncertain or self._unknown_holder(id_), "no lease is held"
        elif not has_work:
            assert isinstance(answer, NoPendingWork)
        else:
            assert isinstance(answer, Claimed), answer
            self._new_wake(id_, answer.generation, answer.wake_id)
            now_ms = self.server.clock.now_ms()
            self.leases.append(
                WorkerLease(id_, answer.generation, answer.wake_id, answer.token, now_ms + LEASE_MS, True)
            )

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), done=st.booleans(), share=st.integers(0, 3), fate=fates)
    def ack(self, data: st.DataObject, done: bool, share: int, fate: tuple[int, int] | None) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        subscription = self.server.alive.get(lease.subscription_id)
        links = list(subscription.links.values()) if subscription is not None else []
        acks = [_ack_of(link, share) for link in links if link.stream is not None]
        self._ack(lease, acks, done, fate)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), wrong=st.sampled_from(["back", "beyond", "between", "not linked", "not a position"]))
    def send_invalid_ack(self, data: st.DataObject, wrong: str) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        subscription = self.server.alive.get(lease.subscription_id)
        links = [link for link in subscription.links.values() if link.stream is not None] if subscription else []
        if not links or (wrong == "back" and links[0].acked == ZERO):
            return
        link = links[0]
        before = link.acked
        offset = {
            "back": str(ZERO),
            "beyond": str(Offset(link.tail.message_index + 1, link.tail.byte_position + 1)),
            "between": str(Offset(link.tail.message_index, link.tail.byte_position + 1)),
            "not a position": "now",
        }.get(wrong, str(link.tail))
        stream = "not/linked" if wrong == "not linked" else link.name
        progress = self._progress(lease)
        answers = self.server.do(
            progress,
            lease.subscription_id,
            lease.token,
            lease.generation,
            lease.wake_id,
            [Ack(stream, offset)],
            True,
        )
        self.server.run_until_idle()
        assert isinstance(answers[0], InvalidAck | Fenced)
        assert link.acked == before, "a refused ack moved a cursor"

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fate=fates)
    def release(self, data: st.DataObject, fate: tuple[int, int] | None) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        subscription = self.server.alive.get(lease.subscription_id)
        if subscription is None or subscription.config.kind != "pull-wake":
            return
        expected = self._expected(lease)
        answers = self.server.do(
            self.server.subscriptions.release, lease.subscription_id, lease.token, lease.generation, lease.wake_id
        )
        self._do(answers, fate, lease)
        if fate is None:
            self._compare(expected, answers[0])
            lease.has_ended = True

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), forged=st.sampled_from(["generation", "wake_id"]))
    def forge(self, data: st.DataObject, forged: str) -> None:
        """A token is valid only for its own wake, regardless of the body."""
        lease = data.draw(st.sampled_from(self.leases))
        if lease.subscription_id not in self.server.alive:
            return
        generation = lease.generation + (forged == "generation")
        wake_id = lease.wake_id + ("x" if forged == "wake_id" else "")
        answers = self.server.do(
            self._progress(lease), lease.subscription_id, lease.token, generation, wake_id, [], True
        )
        self.server.run_until_idle()
        assert isinstance(answers[0], Fenced)

    # -- receivers

    @precondition(lambda self: self.server.receiver.calls)
    @rule(data=st.data(), answer=st.sampled_from(["done", "accepted", "failed"]), fate=fates)
    def answer(self, data: st.DataObject, answer: str, fate: tuple[int, int] | None) -> None:
        delivery = data.draw(st.sampled_from(self.server.receiver.calls))
        subscription = self.server.alive.get(delivery.subscription_id)
        lease = self._received(delivery)
        current = self._is_current(lease, subscription)
        if answer == "done":
            self._record_sent_acks(delivery)
        self.server.receiver.answer(delivery, Answer(answer != "failed", answer == "done"))
        self._do([], fate, lease)
        if fate is not None:
            return
        if answer == "done":
            if current:
                self._record_acked(delivery)
            lease.has_ended = True
        elif answer == "accepted" and current and not lease.is_held:
            lease.is_held = True
            lease.until_ms = self.server.clock.now_ms() + LEASE_MS

    @precondition(lambda self: self.server.receiver.calls)
    @rule(data=st.data(), done=st.booleans(), share=st.integers(0, 3), fate=fates)
    def call_back(self, data: st.DataObject, done: bool, share: int, fate: tuple[int, int] | None) -> None:
        """A receiver calls back before it answers."""
        delivery = data.draw(st.sampled_from(self.server.receiver.calls))
        subscription = self.server.alive.get(delivery.subscription_id)
        links = list(subscription.links.values()) if subscription is not None else []
        acks = [_ack_of(link, share) for link in links if link.stream is not None]
        self._ack(self._received(delivery), acks, done, fate)

    # -- time

    @rule(milliseconds=st.sampled_from([1, 500, 1_000, 2_000, LEASE_MS - 1, LEASE_MS, 70_000]))
    def wait(self, milliseconds: int) -> None:
        self.server.scheduler.advance(milliseconds)
        self.server.run_until_idle()

    @rule(fate=st.tuples(st.integers(0, 2), st.integers(0, 2)))
    def crash(self, fate: tuple[int, int]) -> None:
        self._do([], fate)

    # -- invariants

    @invariant()
    def pending_links_have_messages_after_their_cursor(self) -> None:
        for subscription in self.server.alive.values():
            assert set(subscription.pending) == self._pending(subscription)

    @invariant()
    def no_wake_is_lost(self) -> None:
        """A subscription with pending work is held, has an announced wake, or has a timer for its next wake."""
        events = [(event["subscription_id"], event["generation"]) for event in self.server.wake_events()]
        now_ms = self.server.clock.now_ms()
        for id_, subscription in self.server.alive.items():
            wake = subscription.wake
            if not self._pending(subscription):
                assert wake.phase in (Phase.IDLE, Phase.HELD), f"{id_} is {wake.phase} without work"
                continue
            assert wake.phase is not Phase.IDLE, f"{id_} has pending work and is idle"
            if wake.phase is Phase.OUT and subscription.config.kind == "webhook":
                assert [call for call in self.server.receiver.calls if call.wake_id == wake.wake_id], f"{id_}: no call"
            elif wake.phase is Phase.OUT and self.server.stream(WAKE) is not None:
                assert (id_, wake.generation) in events, f"{id_} was not announced"
            elif wake.phase in (Phase.HELD, Phase.WAITING):
                assert wake.until_ms > now_ms, f"{id_} waits for a deadline that has passed"
                assert subscription.alarm_ms is not None
                assert subscription.alarm_ms <= wake.until_ms, f"{id_} will not be woken in time"

    @invariant()
    def no_wake_is_announced_twice(self) -> None:
        events = [(event["subscription_id"], event["generation"]) for event in self.server.wake_events()]
        assert len(events) == len(set(events))

    @invariant()
    def cursors_are_between_the_acknowledged_and_the_sent_offsets(self) -> None:
        for id_, subscription in self.server.alive.items():
            for link in subscription.links.values():
                if link.stream is None:
                    continue
                key = (id_, link.stream.id)
                assert link.acked >= self.acked.get(key, link.stream.base), f"{key} moved back"
                assert link.acked <= self.sent_acks.get(key, link.stream.base), f"{key} skipped messages"

    @invariant()
    def matching_streams_are_linked(self) -> None:
        for subscription in self.server.alive.values():
            pattern = subscription.config.pattern
            for name in STREAMS:
                if self.server.stream(name) is not None and pattern == "**":
                    assert name in subscription.links
            assert WAKE not in subscription.links or subscription.config.kind == "webhook"

    @invariant()
    def documents_belong_to_existing_subscriptions(self) -> None:
        for key in self.server.engine.catalog.documents:
            prefix, _, rest = key.partition("/")
            if prefix in ("subscription", "wake", "link"):
                assert rest.partition("/")[0] in self.server.alive, f"{key} was not removed"

    # -- teardown

    def teardown(self) -> None:
        """Run correct workers and a correct receiver: all pending work must be acked, and stay acked."""
        if not hasattr(self, "server"):
            return
        self._do(self.server.create(WAKE), None)
        for _ in range(ROUNDS_MAX):
            self.server.run_until_idle()
            if not any(self._pending(subscription) for subscription in self.server.alive.values()):
                return
            for delivery in tuple(self.server.receiver.calls):
                self.server.receiver.answer(delivery, Answer(True, True))
                self.server.run_until_idle()
            for event in self.server.wake_events():
                self._claim_and_ack(event["subscription_id"])
            self.server.scheduler.advance(10_000)
        left = {id_: self._pending(subscription) for id_, subscription in self.server.alive.items()}
        raise AssertionError(f"pending work that does not lead to a wake: {left}")

    def _claim_and_ack(self, id_: str) -> None:
        claimed = self.server.do(self.server.subscriptions.claim, id_, "last")
        self.server.run_until_idle()
        if not isinstance(claimed[0], Claimed):
            return
        wake = claimed[0]
        acks = [Ack(link.path, str(link.tail)) for link in wake.streams if link.has_pending]
        answers = self.server.do(
            self.server.subscriptions.ack, id_, wake.token, wake.generation, wake.wake_id, acks, True
        )
        self.server.run_until_idle()
        assert not isinstance(answers[0], Refusal), answers

    # -- implementation

    def _do(self, answers: list[Any], fate: tuple[int, int] | None, *involved: WorkerLease) -> None:
        """Run until the request that fills `answers` is done, or crash before that."""
        if fate is None:
            self.server.run_until_idle()
            return
        self.server.crash(*fate)
        for lease in involved:
            lease.is_uncertain = True

    def _ack(self, lease: WorkerLease, acks: list[Ack], done: bool, fate: tuple[int, int] | None) -> None:
        subscription = self.server.alive.get(lease.subscription_id)
        expected = self._expected(lease)
        keys = {}
        if subscription is not None:
            for one in acks:
                stream = subscription.links[one.stream].stream
                token = parse_token(one.offset)
                assert stream is not None
                assert token is not None
                keys[lease.subscription_id, stream.id] = token.offset
        if expected is not False:
            for key, offset in keys.items():
                self.sent_acks[key] = max(offset, self.sent_acks.get(key, ZERO))
        answers = self.server.do(
            self._progress(lease), lease.subscription_id, lease.token, lease.generation, lease.wake_id, acks, done
        )
        self._do(answers, fate, lease)
        if fate is not None:
            return
        answer = answers[0]
        self._compare(expected, answer)
        if isinstance(answer, Refusal):
            lease.has_ended = True
            return
        self.acked.update(keys)
        lease.is_uncertain = False
        lease.is_held = True
        lease.until_ms = self.server.clock.now_ms() + LEASE_MS
        if done:
            lease.has_ended = True
            assert subscription is not None
            assert answer is (subscription.wake.phase is Phase.OUT), "next_wake must say whether a wake follows"

    def _progress(self, lease: WorkerLease) -> Callable[..., bool]:
        subscription = self.server.alive.get(lease.subscription_id)
        if subscription is not None and subscription.config.kind == "webhook":
            return self.server.subscriptions.call_back
        return self.server.subscriptions.ack

    def _expected(self, lease: WorkerLease) -> bool | None:
        """Whether a request with this lease must be accepted; None where the model cannot know."""
        if lease.subscription_id not in self.server.alive or lease.has_ended:
            return False
        if lease.generation < self.wakes.get(lease.subscription_id, (0, ""))[0]:
            return False
        if lease.is_uncertain:
            return None
        if lease.is_held:
            return self.server.clock.now_ms() < lease.until_ms
        return None

    def _compare(self, expected: bool | None, answer: object) -> None:
        if expected is True:
            assert not isinstance(answer, Refusal), f"a worker with a lease was refused: {answer!r}"
        elif expected is False:
            assert isinstance(answer, Fenced | SubscriptionNotFound), f"a stale worker was accepted: {answer!r}"
        elif isinstance(answer, Refusal):
            assert isinstance(answer, Fenced), answer

    def _valid(self) -> list[WorkerLease]:
        return [lease for lease in self.leases if self._expected(lease) is True]

    def _unknown_holder(self, id_: str) -> bool:
        """Whether the current wake was claimed by a request whose answer a crash lost."""
        wake = self.server.alive[id_].wake
        return not [one for one in self.leases if one.subscription_id == id_ and one.wake_id == wake.wake_id]

    def _new_wake(self, id_: str, generation: int, wake_id: str) -> None:
        known, known_id = self.wakes.get(id_, (0, ""))
        assert wake_id == known_id or generation > known, "each wake must have a higher generation than the last one"
        self.wakes[id_] = (generation, wake_id)

    def _received(self, delivery: Delivery) -> WorkerLease:
        for lease in self.leases:
            if lease.token == delivery.token:
                return lease
        self._new_wake(delivery.subscription_id, delivery.generation, delivery.wake_id)
        lease = WorkerLease(
            delivery.subscription_id, delivery.generation, delivery.wake_id, delivery.token, 0, is_held=False
        )
        self.leases.append(lease)
        return lease

    def _is_current(self, lease: WorkerLease, subscription: Subscription | None) -> bool:
        return subscription is not None and subscription.wake.wake_id == lease.wake_id

    def _record_sent_acks(self, delivery: Delivery) -> None:
        for key, offset in _reported_offsets(delivery):
            self.sent_acks[key] = max(offset, self.sent_acks.get(key, ZERO))

    def _record_acked(self, delivery: Delivery) -> None:
        for key, offset in _reported_offsets(delivery):
            self.acked[key] = max(offset, self.acked.get(key, ZERO))

    def _linked(self, subscription: Subscription | None) -> None:
        """Start to track new links, whose cursors begin at the tail of the stream."""
        if subscription is None:
            return
        for link in subscription.links.values():
            key = (subscription.id, link.stream.id if link.stream is not None else 0)
            if link.stream is not None and key not in self.sent_acks and not link.has_pending:
                self.acked[key] = self.sent_acks[key] = link.acked

    def _followed(self) -> list[str]:
        links = (link for one in self.server.alive.values() for link in one.links.values())
        return sorted({link.name for link in links if link.stream is not None and link.name != WAKE})

    def _pending(self, subscription: Subscription) -> set[str]:
        return {
            name
            for name, link in subscription.links.items()
            if link.stream is not None and link.stream.durable_index > link.acked.message_index
        }

    def _of_kind(self, kind: str) -> list[str]:
        return sorted(id_ for id_, one in self.server.alive.items() if one.config.kind == kind)


def _ack_of(link: Link, share: int) -> Ack:
    """Build an ack of some of the pending messages."""
    assert link.stream is not None
    tail, cursor = link.tail, link.acked
    if share == 3 or tail.message_index == cursor.message_index:
        return Ack(link.name, str(tail))
    if share == 0:
        return Ack(link.name, str(cursor))
    message_index = cursor.message_index + 1
    byte_position = link.subscription.owner._engine.reader.boundary(link.stream, message_index)  # type: ignore[attr-defined]
    return Ack(link.name, str(Offset(message_index, byte_position)))


def _reported_offsets(delivery: Delivery) -> list[tuple[tuple[str, int], Offset]]:
    found = []
    for stream_id, tail in delivery.reported_tails.items():
        token = parse_token(tail)
        assert token is not None
        found.append(((delivery.subscription_id, stream_id), token.offset))
    return found
