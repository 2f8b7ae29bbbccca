"""The index of all streams: ordered names for listings, and the streams that changed after a cursor.

The index is built when it is first used, in slices, and kept up to date after that, so a server without such requests
has no cost. A change is anything that readers see: a stream was created, appended to, closed, trimmed or deleted.
A cursor is a number of changes of this run of the server. Invariant: for every cursor that is not refused, the streams
that changed after it are known.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Final, Protocol, TypeAlias

import msgspec
from sortedcontainers import SortedSet

from headwater.core.errors import Refusal
from headwater.core.names import is_client_name
from headwater.engine.buckets import find_streams
from headwater.engine.committer import guarded
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import StreamAnnouncer

CHANGES_MAX: Final = 200_000
"""Streams whose last change is kept. A client that is further behind lists all streams again."""
_NAMES_PER_STEP: Final = 500


class IndexPage(msgspec.Struct, frozen=True, gc=False):
    """A part of a listing."""

    streams: tuple[LiveStream, ...]
    has_more: bool


class StreamChange(msgspec.Struct, frozen=True, gc=False):
    """A stream that changed; None for the stream if it was deleted."""

    name: str
    stream: LiveStream | None


class ChangePage(msgspec.Struct, frozen=True, gc=False):
    """Streams that changed after a cursor, in the order of their last changes."""

    changes: tuple[StreamChange, ...]
    cursor: str
    has_more: bool
    is_complete: bool
    """False if the cursor is unknown: the client must list the streams again."""


class ChangeWaiter(Protocol):
    """A request that waits for changes."""

    prefix: str

    def wake(self) -> None:
        """A stream with the prefix has changed."""


class IndexHost(Protocol):
    """The part of the engine that the index uses."""

    def now_ms(self) -> int: ...

    def seen(self, name: str) -> LiveStream | None: ...

    def watch_changes(self, on_changed: Callable[[LiveStream], None]) -> None: ...

    def names(self) -> Iterator[str]:
        """The names of all streams, pending ones included."""


OnIndexPage: TypeAlias = Callable[[IndexPage | Refusal], None]
OnChangePage: TypeAlias = Callable[[ChangePage | Refusal], None]


class StreamIndex:
    def __init__(self, host: IndexHost, publisher: StreamAnnouncer, scheduler: Scheduler) -> None:
        self._host = host
        self._publisher = publisher
        self._scheduler = scheduler
        self._slices = Slices(scheduler)
        self._names: SortedSet | None = None
        self._when_built: list[Callable[[], None]] = []
        self._run = secrets.token_hex(8)
        self._count = 0
        """The number of changes so far, which is the cursor."""
        self._floor = 0
        """Changes up to this number may have been dropped."""
        self._last_change: dict[str, int] = {}
        """The number of the last change of each stream, in ascending order."""
        self._waiters: set[ChangeWaiter] = set()
        self._changed: set[str] = set()
        """Names that changed since the waiters were woken."""

    # -- queries ---------------------------------------------------------------------------------------------------

    def page(self, prefix: str, after: str | None, limit: int, done: OnIndexPage) -> None:
        """The first `limit` streams with a prefix whose names come after `after`."""

        def found() -> None:
            assert self._names is not None
            now_ms = self._host.now_ms()

            def alive(name: str) -> LiveStream | None:
                stream = self._host.seen(name)
                return stream if stream is not None and not stream.expired(now_ms) else None

            def complete(streams: tuple[LiveStream, ...]) -> None:
                done(IndexPage(streams[:limit], len(streams) > limit))

            find_streams(self._names, prefix, after, limit + 1, alive, self._slices, complete)

        self._after_built(found)

    def changes(self, prefix: str, cursor: str | None, limit: int, done: OnChangePage) -> None:
        """The streams with a prefix that changed after a cursor; without a cursor none, and the current cursor."""
        self._after_built(lambda: done(self.changes_now(prefix, cursor, limit)))

    def changes_now(self, prefix: str, cursor: str | None, limit: int) -> ChangePage:
        """As `changes`, for an index that has been built."""
        if cursor is None:
            return ChangePage((), self._format_cursor(self._count), has_more=False, is_complete=True)
        since = self._parse_cursor(cursor)
        if since is None:
            return ChangePage((), self._format_cursor(self._count), has_more=False, is_complete=False)
        changed = takewhile(lambda item: item[1] > since, reversed(self._last_change.items()))
        found = [item for item in changed if _matches(item[0], prefix)]
        found.reverse()
        changes = tuple(StreamChange(name, self._visible(name)) for name, _ in found[:limit])
        has_more = len(found) > limit
        last = found[limit - 1][1] if has_more else self._count
        return ChangePage(changes, self._format_cursor(last), has_more, is_complete=True)

    def wait(self, waiter: ChangeWaiter) -> None:
        """Wake the waiter after the next change of a stream with its prefix."""
        self._waiters.add(waiter)

    def leave(self, waiter: ChangeWaiter) -> None:
        self._waiters.discard(waiter)

    # -- building and updating -------------------------------------------------------------------------------------

    def _after_built(self, then: Callable[[], None]) -> None:
        if self._names is not None and not self._when_built:
            then()
            return
        self._when_built.append(then)
        if self._names is None:
            self._names = SortedSet()
            self._publisher.on_created.append(self._created)
            self._publisher.on_deleted.append(self._deleted)
            self._host.watch_changes(self._mark)
            self._slices.add(self._build(tuple(self._host.names())), self._built)

    def _build(self, names: tuple[str, ...]) -> Iterator[None]:
        assert self._names is not None
        for at in range(0, len(names), _NAMES_PER_STEP):
            names_of_step = names[at : at + _NAMES_PER_STEP]
            self._names.update(name for name in names_of_step if is_client_name(name) and self._host.seen(name))
            yield

    def _built(self, error: Exception | None) -> None:
        assert error is None, "names are only copied"
        waiting, self._when_built = self._when_built, []
        for then in waiting:
            guarded(then)

    def _created(self, stream: LiveStream) -> None:
        assert self._names is not None
        if is_client_name(stream.name):
            self._names.add(stream.name)

    def _deleted(self, stream: LiveStream) -> None:
        assert self._names is not None
        if self._host.seen(stream.name) is None:
            self._names.discard(stream.name)

    def _mark(self, stream: LiveStream) -> None:
        """Record a change of a stream."""
        name = stream.name
        self._count += 1
        self._last_change.pop(name, None)
        self._last_change[name] = self._count
        if len(self._last_change) > CHANGES_MAX:
            oldest = next(iter(self._last_change))
            self._floor = self._last_change.pop(oldest)
        if self._waiters:
            if not self._changed:
                self._scheduler.soon(self._wake)
            self._changed.add(name)

    def _wake(self) -> None:
        changed, self._changed = self._changed, set()
        for waiter in tuple(self._waiters):
            if any(_matches(name, waiter.prefix) for name in changed):
                guarded(waiter.wake)

    def _visible(self, name: str) -> LiveStream | None:
        stream = self._host.seen(name)
        return stream if stream is not None and not stream.expired(self._host.now_ms()) else None

    def _format_cursor(self, count: int) -> str:
        return f"{self._run}_{count:x}"

    def _parse_cursor(self, cursor: str) -> int | None:
        """The number of a cursor, or None if it is from another run or too old."""
        run, _, count = cursor.partition("_")
        try:
            since = int(count, 16)
        except ValueError:
            return None
        return since if run == self._run and self._floor <= since <= self._count else None


def _matches(name: str, prefix: str) -> bool:
    """Whether a listing of the prefix contains the stream. Streams of buckets are only in the listings of their
    buckets."""
    return name.startswith(prefix) and (is_client_name(name) or not is_client_name(prefix))
