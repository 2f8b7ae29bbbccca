"""Wakes: notify workers of pending work and process their responses.

The order in which state is saved makes a crash at any point harmless:

- A wake is saved before it is announced. After a crash it is announced again: a webhook with the same `wake_id`, a wake
  event with the same producer number, which the wake stream stores only once.
- A cursor is saved before the end of its wake. After a crash between the two, the worker still holds its lease, and
acks
  again without an effect.
- A failed delivery is saved with the time of its retry. The retry itself is not saved, so a crash repeats it.
- A worker gets its response when everything that the response depends on is durable.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from headwater.core import subscriptions as rules
from headwater.core.errors import Refusal
from headwater.core.fencing import TOKEN_TTL_MS, WriteClaim, make_write_token
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders
from headwater.core.signing import WakeToken, make_token, read_token
from headwater.core.subscription_errors import Fenced, InvalidAck
from headwater.core.subscriptions import Ack, Phase, Wake, encode_saved
from headwater.engine.alarms import Alarms
from headwater.engine.fences import ClaimFences, ClaimState
from headwater.engine.scheduler import Scheduler
from headwater.engine.signing_keys import SigningKeys
from headwater.engine.slices import SLICE_S
from headwater.engine.stream_host import StreamHost
from headwater.engine.subscription import Link, LinkState, Subscription
from headwater.engine.subscription_links import Links
from headwater.engine.webhooks import Answer, Caller, Outgoing

log = logging.getLogger("headwater.subscriptions")

WAKE_PREFIX: Final = "wake/"
RETRY_MS: Final = 1_000
"""Delay before a retry after storage refused a write."""
ANNOUNCE_RETRY_MS: Final = 60_000
"""Delay before a retry of a wake event that its stream refused because it is closed or full."""

_encode_json: Final = msgspec.json.Encoder().encode


def random_jitter() -> float:
    return random.uniform(-1.0, 1.0)


def wake_key(subscription_id: str) -> str:
    return WAKE_PREFIX + quote(subscription_id, safe="")


class Claimed(NamedTuple):
    wake_id: str
    generation: int
    token: str
    streams: Sequence[LinkState]
    lease_ttl_ms: int
    write_token: str = ""
    """Empty, unless a stream of the subscription is fenced."""


class _Delivery:
    """The content of one webhook call, set when it is sent."""

    __slots__ = ("streams", "wake_id")

    def __init__(self) -> None:
        self.wake_id = ""
        self.streams: Sequence[LinkState] = ()


class Wakes:
    def __init__(
        self,
        engine: StreamHost,
        scheduler: Scheduler,
        caller: Caller,
        keys: SigningKeys,
        links: Links,
        *,
        timeout_s: float,
        public_url: str = "",
        jitter: Callable[[], float] = random_jitter,
        fences: ClaimFences | None = None,
    ) -> None:
        self._engine = engine
        self._fences = fences
        self._scheduler = scheduler
        self._caller = caller
        self._keys = keys
        self._links = links
        self._timeout_s = timeout_s
        self._public_url = public_url
        self._jitter = jitter
        self._alarms: Alarms[Subscription] = Alarms(engine, scheduler, self._on_alarm)
        self._dirty: deque[Subscription] = deque()
        self._is_scheduled = False
        self._is_running = False

    def start(self, subscriptions: Iterable[Subscription]) -> None:
        """Begin to wake workers, and continue every wake of the last run."""
        for subscription in subscriptions:
            if subscription.wake.phase is Phase.OUT and subscription.pending:
                self._notify(subscription)
            self._alarms.set(subscription)
            self.mark_dirty(subscription)
        self._is_running = True
        self._schedule()

    def stop(self) -> None:
        self._is_running = False
        self._alarms.stop()

    # -- changes -------------------------------------------------------------------------------------------------------

    def mark_dirty(self, subscription: Subscription) -> None:
        """Process a subscription in the next iteration of the loop: once, however many of its streams changed."""
        if subscription.is_dirty or subscription.is_deleted or not subscription.is_ready:
            return
        subscription.is_dirty = True
        self._dirty.append(subscription)
        self._schedule()

    def announce(self, subscription: Subscription) -> None:
        """Append the event of a wake to its wake stream. Idempotent: the stream stores it once."""
        config, wake = subscription.config, subscription.wake
        if config.wake_stream is None or wake.phase is not Phase.OUT:
            return
        stream = self._engine.catalog.by_name.get(config.wake_stream)
        if stream is None or stream.deleted:
            log.warning(
                "subscription %r cannot wake workers until its wake stream %r is created",
                subscription.id,
                config.wake_stream,
            )
            subscription.failure_reason = f"The wake stream {config.wake_stream!r} does not exist."
            return
        event = {
            "type": "wake",
            "subscription_id": subscription.id,
            "stream": wake.trigger,
            "generation": wake.generation,
            "ts": self._engine.now_ms(),
        }
        body = _encode_json(event) if stream.type.json else _encode_json(event) + b"\n"
        producer = ProducerHeaders(f"__ds/{subscription.id}/{subscription.saved.nonce}", wake.generation, 0)
        announced = partial(self._announced, subscription)
        try:
            self._engine.append(config.wake_stream, stream.type.header, body, producer, None, False, announced)
        except Refusal as refusal:
            self._announced(subscription, refusal)

    # -- requests of workers -------------------------------------------------------------------------------------------

    def claim(self, subscription: Subscription, worker: str) -> Claimed:
        config = subscription.config
        self._expire_if_due(subscription)
        wake = subscription.wake
        rules.check_claimable(wake, bool(subscription.pending))
        if wake.phase is Phase.IDLE:
            wake = self._next_wake(wake, subscription)
        wake = rules.claim(wake, worker, self._engine.now_ms() + config.lease_ttl_ms)
        token = self._token(subscription, wake)
        self._save(subscription, wake)
        links, write_token = subscription.reported_links(), self.write_token(subscription)
        return Claimed(wake.wake_id, wake.generation, token, links, config.lease_ttl_ms, write_token)

    def ack(
        self, subscription: Subscription, token: str, generation: int, wake_id: str, acks: Sequence[Ack], done: bool
    ) -> bool:
        """Move cursors and extend the lease or end it. True if the next wake follows."""
        self._expire_if_due(subscription)
        self._check_current(subscription, token, generation, wake_id)
        for link, offset in self._check_acks(subscription, acks):
            self._links.move(link, offset)
        if done:
            return self._end_wake(subscription)
        until_ms = self._engine.now_ms() + subscription.config.lease_ttl_ms
        self._save(subscription, rules.extend(subscription.wake, until_ms))
        return False

    def release(self, subscription: Subscription, token: str, generation: int, wake_id: str) -> None:
        self._expire_if_due(subscription)
        self._check_current(subscription, token, generation, wake_id)
        self._end_wake(subscription)

    # -- time ----------------------------------------------------------------------------------------------------------

    def _expire_if_due(self, subscription: Subscription) -> None:
        """Treat an expired lease as expired even before its timer fires."""
        deadline_ms = subscription.deadline_ms()
        if deadline_ms is not None and deadline_ms <= self._engine.now_ms():
            self._on_deadline(subscription)

    def _on_alarm(self, subscription: Subscription) -> None:
        # Thousands of leases may end at the same time; like all changes they are processed in slices.
        self.mark_dirty(subscription)

    def _on_deadline(self, subscription: Subscription) -> None:
        subscription.retry_at_ms = None
        phase = subscription.wake.phase
        try:
            if phase is Phase.HELD:
                self._engine.metrics.leases_expired += 1
                log.info("a lease of subscription %r expired (holder %r)", subscription.id, subscription.wake.holder)
                self._end_wake(subscription)
            elif phase is Phase.WAITING:
                subscription.wake = rules.retry(subscription.wake)
                self._notify(subscription)
            elif phase is Phase.OUT:
                self.announce(subscription)
            else:
                self.mark_dirty(subscription)
        except Refusal as refusal:
            self._retry_later(subscription, refusal, RETRY_MS)

    def _schedule(self) -> None:
        if self._dirty and self._is_running and not self._is_scheduled:
            self._is_scheduled = True
            self._scheduler.soon(self._process_dirty)

    def _process_dirty(self) -> None:
        """Process dirty subscriptions, for at most one slice: one append can make thousands of them dirty."""
        self._is_scheduled = False
        deadline = self._scheduler.timer_s() + SLICE_S
        for _ in range(len(self._dirty)):
            subscription = self._dirty.popleft()
            subscription.is_dirty = False
            try:
                self._process(subscription)
            except Refusal as refusal:
                self._retry_later(subscription, refusal, RETRY_MS)
            except Exception:
                # A bug in one subscription must not keep the others from being woken.
                log.exception("processing subscription %r failed unexpectedly", subscription.id)
            if self._scheduler.timer_s() >= deadline:
                break
        self._schedule()

    def _process(self, subscription: Subscription) -> None:
        if subscription.is_deleted:
            return
        self._expire_if_due(subscription)
        phase = subscription.wake.phase
        if phase is Phase.IDLE and subscription.pending:
            self._save(subscription, self._next_wake(subscription.wake, subscription))
            self._notify(subscription)
        elif phase in (Phase.OUT, Phase.WAITING) and not subscription.pending:
            # Its stream was deleted. If the wake stayed, later work could not wake a worker.
            self._end_wake(subscription)

    def _retry_later(self, subscription: Subscription, refusal: Refusal, delay_ms: int) -> None:
        log.warning("subscription %r will be retried: %s", subscription.id, refusal.detail)
        subscription.failure_reason = refusal.detail
        subscription.retry_at_ms = self._engine.now_ms() + delay_ms
        self._alarms.set(subscription)

    # -- the wake ------------------------------------------------------------------------------------------------------

    def _next_wake(self, wake: Wake, subscription: Subscription) -> Wake:
        return rules.wake_up(wake, f"w_{secrets.token_hex(12)}", next(iter(subscription.pending)))

    def _end_wake(self, subscription: Subscription) -> bool:
        """End the wake, and begin the next one if there is pending work. True if there is."""
        self.seal(subscription)
        wake = rules.finish(subscription.wake)
        if subscription.pending:
            wake = self._next_wake(wake, subscription)
        self._save(subscription, wake)
        if wake.phase is Phase.OUT:
            self._notify(subscription)
        return wake.phase is Phase.OUT

    def _save(self, subscription: Subscription, wake: Wake) -> None:
        self._engine.put_document(wake_key(subscription.id), encode_saved(wake), None, None)
        if wake.generation != subscription.wake.generation:
            # Counted here, because a wake that storage refuses is created again.
            self._engine.metrics.wakes[subscription.config.kind] += 1
        subscription.wake = wake
        subscription.retry_at_ms = None
        self._alarms.set(subscription)

    def _notify(self, subscription: Subscription) -> None:
        if subscription.config.kind == "pull-wake":
            # Queued after the wake itself, so it cannot be durable before it.
            self.announce(subscription)
        else:
            self._engine.after_all_pending(partial(self._deliver, subscription, subscription.wake), None)

    def _announced(self, subscription: Subscription, result: object) -> None:
        if not isinstance(result, Refusal):
            subscription.failure_reason = ""
        elif not subscription.is_deleted:
            self._retry_later(subscription, result, ANNOUNCE_RETRY_MS)

    # -- webhooks ------------------------------------------------------------------------------------------------------

    def _deliver(self, subscription: Subscription, wake: Wake, outcome: object) -> None:
        if isinstance(outcome, Refusal) or subscription.is_deleted or subscription.wake != wake:
            return
        config = subscription.config
        assert config.webhook_url is not None, "only webhooks are delivered"
        subscription.deliverable = wake
        if subscription.is_call_queued:
            return  # The call that waits for its turn will deliver this wake.
        subscription.is_call_queued = True
        # A call that takes longer than the lease cannot be distinguished from a worker that died.
        timeout_s = min(self._timeout_s, config.lease_ttl_ms / 1000)
        delivery = _Delivery()
        compose = partial(self._compose, subscription, delivery)
        self._caller.call(config.webhook_url, compose, timeout_s, partial(self._on_response, subscription, delivery))

    def _compose(self, subscription: Subscription, delivery: _Delivery) -> Outgoing | None:
        """The request for the current wake with the current state of its streams; None if there is none to deliver."""
        subscription.is_call_queued = False
        wake, current = subscription.deliverable, subscription.wake
        if subscription.is_deleted or current.phase is not Phase.OUT or current.wake_id != wake.wake_id:
            return None
        delivery.wake_id = wake.wake_id
        snapshot = delivery.streams = subscription.reported_links()
        base_url = self._public_url or subscription.saved.base_url
        notification = {
            "subscription_id": subscription.id,
            "wake_id": wake.wake_id,
            "generation": wake.generation,
            "streams": [render_link(link) for link in snapshot],
            "callback_url": f"{base_url}/v1/stream/__ds/subscriptions/{quote(subscription.id, safe='')}/callback",
            "callback_token": self._token(subscription, wake),
        }
        if write_token := self.write_token(subscription):
            notification["write_token"] = write_token
        body = _encode_json(notification)
        signature = self._keys.current().sign(body, self._engine.now_ms() // 1000)
        return Outgoing({"Content-Type": "application/json", "Webhook-Signature": signature}, body)

    def _on_response(self, subscription: Subscription, delivery: _Delivery, answer: Answer) -> None:
        """Process a receiver's response. It is ignored if its wake has ended by callback or timeout."""
        self._engine.metrics.deliveries["accepted" if answer.accepted else "failed"] += 1
        subscription.failure_reason = "" if answer.accepted else answer.reason
        current = subscription.wake
        if subscription.is_deleted or current.phase is Phase.IDLE or current.wake_id != delivery.wake_id:
            return
        now_ms = self._engine.now_ms()
        try:
            if answer.done:
                self._ack_reported(subscription, delivery.streams)
                self._end_wake(subscription)
            elif current.phase is not Phase.OUT:
                return  # A callback was received first, and the worker has the lease.
            elif answer.accepted:
                self._save(subscription, rules.delivered(current, now_ms + subscription.config.lease_ttl_ms))
            else:
                self._save(subscription, rules.failed(current, now_ms, self._jitter()))
                log.warning(
                    "webhook of subscription %r failed (%s); retry in %.1f s",
                    subscription.id,
                    answer.reason,
                    (subscription.wake.until_ms - now_ms) / 1000,
                )
        except Refusal as refusal:
            # Storage refuses writes: treat the delivery as failed, so that it is repeated.
            if subscription.wake.phase is Phase.OUT:
                subscription.wake = rules.failed(subscription.wake, now_ms, self._jitter())
                self._retry_later(subscription, refusal, RETRY_MS)

    def _ack_reported(self, subscription: Subscription, snapshot: Sequence[LinkState]) -> None:
        """Ack the messages that a delivery reported, on `{"done": true}`, but not later ones."""
        for reported in snapshot:
            link = subscription.links.get(reported.path)
            if link is None or link.stream is None or link.stream.id != reported.stream_id:
                continue  # It was deleted in the meantime, and perhaps created again.
            if reported.has_pending and link.acked < reported.tail:
                self._links.move(link, reported.tail)

    # -- cursors and tokens --------------------------------------------------------------------------------------------

    def _check_acks(self, subscription: Subscription, acks: Sequence[Ack]) -> list[tuple[Link, Offset]]:
        """The new cursors after the acks. Raises if any of them is invalid, so that none is applied."""
        moved: dict[str, tuple[Link, Offset]] = {}
        for ack in acks:
            name = rules.linked_name(ack.stream)
            link = subscription.links.get(name)
            if link is None:
                raise InvalidAck(
                    f"{ack.stream!r} is not a stream of this subscription; ack streams that the wake names."
                )
            offset = rules.advance(moved[name][1] if name in moved else link.acked, ack, link.tail)
            stream = link.stream
            if stream is None:
                continue  # The cursor of a name without a stream does not move.
            try:
                self._engine.reader.parse_offset(stream, ack.offset)
            except Refusal as refusal:
                raise InvalidAck(refusal.detail) from refusal
            # Message boundaries before the earliest retained offset are not known.
            retained = offset.message_index >= stream.retained_index
            if retained and self._engine.reader.boundary(stream, offset.message_index) != offset.byte_position:
                raise InvalidAck(
                    f"{ack.offset} is not a message boundary of {ack.stream!r}. Ack one that the server returned."
                )
            moved[name] = (link, offset)
        return list(moved.values())

    def write_token(self, subscription: Subscription) -> str:
        """The token that lets the current claim write to fenced streams; empty if none of its streams is fenced."""
        if self._fences is None or not self._fences.has_any(subscription.links):
            return ""
        wake, expires_ms = subscription.wake, self._engine.now_ms() + TOKEN_TTL_MS
        nonce = subscription.saved.nonce
        claim = WriteClaim(subscription.id, nonce, wake.generation, wake.wake_id, wake.holder, expires_ms)
        return make_write_token(self._keys.secret(), claim)

    def seal(self, subscription: Subscription, names: Collection[str] | None = None) -> None:
        """Seal the current generation on its fenced streams, or on some of them, before its claim ends."""
        if self._fences is not None and subscription.wake.generation:
            names = subscription.links if names is None else names
            self._fences.seal(names, subscription.saved.nonce, subscription.wake.generation)

    def claim_state(self, subscription: Subscription) -> ClaimState:
        wake = subscription.wake
        if subscription.config.kind == "pull-wake":
            is_live = wake.phase is Phase.HELD and wake.until_ms > self._engine.now_ms()
        else:
            # A receiver has its token from the moment that it is called.
            is_live = wake.phase is not Phase.IDLE and (
                wake.phase is not Phase.HELD or wake.until_ms > self._engine.now_ms()
            )
        nonce = subscription.saved.nonce
        return ClaimState(nonce, wake.generation, wake.wake_id, wake.holder, is_live, subscription.links)

    def _token(self, subscription: Subscription, wake: Wake) -> str:
        return make_token(self._keys.secret(), subscription.id, WakeToken(wake.generation, wake.wake_id))

    def _check_current(self, subscription: Subscription, text: str, generation: int, wake_id: str) -> None:
        """Fence a request whose token, generation or wake id is not of the current wake."""
        token = read_token(self._keys.secret(), subscription.id, text)
        if token != WakeToken(generation, wake_id):
            raise Fenced(
                "The token belongs to another wake; stop, and claim the next wake.",
                generation=subscription.wake.generation,
            )
        rules.check_current(subscription.wake, generation, wake_id)


def render_link(link: LinkState) -> dict[str, str | bool]:
    return {
        "path": link.path,
        "link_type": link.link_type,
        "acked_offset": link.token(link.acked),
        "tail_offset": link.token(link.tail),
        "has_pending": link.has_pending,
    }
