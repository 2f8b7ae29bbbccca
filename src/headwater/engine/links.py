"""Links: which subscriptions follow which streams, by name and by pattern, and where their cursors are saved.

`link/{id}/{stream}` saves an explicit link, or a cursor that has moved. A stream that matches a pattern and has no
saved cursor is at its beginning. So linking a new stream writes nothing, a crash between its creation and its link
cannot lose its first message, and a link that has to wait for room loses nothing either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from headwater.core.buckets import is_bucketed
from headwater.core.errors import InternalError, Refusal
from headwater.core.globs import GlobIndex
from headwater.core.offsets import Offset
from headwater.core.subscriptions import SavedLink, decode_link, encode_saved
from headwater.engine.engine import Engine
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream
from headwater.engine.subscription import Link, Subscription

log = logging.getLogger("headwater.subscriptions")

LINK_PREFIX: Final = "link/"


def link_key(subscription_id: str, name: str) -> str:
    return f"{LINK_PREFIX}{quote(subscription_id, safe='')}/{name}"


def as_refusal(error: Exception, work: str) -> Refusal:
    """The answer to a request whose work raised: its refusal, or for a bug a 500 with the cause in the log."""
    if isinstance(error, Refusal):
        return error
    log.error("%s failed unexpectedly", work, exc_info=error)
    return InternalError("The request failed because of an internal error. The server's log has the details.")


class Links:
    def __init__(self, engine: Engine, slices: Slices, mark_dirty: Callable[[Subscription], None]) -> None:
        self._engine = engine
        self._slices = slices
        self._mark_dirty = mark_dirty
        self._globs: GlobIndex[Subscription] = GlobIndex()
        self._explicit: dict[str, dict[Subscription, None]] = {}

    # -- subscriptions are created and deleted -----------------------------------------------------------------------

    def begin(self, subscription: Subscription, done: Callable[[Refusal | None], None]) -> None:
        """Link a new subscription to the existing streams, each at its current tail.

        It happens in slices, so that other clients do not wait for it. Streams that are created or deleted meanwhile
        are linked and unlinked as usual. No worker is woken before the subscription is ready.
        """
        names: list[str] = []
        if subscription.glob is not None:
            self._globs.add(subscription.glob, subscription)
            names = [name for name in self._engine.catalog.by_name if is_bucketed(name) == subscription.follows_buckets]
        self._slices.add(self._link_existing(subscription, names), partial(self._begun, subscription, done))

    def _link_existing(self, subscription: Subscription, names: Iterable[str]) -> Iterator[None]:
        for name in subscription.config.streams:
            self.add(subscription, name)
            yield
        own: GlobIndex[None] = GlobIndex()
        if subscription.glob is not None:
            own.add(subscription.glob, None)
        by_name = self._engine.catalog.by_name
        for name in names:
            stream = by_name.get(name)
            if stream is not None and stream.visible and not stream.deleted and own.match(name):
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
        if subscription.glob is not None:
            self._globs.discard(subscription.glob, subscription)
        self._slices.add(self._unlink_all(subscription), partial(self._ended, subscription, done))

    def _unlink_all(self, subscription: Subscription) -> Iterator[None]:
        is_writable = True
        while subscription.links:
            name, link = subscription.links.popitem()
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
        """Link a stream explicitly, at its current tail unless it is linked already."""
        link = subscription.links.get(name) or Link(subscription, name)
        if link.explicit:
            return
        stream, cursor = link.stream, link.acked
        if stream is None:
            found = self._engine.catalog.by_name.get(name)
            if found is not None and found.visible and not found.deleted:
                stream, cursor = found, _tail(found)
        self._save(link, SavedLink(True, stream.id if stream is not None else 0, cursor.index, cursor.position))
        link.explicit = True
        subscription.links[name] = link
        self._explicit.setdefault(name, {})[subscription] = None
        if stream is not None and link.stream is None:
            self._attach(link, stream, cursor)

    def remove(self, subscription: Subscription, name: str) -> None:
        """Remove an explicit link. If a pattern matches the stream too, it stays linked by that."""
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
            del subscription.links[name]
            self._mark_dirty(subscription)
        self._forget_explicit(subscription, name)

    # -- streams are created and deleted -----------------------------------------------------------------------------

    def stream_created(self, stream: LiveStream) -> None:
        """Link a new stream that is durable, before its creation is answered and before its first append."""
        for subscription in self._explicit.get(stream.name, ()):
            self._attach(subscription.links[stream.name], stream, stream.base)
        for subscription in self._matching(stream.name):
            self._link_by_pattern(subscription, stream, stream.base)

    def stream_ended(self, link: Link) -> None:
        """An explicit link waits for the next stream of that name; a link by pattern ends with its stream."""
        link.detach()
        link.by_pattern = False
        subscription = link.subscription
        if not link.explicit:
            subscription.links.pop(link.name, None)
            if link.is_saved:
                self.remove_document(link_key(subscription.id, link.name))
        self._mark_dirty(subscription)

    # -- cursors -----------------------------------------------------------------------------------------------------

    def move(self, link: Link, offset: Offset) -> None:
        """Mark everything before `offset` as processed. The new cursor is saved before it takes effect."""
        if offset == link.acked and link.is_saved:
            return
        self._save(link, msgspec.structs.replace(link.saved(), index=offset.index, position=offset.position))
        link.move(offset)

    def remove_document(self, key: str) -> bool:
        """Remove a saved document; False if storage refused, and then the next start removes it."""
        try:
            self._engine.put_document(key, None, None, None)
        except Refusal as refusal:
            log.warning("%s could not be removed and will be at the next start: %s", key, refusal.detail)
            return False
        return True

    # -- recovery ----------------------------------------------------------------------------------------------------

    def restore(self, subscriptions: dict[str, Subscription], documents: dict[str, bytes]) -> None:
        """Restore the links of the last run, and remove the cursors of streams and subscriptions that are gone."""
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
                self._globs.add(subscription.glob, subscription)
        self._restore_patterns(cursors)
        for key in keys:
            quoted, _, name = key.removeprefix(LINK_PREFIX).partition("/")
            subscription = subscriptions.get(unquote(quoted))
            if subscription is None or name not in subscription.links:
                self.remove_document(key)

    def _restore_explicit(self, subscription: Subscription, name: str, saved: SavedLink) -> None:
        link = subscription.links[name] = Link(subscription, name)
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

    # -- inside ------------------------------------------------------------------------------------------------------

    def _matching(self, name: str) -> list[Subscription]:
        """The subscriptions whose pattern matches a name. Wildcards never lead from one surface to the other."""
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
            link = subscription.links[stream.name] = Link(subscription, stream.name)
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
        # Follow first, then look at the tail: no append can fall between the two.
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
    """Where a saved cursor is on a stream: at the beginning if it was saved for an earlier stream of that name."""
    if saved is None or saved.stream_id != stream.id:
        return stream.base
    return Offset(saved.index, saved.position)


def _tail(stream: LiveStream) -> Offset:
    return Offset(stream.durable_index, stream.durable_position)
