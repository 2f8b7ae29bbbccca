"""Links: which subscriptions follow which streams, by name and by pattern, and where their cursors are kept.

`link/{id}/{stream}` keeps an explicit link, or a cursor that has moved. A stream that matches a pattern and has no
saved cursor stands at its beginning: so linking a new stream writes nothing, and a crash between its creation and its
link cannot lose its first message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from headwater.core.errors import InternalError, Refusal
from headwater.core.globs import GlobIndex
from headwater.core.names import is_client_name
from headwater.core.offsets import Offset
from headwater.core.subscriptions import SavedLink, decode_link, encode_saved
from headwater.engine.engine import Engine
from headwater.engine.scheduler import Scheduler
from headwater.engine.stream import LiveStream
from headwater.engine.subscription import Link, Subscription

log = logging.getLogger("headwater.subscriptions")

LINK_PREFIX: Final = "link/"
SLICE: Final = 2_000
"""Streams that a new subscription looks at in one tick: about ten milliseconds."""


def link_key(subscription_id: str, name: str) -> str:
    return f"{LINK_PREFIX}{quote(subscription_id, safe='')}/{name}"


def as_refusal(error: Exception, work: str) -> Refusal:
    """The answer to a request whose work raised: its refusal, or for a bug a 500 with the cause in the log."""
    if isinstance(error, Refusal):
        return error
    log.error("%s failed unexpectedly", work, exc_info=error)
    return InternalError("The request could not be completed because of an internal error; the server's log has it.")


class Links:
    def __init__(self, engine: Engine, scheduler: Scheduler, stir: Callable[[Subscription], None]) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._stir = stir
        self._globs: GlobIndex[Subscription] = GlobIndex()
        self._explicit: dict[str, dict[Subscription, None]] = {}

    # -- subscriptions come and go -----------------------------------------------------------------------------------

    def begin(self, subscription: Subscription, done: Callable[[Refusal | None], None]) -> None:
        """Link a new subscription to what there is, each stream at its current tail.

        Where there is a lot it takes several ticks, so that nobody else has to wait for it. Streams that come and go
        meanwhile are linked and let go as ever; nobody is woken before the subscription is ready.
        """
        try:
            for name in subscription.config.streams:
                self.add(subscription, name)
        except Exception as error:
            self._give_up(subscription, done, error)
            return
        names: list[str] = []
        only: GlobIndex[None] = GlobIndex()
        if subscription.glob is not None:
            self._globs.add(subscription.glob, subscription)
            only.add(subscription.glob, None)
            names = list(self._engine.catalog.by_name)
        self._link_slice(subscription, only, names, 0, done)

    def _link_slice(
        self,
        subscription: Subscription,
        only: GlobIndex[None],
        names: list[str],
        start: int,
        done: Callable[[Refusal | None], None],
    ) -> None:
        by_name = self._engine.catalog.by_name
        try:
            for name in names[start : start + SLICE]:
                stream = by_name.get(name)
                if stream is None or not stream.visible or stream.deleted or not is_client_name(name):
                    continue
                if only.match(name):
                    self._link_by_pattern(subscription, stream, _tail(stream))
        except Exception as error:
            self._give_up(subscription, done, error)
            return
        if start + SLICE < len(names):
            self._scheduler.soon(partial(self._link_slice, subscription, only, names, start + SLICE, done))
        else:
            done(None)

    def _give_up(self, subscription: Subscription, done: Callable[[Refusal | None], None], error: Exception) -> None:
        """Undo what was linked and answer: whatever went wrong, somebody waits for the answer."""
        try:
            self.end(subscription)
        finally:
            done(as_refusal(error, f"linking subscription {subscription.id!r}"))

    def end(self, subscription: Subscription) -> None:
        """Follow nothing for it any more, and forget its cursors."""
        if subscription.glob is not None:
            self._globs.discard(subscription.glob, subscription)
        for link in subscription.links.values():
            if link.explicit:
                self._forget_explicit(subscription, link.name)
            if link.stream is not None:
                self._engine.unfollow(link.stream, link)
            if link.is_saved:
                self.remove_document(link_key(subscription.id, link.name))

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
        """Take an explicit link away; one by pattern stays."""
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
            self._stir(subscription)
        self._forget_explicit(subscription, name)

    # -- streams come and go -----------------------------------------------------------------------------------------

    def stream_created(self, stream: LiveStream) -> None:
        """A new stream is durable, and nobody was told of it yet: link it before its first message counts."""
        for subscription in self._explicit.get(stream.name, ()):
            self._attach(subscription.links[stream.name], stream, stream.base)
        if not self._globs.is_empty and is_client_name(stream.name):
            for subscription in self._globs.match(stream.name):
                self._link_by_pattern(subscription, stream, stream.base)

    def stream_ended(self, link: Link) -> None:
        """An explicit link waits for the next stream of that name; the other goes with its stream."""
        link.detach()
        link.by_pattern = False
        subscription = link.subscription
        if not link.explicit:
            subscription.links.pop(link.name, None)
            if link.is_saved:
                self.remove_document(link_key(subscription.id, link.name))
        self._stir(subscription)

    # -- cursors -----------------------------------------------------------------------------------------------------

    def move(self, link: Link, offset: Offset) -> None:
        """Everything before `offset` is processed; saved before it is true."""
        if offset == link.acked and link.is_saved:
            return
        self._save(link, msgspec.structs.replace(link.saved(), index=offset.index, position=offset.position))
        link.move(offset)

    def remove_document(self, key: str) -> None:
        """Where storage takes no writes just now, the document stays behind and the next start drops it."""
        try:
            self._engine.put_document(key, None, None, None)
        except Refusal as refusal:
            log.warning("%s stays behind: %s", key, refusal.detail)

    # -- recovery ----------------------------------------------------------------------------------------------------

    def restore(self, subscriptions: dict[str, Subscription], documents: dict[str, bytes]) -> None:
        """Attach what the last run had linked, and drop the cursors of what is gone."""
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
        if not self._globs.is_empty:
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
            if stream.deleted or not is_client_name(stream.name):
                continue
            for subscription in self._globs.match(stream.name):
                saved = cursors.get((subscription.id, stream.name))
                self._link_by_pattern(subscription, stream, _cursor(saved, stream), is_saved=saved is not None)

    # -- inside ------------------------------------------------------------------------------------------------------

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
        # Follow first, then look at the tail: no wake-up can fall between the two.
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
    """Where a saved cursor stands on a stream; on another incarnation than it was saved for, at the beginning."""
    if saved is None or saved.stream_id != stream.id:
        return stream.base
    return Offset(saved.index, saved.position)


def _tail(stream: LiveStream) -> Offset:
    return Offset(stream.durable_index, stream.durable_position)
