"""All subscriptions: the requests of clients, and recovery after a restart.

Stored as documents: `subscription/{id}`, the configuration, which never changes; `wake/{id}` (see `wakes`) and
`link/{id}/{stream}` (see `subscription_links`). A request gets its response when everything that this depends on is
durable.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from headwater.core.errors import Refusal
from headwater.core.fencing import WriteClaim, read_write_token
from headwater.core.signing import PublicKey, SigningKey
from headwater.core.subscription_errors import (
    InvalidSubscription,
    SubscriptionAlreadyExists,
    SubscriptionBusy,
    SubscriptionLimitReached,
    SubscriptionNotFound,
)
from headwater.core.subscriptions import (
    DEFAULT_LIMITS,
    Ack,
    Config,
    Kind,
    Phase,
    SavedSubscription,
    SubscriptionLimits,
    decode_subscription,
    decode_wake,
    encode_saved,
)
from headwater.engine.fences import ClaimFences, ClaimState
from headwater.engine.scheduler import Scheduler
from headwater.engine.signing_keys import SigningKeys
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import StreamHost
from headwater.engine.subscription import Link, LinkState, Subscription, WakeFailure
from headwater.engine.subscription_links import Links, as_refusal
from headwater.engine.wakes import WAKE_PREFIX, Claimed, Wakes, random_jitter, wake_key
from headwater.engine.webhooks import Caller

SUBSCRIPTION_PREFIX: Final = "subscription/"
LINKS_PAGE_MAX: Final = 1_000
"""Links in one response: a subscription may have a hundred thousand, and other clients wait meanwhile."""


class View(NamedTuple):
    """A subscription as clients see it."""

    id: str
    config: Config
    created_ms: int
    is_failing: bool
    link_count: int
    links: Sequence[LinkState]
    """The links of one page, in the order of their names; empty in a listing."""
    has_more_links: bool
    is_incomplete: bool
    """Whether a limit keeps streams that its pattern matches from being linked."""
    kid: str | None
    """The id of the key that signs its webhooks."""
    failure: WakeFailure | None


class Put(NamedTuple):
    view: View
    is_new: bool


class Census(NamedTuple):
    """The number of subscriptions by kind and phase, and of linked streams with pending work."""

    by_kind_and_phase: Mapping[tuple[Kind, Phase], int] = {}
    pending: int = 0


class Subscriptions:
    def __init__(
        self,
        engine: StreamHost,
        scheduler: Scheduler,
        caller: Caller,
        *,
        timeout_s: float,
        public_url: str = "",
        key_rotation_s: float = 0,
        limits: SubscriptionLimits = DEFAULT_LIMITS,
        jitter: Callable[[], float] = random_jitter,
        fences: ClaimFences | None = None,
    ) -> None:
        self._engine = engine
        self._caller = caller
        self._keys = SigningKeys(engine, round(key_rotation_s * 1000))
        self.limits: Final = limits
        self._links = Links(engine, scheduler, limits, self.mark_dirty)
        self._wakes = Wakes(
            engine,
            scheduler,
            caller,
            self._keys,
            self._links,
            timeout_s=timeout_s,
            public_url=public_url,
            jitter=jitter,
            fences=fences,
        )
        if fences is not None:
            fences.claims = self
        self._by_id: dict[str, Subscription] = {}
        self._locked: dict[str, list[Callable[[], None]]] = {}
        """Ids of subscriptions that are being created or removed, with the requests that wait for that."""
        self._by_wake_stream: dict[str, dict[Subscription, None]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    # -- startup and shutdown ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Rebuild the subscriptions from the stored documents. No worker is woken yet."""
        self._keys.start()
        documents = dict(self._engine.catalog.documents)
        for key, value in documents.items():
            if key.startswith(SUBSCRIPTION_PREFIX):
                id_ = unquote(key.removeprefix(SUBSCRIPTION_PREFIX))
                subscription = Subscription(id_, decode_subscription(value), self)
                wake = documents.get(wake_key(id_))
                if wake is not None:
                    subscription.wake = decode_wake(wake)
                self._install(subscription)
        for key in documents:
            if key.startswith(WAKE_PREFIX) and unquote(key.removeprefix(WAKE_PREFIX)) not in self._by_id:
                self._links.remove_document(key)
        self._links.restore(self._by_id, documents)
        self._engine.publisher.on_created.append(self._stream_created)

    def begin(self) -> None:
        """Begin to wake workers. They respond over HTTP, so the server must already be listening."""
        self._wakes.start(tuple(self._by_id.values()))

    async def stop(self) -> None:
        self._links.stop()
        self._wakes.stop()
        await self._caller.stop()

    def run(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run `work`, and call `done` with its result when everything that the result depends on is durable."""
        try:
            result = work()
        except Refusal as refusal:
            result = refusal
        self._engine.after_all_pending(done, result)

    # -- subscriptions -------------------------------------------------------------------------------------------------

    def put(self, id_: str, config: Config, base_url: str, done: Callable[[Put | Refusal], None]) -> None:
        """Create a subscription, or confirm that it exists with the same configuration."""
        waiting = self._locked.get(id_)
        if waiting is not None and len(waiting) >= self.limits.max_waiting_requests:
            done(SubscriptionBusy(f"{len(waiting)} other requests wait for subscription {id_!r}; retry later."))
        elif waiting is not None:
            waiting.append(partial(self.put, id_, config, base_url, done))
        elif id_ in self._by_id:
            self.run(partial(self._confirm, id_, config), done)
        elif len(self._by_id) + len(self._locked) >= self.limits.max_subscriptions:
            detail = (
                f"The server has {self.limits.max_subscriptions} subscriptions, which is the limit"
                " (subscriptions.max_subscriptions); delete some, or raise it."
            )
            done(SubscriptionLimitReached(detail))
        else:
            self._locked[id_] = []
            create = partial(self._create, id_, config, base_url, partial(self._on_created, id_, done))
            if config.webhook_url is None:
                create(None)
            else:
                self._caller.vet(config.webhook_url, create)

    def get(self, id_: str, after: str | None = None, limit: int = LINKS_PAGE_MAX) -> View:
        """A subscription, with the first `limit` of its links whose names come after `after`."""
        return self._view(self._find(id_), after, limit)

    def page(self, after: str | None, limit: int) -> tuple[list[View], bool]:
        """The first `limit` subscriptions whose ids come after `after`, without their links; whether there are more."""
        ids = nsmallest(limit + 1, (id_ for id_ in self._by_id if after is None or id_ > after))
        return [self._view(self._by_id[id_], None, 0) for id_ in ids[:limit]], len(ids) > limit

    def census(self) -> Census:
        everyone = self._by_id.values()
        by_kind_and_phase = Counter((subscription.config.kind, subscription.wake.phase) for subscription in everyone)
        return Census(by_kind_and_phase, sum(len(subscription.pending) for subscription in everyone))

    def delete(self, id_: str) -> None:
        """Remove a subscription. Deleting a missing subscription is not an error.

        Its links are removed in the background. Until then a PUT of the same id waits: it would save cursors under the
        keys that are being removed.
        """
        subscription = self._by_id.get(id_)
        if subscription is None:
            return
        self._wakes.seal(subscription)
        # The configuration is removed first. The rest is then orphaned, and the next start removes the remainder.
        self._engine.put_document(_subscription_key(id_), None, None, None)
        subscription.is_deleted = True
        del self._by_id[id_]
        if subscription.config.wake_stream is not None:
            del self._by_wake_stream[subscription.config.wake_stream][subscription]
        self._links.remove_document(wake_key(id_))
        self._locked[id_] = []
        self._links.end(subscription, partial(self._unlock, id_))

    def link(self, id_: str, names: Iterable[str]) -> None:
        """Link streams explicitly, each at its current tail unless it is already linked."""
        subscription = self._find(id_)
        names = tuple(names)
        if subscription.config.wake_stream in names:
            raise InvalidSubscription("A subscription cannot follow its own wake_stream; name other streams.")
        self._links.check_limits(subscription, sum(name not in subscription.links for name in set(names)))
        for name in names:
            self._links.add(subscription, name)

    def unlink(self, id_: str, name: str) -> None:
        """Remove an explicit link; a link by pattern stays. Removing a missing link is not an error."""
        subscription = self._find(id_)
        link = subscription.links.get(name)
        if link is not None and not link.by_pattern:
            self._wakes.seal(subscription, (name,))
        self._links.remove(subscription, name)

    # -- workers -------------------------------------------------------------------------------------------------------

    def claim(self, id_: str, worker: str) -> Claimed:
        return self._wakes.claim(self._find(id_, "pull-wake"), worker)

    def ack(self, id_: str, token: str, generation: int, wake_id: str, acks: Sequence[Ack], done: bool) -> bool:
        """Process the acks of a pull-wake worker and extend its lease. True if the next wake follows."""
        return self._wakes.ack(self._find(id_, "pull-wake"), token, generation, wake_id, acks, done)

    def call_back(self, id_: str, token: str, generation: int, wake_id: str, acks: Sequence[Ack], done: bool) -> bool:
        """Process the acks of a webhook receiver and extend its lease. True if the next wake follows."""
        return self._wakes.ack(self._find(id_, "webhook"), token, generation, wake_id, acks, done)

    def release(self, id_: str, token: str, generation: int, wake_id: str) -> None:
        self._wakes.release(self._find(id_, "pull-wake"), token, generation, wake_id)

    # -- write fencing -------------------------------------------------------------------------------------------------

    def write_token(self, id_: str) -> str:
        """The write token of the current claim; empty if no stream of the subscription is fenced."""
        return self._wakes.write_token(self._find(id_))

    def read_write_token(self, text: str) -> WriteClaim:
        return read_write_token(self._keys.secret(), text, self._engine.now_ms())

    def claim_state(self, subscription_id: str) -> ClaimState | None:
        subscription = self._by_id.get(subscription_id)
        return self._wakes.claim_state(subscription) if subscription is not None else None

    # -- keys ----------------------------------------------------------------------------------------------------------

    def public_keys(self) -> list[PublicKey]:
        """The keys that sign webhooks now, will sign them next, or signed them until recently."""
        return self._keys.published()

    def rotate_key(self) -> SigningKey:
        return self._keys.rotate()

    # -- notifications of subscriptions --------------------------------------------------------------------------------

    def mark_dirty(self, subscription: Subscription) -> None:
        self._wakes.mark_dirty(subscription)

    def on_stream_ended(self, link: Link) -> None:
        self._links.stream_ended(link)

    # -- implementation ------------------------------------------------------------------------------------------------

    def _find(self, id_: str, kind: Kind | None = None) -> Subscription:
        subscription = self._by_id.get(id_)
        if subscription is None:
            raise SubscriptionNotFound(f"There is no subscription {id_!r}; create it with PUT.")
        if kind is not None and subscription.config.kind != kind:
            raise InvalidSubscription(
                f"Subscription {id_!r} is of type {subscription.config.kind}; claim, ack and release are for pull-wake"
                " subscriptions, callback is for webhooks."
            )
        return subscription

    def _view(self, subscription: Subscription, after: str | None = None, limit: int = LINKS_PAGE_MAX) -> View:
        config, links = subscription.config, subscription.links
        names = nsmallest(limit + 1, (name for name in links if after is None or name > after)) if limit else []
        return View(
            subscription.id,
            config,
            subscription.saved.created_ms,
            subscription.wake.failures > 0,
            len(links),
            [links[name].state() for name in names[:limit]],
            len(names) > limit,
            subscription.is_incomplete,
            self._keys.current().public.kid if config.webhook_url is not None else None,
            subscription.failure,
        )

    def _confirm(self, id_: str, config: Config) -> Put:
        existing = self._find(id_)
        if existing.config != config:
            raise SubscriptionAlreadyExists(
                f"Subscription {id_!r} exists with another configuration; use it as it is, delete it first, or choose"
                " another id."
            )
        return Put(self._view(existing), False)

    def _create(
        self,
        id_: str,
        config: Config,
        base_url: str,
        done: Callable[[Put | Refusal], None],
        refusal: Refusal | None,
    ) -> None:
        """Create a subscription whose webhook was checked. `done` is always called: until then the id is locked."""
        if refusal is not None:
            done(refusal)
            return
        try:
            # The keys that sign its deliveries must be durable no later than the subscription.
            self._keys.secret()
            if config.webhook_url is not None:
                self._keys.current()
            saved = SavedSubscription(config, self._engine.now_ms(), base_url, secrets.token_hex(8))
            subscription = Subscription(id_, saved, self)
        except Exception as error:
            done(as_refusal(error, f"creating subscription {id_!r}"))
            return
        # Cursors are saved first: a crash leaves orphaned cursors, not a subscription without cursors.
        self._links.begin(subscription, partial(self._linked, subscription, done))

    def _linked(
        self, subscription: Subscription, done: Callable[[Put | Refusal], None], refusal: Refusal | None
    ) -> None:
        if refusal is None:
            try:
                self._engine.put_document(
                    _subscription_key(subscription.id), encode_saved(subscription.saved), None, None
                )
            except Exception as error:
                refusal = as_refusal(error, f"creating subscription {subscription.id!r}")
                self._links.end(subscription, partial(done, refusal))
                return
        if refusal is not None:
            done(refusal)
            return
        self._install(subscription)
        self._wakes.mark_dirty(subscription)
        done(Put(self._view(subscription), True))

    def _on_created(self, id_: str, done: Callable[[Put | Refusal], None], result: Put | Refusal) -> None:
        """Complete the request that created the subscription, then run those that waited for the same id."""
        try:
            self._engine.after_all_pending(done, result)
        finally:
            self._unlock(id_)

    def _unlock(self, id_: str) -> None:
        for waiting in self._locked.pop(id_):
            waiting()

    def _install(self, subscription: Subscription) -> None:
        self._by_id[subscription.id] = subscription
        subscription.is_ready = True
        if subscription.config.wake_stream is not None:
            self._by_wake_stream.setdefault(subscription.config.wake_stream, {})[subscription] = None

    def _stream_created(self, stream: LiveStream) -> None:
        self._links.stream_created(stream)
        for subscription in self._by_wake_stream.get(stream.name, ()):
            self._wakes.announce(subscription)


def _subscription_key(id_: str) -> str:
    return SUBSCRIPTION_PREFIX + quote(id_, safe="")
