"""A subscription in memory: its links to streams, its pending work, and its wake.

A link follows its stream as a live reader does, so an append to a stream without links costs nothing, and an append to
a stream with links costs one comparison per link. Invariant: `pending` holds exactly the links whose cursor lies before
the durable tail of their stream.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import Final, NamedTuple, Protocol

from headwater.core.buckets import is_bucketed
from headwater.core.errors import OffsetGone, Refusal
from headwater.core.globs import Glob
from headwater.core.offsets import ZERO, Offset, format_token
from headwater.core.subscriptions import Phase, SavedLink, SavedSubscription, Wake
from headwater.engine.stream import LiveStream

REPORTED_MAX: Final = 1_000
"""Streams that one wake reports, those with pending work first. It limits the size of the body."""


class SubscriptionOwner(Protocol):
    """The owner of subscriptions and links, which is notified of changes."""

    def mark_dirty(self, subscription: Subscription) -> None:
        """Process the subscription soon: it has new work, or no more work."""

    def on_stream_ended(self, link: Link) -> None:
        """The stream of the link was deleted or has expired."""


class LinkState(NamedTuple):
    """The state of a linked stream in wakes and responses."""

    path: str
    link_type: str
    acked: Offset
    tail: Offset
    has_pending: bool
    stream_id: int
    """The incarnation of the stream; 0 for a name without a stream."""

    def token(self, offset: Offset) -> str:
        """The token of an offset in responses; a name without a stream has no incarnation."""
        return (
            format_token(offset.message_index, offset.byte_position, self.stream_id) if self.stream_id else str(offset)
        )


class WakeFailure(NamedTuple):
    """Failed attempts to wake a worker since the last success, the reason of the last one, and the next retry."""

    attempts: int
    reason: str
    retry_at_ms: int | None


class Link:
    """A cursor on one stream, or on a name that has no stream yet."""

    __slots__ = ("acked", "by_pattern", "explicit", "is_saved", "name", "stream", "subscription")

    def __init__(self, subscription: Subscription, name: str) -> None:
        self.subscription: Final = subscription
        self.name: Final = name
        self.stream: LiveStream | None = None
        self.acked = ZERO
        self.explicit = False
        self.by_pattern = False
        self.is_saved = False
        """Whether a document is stored for it."""

    # -- as a follower -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        subscription = self.subscription
        stream = self.stream
        if stream is None or stream.durable_index <= self.acked.message_index or self.name in subscription.pending:
            return
        subscription.pending[self.name] = self
        if subscription.wake.phase is Phase.IDLE:
            subscription.owner.mark_dirty(subscription)

    def gone(self, refusal: Refusal) -> None:
        # Data that retention dropped before it was processed is still pending: the worker must get the error.
        if not isinstance(refusal, OffsetGone):
            self.subscription.owner.on_stream_ended(self)

    # -- as a cursor -------------------------------------------------------------------------------------------------

    @property
    def tail(self) -> Offset:
        stream = self.stream
        return Offset(stream.durable_index, stream.durable_position) if stream is not None else ZERO

    @property
    def has_pending(self) -> bool:
        return self.name in self.subscription.pending

    def move(self, offset: Offset) -> None:
        """Mark everything before `offset` as processed."""
        assert offset >= self.acked, "a cursor never moves back"
        self.acked = offset
        if self.stream is None or self.stream.durable_index <= offset.message_index:
            self.subscription.pending.pop(self.name, None)

    def detach(self) -> None:
        """Remove the stream from the link, and its pending work."""
        self.stream = None
        self.acked = ZERO
        self.subscription.pending.pop(self.name, None)

    def saved(self) -> SavedLink:
        stream_id = self.stream.id if self.stream is not None else 0
        return SavedLink(self.explicit, stream_id, self.acked.message_index, self.acked.byte_position)

    def state(self) -> LinkState:
        # A link that is explicit and by pattern is reported as explicit (protocol §6.1).
        kind = "explicit" if self.explicit else "glob"
        stream_id = self.stream.id if self.stream is not None else 0
        return LinkState(self.name, kind, self.acked, self.tail, self.has_pending, stream_id)


class Subscription:
    __slots__ = (
        "alarm_ms",
        "config",
        "deliverable",
        "failure_reason",
        "follows_buckets",
        "glob",
        "id",
        "is_call_queued",
        "is_deleted",
        "is_dirty",
        "is_incomplete",
        "is_ready",
        "links",
        "owner",
        "pending",
        "retry_at_ms",
        "saved",
        "wake",
    )

    def __init__(self, id_: str, saved: SavedSubscription, owner: SubscriptionOwner) -> None:
        self.id: Final = id_
        self.saved: Final = saved
        self.config: Final = saved.config
        self.glob: Final = Glob(tuple(saved.config.pattern.split("/"))) if saved.config.pattern is not None else None
        self.follows_buckets: Final = is_bucketed(saved.config.pattern or "")
        """Whether its pattern is for streams of buckets."""
        self.owner: Final = owner
        self.wake = Wake()
        self.deliverable = self.wake
        """The last wake that is durable and may be delivered to a webhook."""
        self.is_call_queued = False
        """Whether a webhook call is queued. It delivers the wake that is deliverable when it is made, so one is
        enough."""
        self.links: dict[str, Link] = {}
        self.pending: dict[str, Link] = {}
        self.is_ready = False
        """Whether all existing streams are linked. No worker is woken before that."""
        self.is_deleted = False
        self.is_incomplete = False
        """Whether a limit keeps streams that its pattern matches from being linked."""
        self.is_dirty = False
        """Whether it waits to be processed."""
        self.alarm_ms: int | None = None
        self.retry_at_ms: int | None = None
        """When to retry after storage or a wake stream refused a write."""
        self.failure_reason = ""
        """Why the last delivery or announcement failed; empty after a success and after a restart."""

    @property
    def failure(self) -> WakeFailure | None:
        """Why its worker cannot be woken, or None."""
        wake = self.wake
        if not wake.failures and not self.failure_reason:
            return None
        retry_at_ms = wake.until_ms if wake.phase is Phase.WAITING else self.retry_at_ms
        return WakeFailure(wake.failures, self.failure_reason, retry_at_ms)

    def deadline_ms(self) -> int | None:
        if self.is_deleted:
            return None
        if self.retry_at_ms is not None:
            return self.retry_at_ms
        return self.wake.until_ms if self.wake.phase in (Phase.HELD, Phase.WAITING) else None

    def reported_links(self) -> list[LinkState]:
        """The state of the linked streams, those with pending work first."""
        others = (link for name, link in self.links.items() if name not in self.pending)
        return [link.state() for link in islice(chain(self.pending.values(), others), REPORTED_MAX)]
