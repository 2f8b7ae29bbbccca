"""Links between subscriptions and streams, by name and by pattern, with saved cursors.

`link/{id}/{stream}` saves an explicit link, or a cursor that has moved. The cursor on a stream that matches a pattern
starts at its beginning unless one is saved. So linking a new stream needs no write, a crash between its creation and
its link cannot lose its first message, and a link that is deferred because of a limit does not lose anything either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from headwater.core.buckets import is_bucketed
from headwater.core.errors import InternalError, Refusal
from headwater.core.globs import Glob, GlobIndex
from headwater.core.offsets import Offset
from headwater.core.subscription_errors import SubscriptionLimitReached, TooManyStreams
from headwater.core.subscriptions import SavedLink, SubscriptionLimits, decode_link, encode_saved
from headwater.engine.scheduler import Scheduler, Timer
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import StreamHost
from headwater.engine.subscription import Link, Subscription

log = logging.getLogger("headwater.subscriptions")

LINK_PREFIX: Final = "link/"
RETRY_S: Final = 1.0
"""Delay between the removal of a link and the search, through all names, for streams that are not linked yet."""


def link_key(subscription_id: str, name: str) -> str:
    return f"{LINK_PREFIX}{quote(subscription_id, safe='')}/{name}"


def as_refusal(error: Exception, work: str) -> Refusal:
    """Convert the exception of a request: refusals are kept, others are logged and become a 500."""
    if isinstance(error, Refusal):
        return error
    log.error("%s failed unexpectedly", work, exc_info=error)
    return InternalError("The request failed because of an internal error. The server's log has the details.")


class Links:
    def __init__(
        self,
        engine: StreamHost,
        scheduler: Scheduler,
        limits: SubscriptionLimits,
        mark_dirty: Callable[[Subscription], None],
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._slices = Slices(scheduler)
        self._limits = limits
        self._mark_dirty = mark_dirty
        self._globs: GlobIndex[Subscription] = GlobIndex()
        self._pattern_segments = 0
        self._explicit: dict[str, dict[Subscription, None]] = {}
        self._count = 0
        self._incomplete: dict[Subscription, None] = {}
        """Subscriptions with streams that a limit keeps from being linked."""
        self._retry_timer: Timer | None = None

    def stop(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()

    # -- created and deleted subscriptions -----------------------------------------------------------------------------

    def begin(self, subscription: Subscription, done: Callable[[Refusal | None], None]) -> None:
        """Link a new subscription to the existing streams, each at its current tail.

        It runs in slices, so that other clients do not wait for it. Streams that are created or deleted meanwhile
        are linked and unlinked as usual. No worker is woken before the subscription is ready.
        """
        if subscription.glob is not None:
            if self._pattern_segments + len(subscription.glob.segments) > self._limits.max_pattern_segments:
                limit = self._limits.max_pattern_segments
                detail = (
                    f"All patterns together may have {limit} segments (subscriptions.max_pattern_segments); delete"
                    " subscriptions, or raise the limit."
                )
                done(SubscriptionLimitReached(detail))
                return
            self._add_glob(subscription, subscription.glob)
        self._slices.add(self._link_existing(subscription), partial(self._begun, subscription, done))

    def _link_existing(self, subscription: Subscription) -> Iterator[None]:
        for name in subscription.config.streams:
            self.add(subscription, name)
            yield
        for stream in self._matching_streams(subscription):
            if stream is not None:
                self._link_by_pattern(subscription, stream, _tail(stream))
            yield

    def _begun(
        self, subscription: Subscription, done: Callable[[Refusal | None], None], error: Exception | None
    ) -> None:
        if error is None:
            done(None)
            return
        refusal = as_refusal(error, f"linking subscription {subscription.id!r}")
        self.end(subscription, partial(done, refusal))

    def end(self, subscription: Subscription, done: Callable[[], None]) -> None:
        """Remove all links of a subscription with their saved cursors, in slices, then call `done`."""
        self._incomplete.pop(subscription, None)
        if subscription.glob is not None:
            self._globs.discard(subscription.glob, subscription)
            self._pattern_segments -= len(subscription.glob.segments)
        self._slices.add(self._unlink_all(subscription), partial(self._ended, subscription, done))

    def _unlink_all(self, subscription: Subscription) -> Iterator[None]:
        is_writable = True
        while subscription.links:
            name, link = subscription.links.popitem()
            self._dropped()
            if link.explicit:
                self._forget_explicit(subscription, name)
            if link.stream is not None:
                self._engine.unfollow(link.stream, link)
            link.detach()
            if link.is_saved and is_writable:
                is_writable = self.remove_document(link_key(subscription.id, name))
            yield

    def _ended(self, subscription: Subscription, done: Callable[[], None], error: Exception | None) -> None:
        if error is not None:
            log.error("unlinking subscription %r failed unexpectedly", subscription.id, exc_info=error)
        done()

    def add(self, subscription: Subscription, name: str) -> None:
        """Link a stream explicitly, at its current tail unless it is already linked."""
        link = subscription.links.get(name)
        if link is None:
            self.check_limits(subscription, 1)
            link = Link(subscription, name)
        elif link.explicit:
            return
        stream, cursor = link.stream, link.acked
        if stream is None:
            found = self._engine.catalog.by_name.get(name)
            if found is not None and found.visible and not found.deleted:
                stream, cursor = found, _tail(found)
        self._save(
            link, SavedLink(True, stream.id if stream is not None else 0, cursor.message_index, cursor.byte_position)
        )
        link.explicit = True
        self._register(link)
        self._explicit.setdefault(name, {})[subscription] = None
        if stream is not None and link.stream is None:
            self._attach(link, stream, cursor)

    def remove(self, subscription: Subscription, name: str) -> None:
        """Remove an explicit link. If a pattern matches the stream too, it stays linked by the pattern."""
        link = subscription.links.get(name)
        if link is None or not link.explicit:
            return
        if link.by_pattern:
            self._save(link, msgspec.structs.replace(link.saved(), explicit=False))
            link.explicit = False
        else:
            self._engine.put_document(link_key(subscription.id, name), None, None, None)
            if link.stream is not None:
                self._engine.unfollow(link.stream, link)
            link.detach()
            self._drop(link)
            self._mark_dirty(subscription)
        self._forget_explicit(subscription, name)

    # -- limits --------------------------------------------------------------------------------------------------------

    def check_limits(self, subscription: Subscription, count: int) -> None:
        """Refuse to link more streams than the settings allow."""
        limits = self._limits
        if len(subscription.links) + count > limits.max_links_per_subscription:
            raise TooManyStreams(
                f"A subscription may follow {limits.max_links_per_subscription} streams"
                " (subscriptions.max_links_per_subscription), and this one would follow"
                f" {len(subscription.links) + count};"
                " use several subscriptions, or raise the limit."
            )
        if count and self._count + count > limits.max_links:
            raise SubscriptionLimitReached(
                f"All subscriptions together may follow {limits.max_links} streams (subscriptions.max_links), and would"
                f" follow {self._count + count}; delete subscriptions, or raise the limit."
            )

    def _is_within_limits(self, subscription: Subscription) -> bool:
        limits = self._limits
        return len(subscription.links) < limits.max_links_per_subscription and self._count < limits.max_links

    def _defer(self, subscription: Subscription) -> None:
        """Link a stream that matches a pattern later, when the limits allow it: from its beginning, so nothing is
        lost."""
        if not subscription.is_ready:
            self.check_limits(subscription, 1)
        self._incomplete[subscription] = None
        if not subscription.is_incomplete:
            subscription.is_incomplete = True
            log.warning(
                "subscription %r: link limit reached; some matching streams are not linked yet. Raise the limits in"
                " [subscriptions], or delete subscriptions",
                subscription.id,
            )

    def _retry(self) -> None:
        self._retry_timer = None
        for subscription in self._incomplete:
            self._slices.add(self._link_missing(subscription), partial(self._retried, subscription))
        self._incomplete.clear()

    def _link_missing(self, subscription: Subscription) -> Iterator[None]:
        for stream in self._matching_streams(subscription):
            if subscription.is_deleted or subscription in self._incomplete:
                return
            if stream is not None and stream.name not in subscription.links:
                self._link_by_pattern(subscription, stream, stream.base)
            yield

    def _retried(self, subscription: Subscription, error: Exception | None) -> None:
        if error is not None:
            log.error("linking subscription %r failed unexpectedly", subscription.id, exc_info=error)
        elif subscription not in self._incomplete:
            subscription.is_incomplete = False

    # -- created and deleted streams -----------------------------------------------------------------------------------

    def stream_created(self, stream: LiveStream) -> None:
        """Link a new durable stream, before the response to its creation and before its first append."""
        for subscription in self._explicit.get(stream.name, ()):
            self._attach(subscription.links[stream.name], stream, stream.base)
        for subscription in self._matching(stream.name):
            self._link_by_pattern(subscription, stream, stream.base)

    def stream_ended(self, link: Link) -> None:
        """Handle the end of a linked stream: an explicit link waits for the next stream of that name, others are
        removed."""
        link.detach()
        link.by_pattern = False
        subscription = link.subscription
        if not link.explicit:
            self._drop(link)
            if link.is_saved:
                self.remove_document(link_key(subscription.id, link.name))
        self._mark_dirty(subscription)

    # -- cursors -------------------------------------------------------------------------------------------------------

    def move(self, link: Link, offset: Offset) -> None:
        """Mark everything before `offset` as processed. The new cursor is saved before it takes effect."""
        if offset == link.acked and link.is_saved:
            return
        saved = link.saved()
        saved = SavedLink(saved.explicit, saved.stream_id, offset.message_index, offset.byte_position)
        self._save(link, saved)
        link.move(offset)

    def remove_document(self, key: str) -> bool:
        """Remove a saved document; False if storage refused, in which case the next start removes it."""
        try:
            self._engine.put_document(key, None, None, None)
        except Refusal as refusal:
            log.warning("%s could not be removed; the next start will remove it: %s", key, refusal.detail)
            return False
        return True

    # -- recovery ------------------------------------------------------------------------------------------------------

    def restore(self, subscriptions: dict[str, Subscription], documents: dict[str, bytes]) -> None:
        """Restore the links of the last run, and remove the cursors of missing streams and subscriptions."""
        cursors: dict[tuple[str, str], SavedLink] = {}
        keys = [key for key in documents if key.startswith(LINK_PREFIX)]
        for key in keys:
            quoted, _, name = key.removeprefix(LINK_PREFIX).partition("/")
            subscription = subscriptions.get(unquote(quoted))
            if subscription is not None:
                cursors[subscription.id, name] = saved = decode_link(documents[key])
                if saved.explicit:
                    self._restore_explicit(subscription, name, saved)
        for subscription in subscriptions.values():
            if subscription.glob is not None:
                self._add_glob(subscription, subscription.glob)
        self._restore_patterns(cursors)
        for key in keys:
            quoted, _, name = key.removeprefix(LINK_PREFIX).partition("/")
            subscription = subscriptions.get(unquote(quoted))
            if subscription is None or name not in subscription.links:
                self.remove_document(key)

    def _restore_explicit(self, subscription: Subscription, name: str, saved: SavedLink) -> None:
        link = Link(subscription, name)
        self._register(link)
        link.explicit = link.is_saved = True
        self._explicit.setdefault(name, {})[subscription] = None
        stream = self._engine.catalog.by_name.get(name)
        if stream is not None and not stream.deleted:
            self._attach(link, stream, _cursor(saved, stream))

    def _restore_patterns(self, cursors: dict[tuple[str, str], SavedLink]) -> None:
        for stream in self._engine.catalog:
            if stream.deleted:
                continue
            for subscription in self._matching(stream.name):
                saved = cursors.get((subscription.id, stream.name))
                self._link_by_pattern(subscription, stream, _cursor(saved, stream), is_saved=saved is not None)

    # -- implementation ------------------------------------------------------------------------------------------------

    def _register(self, link: Link) -> None:
        links = link.subscription.links
        if link.name not in links:
            links[link.name] = link
            self._count += 1

    def _drop(self, link: Link) -> None:
        if link.subscription.links.pop(link.name, None) is not None:
            self._dropped()

    def _dropped(self) -> None:
        self._count -= 1
        if self._incomplete and self._retry_timer is None:
            self._retry_timer = self._scheduler.later(RETRY_S, self._retry)

    def _add_glob(self, subscription: Subscription, glob: Glob) -> None:
        self._globs.add(glob, subscription)
        self._pattern_segments += len(glob.segments)

    def _matching_streams(self, subscription: Subscription) -> Iterator[LiveStream | None]:
        """The streams that a subscription's pattern matches, and None for every other name, so that a slice can end."""
        if subscription.glob is None:
            return
        own: GlobIndex[None] = GlobIndex()
        own.add(subscription.glob, None)
        by_name = self._engine.catalog.by_name
        for name in tuple(by_name):
            stream = by_name.get(name)
            exists = stream is not None and stream.visible and not stream.deleted
            is_candidate = exists and is_bucketed(name) == subscription.follows_buckets
            yield stream if is_candidate and own.match(name) else None

    def _matching(self, name: str) -> list[Subscription]:
        """The subscriptions whose pattern matches a name. Wildcards never match streams of the other surface."""
        if self._globs.is_empty:
            return []
        bucketed = is_bucketed(name)
        return [found for found in self._globs.match(name) if found.follows_buckets == bucketed]

    def _link_by_pattern(
        self, subscription: Subscription, stream: LiveStream, cursor: Offset, *, is_saved: bool = False
    ) -> None:
        if stream.name == subscription.config.wake_stream:
            return  # Each wake would be work for the next one.
        link = subscription.links.get(stream.name)
        if link is None:
            # A saved cursor is always restored: without it, work would be repeated.
            if not is_saved and not self._is_within_limits(subscription):
                self._defer(subscription)
                return
            link = Link(subscription, stream.name)
            self._register(link)
            link.is_saved = is_saved
        link.by_pattern = True
        if link.stream is stream:
            return
        self._attach(link, stream, cursor)
        if cursor != stream.base and not link.is_saved:
            self._save(link, link.saved())

    def _attach(self, link: Link, stream: LiveStream, cursor: Offset) -> None:
        link.stream = stream
        link.acked = cursor
        # Follow first, then check the tail, so that no append is missed.
        self._engine.follow(stream, link, reading=False)
        link.wake()

    def _save(self, link: Link, saved: SavedLink) -> None:
        self._engine.put_document(link_key(link.subscription.id, link.name), encode_saved(saved), None, None)
        link.is_saved = True

    def _forget_explicit(self, subscription: Subscription, name: str) -> None:
        owners = self._explicit.get(name)
        if owners is not None:
            owners.pop(subscription, None)
            if not owners:
                del self._explicit[name]


def _cursor(saved: SavedLink | None, stream: LiveStream) -> Offset:
    """The offset of a saved cursor: the beginning if it was saved for an earlier stream of that name."""
    if saved is None or saved.stream_id != stream.id:
        return stream.base
    return Offset(saved.message_index, saved.byte_position)


def _tail(stream: LiveStream) -> Offset:
    return Offset(stream.durable_index, stream.durable_position)
