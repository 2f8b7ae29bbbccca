"""The index of all streams: ordered names for listings, and the streams that changed after a cursor.

The index is built when it is first used, in slices, and kept up to date after that, so a server without such requests
has no cost. A change is anything that readers see: a stream was created, appended to, closed, trimmed or deleted.
A cursor is a number of changes of this run of the server. Invariant: for every cursor that is not refused, the streams
that changed after it are known.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol, TypeAlias

import msgspec
from sortedcontainers import SortedSet

from headwater.core.errors import Refusal
from headwater.core.names import is_client_name
from headwater.engine.buckets import find_streams
from headwater.engine.change_log import ChangeLog, ChangeSearch
from headwater.engine.committer import guarded
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream
from headwater.engine.stream_host import StreamAnnouncer

AT_ONCE_MAX: Final = 128
"""Waiters up to which all are woken at once. Waking one that has a response takes about 30 microseconds."""
STEP_WAITERS: Final = 4
"""Waiters that are woken in one step of a slice."""
STEP_PREFIXES: Final = 200
"""Prefixes of waiters that are compared with the changed names in one step."""
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

    def wake(self, cursor: str) -> None:
        """A stream with the prefix has changed. All changes that the waiter does not know are after `cursor`. It is
        woken once: it must call `wait` to be woken again."""


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
        self._log = ChangeLog()
        self._waiters: dict[str, dict[ChangeWaiter, int]] = {}
        """By prefix; with each waiter the number of changes when it began to wait."""
        self._waiting = 0
        """The number of waiters."""
        self._changed: set[str] = set()
        """Names that changed since the waiters were woken."""
        self._changed_since = 0
        """The number of changes before these."""
        self._is_waking = False

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
        self._after_built(lambda: self._changes(prefix, cursor, limit, done))

    def _changes(self, prefix: str, cursor: str | None, limit: int, done: OnChangePage) -> None:
        since = self._parse_cursor(cursor) if cursor is not None else self._log.count
        if since is None:
            done(self._page_at_end(is_complete=False))
            return
        search = ChangeSearch(self._log, since, limit + 1, lambda name: _matches(name, prefix))
        steps = search.steps()

        def finish(error: Exception | None) -> None:
            assert error is None, "names are only compared"
            done(self._found(search, limit))

        # Many changes of streams with other prefixes can precede those that are found.
        if any(True for _ in islice(steps, 1)):
            self._slices.add(steps, finish)
        else:
            finish(None)

    def _found(self, search: ChangeSearch, limit: int) -> ChangePage:
        if not search.is_complete:
            return self._page_at_end(is_complete=False)
        found = list(islice(search.found.items(), limit))
        changes = tuple(StreamChange(name, self._visible(name)) for name, _ in found)
        if len(search.found) <= limit:
            return self._page_at_end(changes)
        return ChangePage(changes, self._format_cursor(found[-1][1]), has_more=True, is_complete=True)

    def _page_at_end(self, changes: tuple[StreamChange, ...] = (), *, is_complete: bool = True) -> ChangePage:
        return ChangePage(changes, self._format_cursor(self._log.count), has_more=False, is_complete=is_complete)

    def wait(self, waiter: ChangeWaiter) -> None:
        """Wake the waiter once, after the next change of a stream with its prefix. It must know all changes so far."""
        self._waiters.setdefault(waiter.prefix, {})[waiter] = self._log.count
        self._waiting += 1

    def leave(self, waiter: ChangeWaiter) -> None:
        waiters = self._waiters.get(waiter.prefix)
        if waiters is not None and waiters.pop(waiter, None) is not None:
            self._waiting -= 1
            if not waiters:
                del self._waiters[waiter.prefix]

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
        if self._waiters:
            if not self._changed:
                self._changed_since = self._log.count
                if not self._is_waking:
                    self._scheduler.soon(self._wake)
            self._changed.add(stream.name)
        self._log.add(stream.name)

    def _wake(self) -> None:
        changed, self._changed = self._changed, set()
        steps = self._waking(sorted(changed), self._changed_since, self._log.count)
        if self._waiting > AT_ONCE_MAX:
            self._is_waking = True
            self._slices.add(steps, self._on_woken)
        else:
            for _ in steps:
                pass

    def _waking(self, changed: Sequence[str], since: int, until: int) -> Iterator[None]:
        """Wake those who wait for one of these names, which changed after `since`, up to `until`."""
        client_names = [name for name in changed if is_client_name(name)]
        for compared, prefix in enumerate(tuple(self._waiters), 1):
            if _has_prefix(client_names if is_client_name(prefix) else changed, prefix):
                waiters = iter(tuple(self._waiters.get(prefix, {}).items()))
                while step := tuple(islice(waiters, STEP_WAITERS)):
                    for waiter, waits_since in step:
                        if waits_since < until and self._waiters.get(prefix, {}).get(waiter) == waits_since:
                            self.leave(waiter)
                            guarded(waiter.wake, self._format_cursor(max(since, waits_since)))
                    yield
            if not compared % STEP_PREFIXES:
                yield

    def _on_woken(self, error: Exception | None) -> None:
        assert error is None, "each waiter is guarded"
        self._is_waking = False
        if self._changed:
            self._scheduler.soon(self._wake)

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
        return since if run == self._run and self._log.floor <= since <= self._log.count else None


def _has_prefix(names: Sequence[str], prefix: str) -> bool:
    """Whether one of these sorted names has the prefix."""
    at = bisect_left(names, prefix)
    return at < len(names) and names[at].startswith(prefix)


def _matches(name: str, prefix: str) -> bool:
    """Whether a listing of the prefix contains the stream. Streams of buckets are only in the listings of their
    buckets."""
    return name.startswith(prefix) and (is_client_name(name) or not is_client_name(prefix))
