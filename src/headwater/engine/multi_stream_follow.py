"""Follow many streams at once: a cursor on each, and a queue of those that have more data.

A response over many streams uses only `start`, `next_event` and `close`. Invariant: every stream that has more data is
in the queue, once, and streams take turns. So a busy stream cannot starve the others, and a slow client costs only its
cursors and the ends of streams that it has not read; both count towards one limit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from headwater.core.errors import Refusal, TooManyFollowed
from headwater.core.offsets import BEGINNING, NOW, Offset
from headwater.engine.cold_reads import ColdRead
from headwater.engine.publisher import StreamPublisher
from headwater.engine.reading import ReadChunk, StreamReader, gone_before
from headwater.engine.scheduler import Scheduler
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream, StreamFollower
from headwater.engine.stream_index import IndexPage, StreamIndex

log = logging.getLogger("headwater.engine")

STEP_BYTES: Final = 64 * 1024
"""Maximum payload of one stream in one turn."""
STEP_MESSAGES: Final = 1_000
"""Maximum messages of one stream in one turn, if each of them is encoded."""
_PAGE: Final = 50
"""Streams of a prefix that are added in one step."""


@dataclass(frozen=True, slots=True)
class FollowRequest:
    """The streams to follow: by name with an offset each, and all that have a prefix."""

    offsets: Mapping[str, str]
    prefix: str | None = None
    start: str = BEGINNING
    """Where to start in streams of the prefix that are not in `offsets`; new streams start at their beginning."""

    def wants(self, name: str) -> bool:
        return name in self.offsets or (self.prefix is not None and name.startswith(self.prefix))


@dataclass(frozen=True, slots=True)
class FollowedChunk:
    """Messages of one of the streams; empty if it only reports that the stream is closed."""

    name: str
    chunk: ReadChunk


@dataclass(frozen=True, slots=True)
class FollowProblem:
    """A stream that cannot be followed (any more). If it is created later, it is followed again."""

    name: str
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class FollowBeginning:
    """The start offset of a stream that is followed from `now`: a later connection continues there."""

    name: str
    stream: LiveStream
    offset: Offset


class FollowHost(Protocol):
    """The part of the engine that followers of many streams use."""

    reader: StreamReader
    publisher: StreamPublisher
    index: StreamIndex

    def look_up(self, name: str, *, touch: bool = False) -> LiveStream: ...

    def touch(self, stream: LiveStream) -> None: ...

    def follow(self, stream: LiveStream, follower: StreamFollower) -> None: ...

    def unfollow(self, stream: LiveStream, follower: StreamFollower) -> None: ...


class Follows:
    """All followers of many streams, and the limit on what they follow together."""

    def __init__(self, engine: FollowHost, scheduler: Scheduler, max_streams: int) -> None:
        self.engine: Final = engine
        self.scheduler: Final = scheduler
        self.slices: Final = Slices(scheduler)
        self.max_streams: Final = max_streams
        self.cursors = 0
        """Streams that are followed, and problems of streams that are not sent yet; counted once for each follower."""
        self.elsewhere = 0
        """The same number in other workers of the server."""
        self.on_change: Callable[[], None] | None = None
        self._open: dict[ManyFollower, None] = {}
        self._created_names: deque[str] = deque()
        """New streams that have not been announced to followers yet; at most `max_streams`."""
        self._is_announcing = False

    def __len__(self) -> int:
        return len(self._open)

    def follow(
        self,
        wanted: FollowRequest,
        allows: Callable[[str], bool],
        on_ready: Callable[[], None],
        is_here: Callable[[str], bool] | None = None,
    ) -> ManyFollower:
        """Follow streams; `on_ready` is called when `next_event` has an event again. `allows` filters the prefix. Of
        the streams that exist at the start, those of other workers are skipped (`is_here`)."""
        return ManyFollower(self, wanted, allows, on_ready, is_here)

    def add(self, follower: ManyFollower) -> None:
        if not self._open and self._created not in self.engine.publisher.on_created:
            self.engine.publisher.on_created.append(self._created)
        self._open[follower] = None

    def discard(self, follower: ManyFollower) -> None:
        self._open.pop(follower, None)

    def has_room(self) -> bool:
        """Whether one more stream can be followed. If not, the follower that has read the fewest problems fails."""
        if self.cursors + self.elsewhere >= self.max_streams:
            slowest = max(self._open, key=lambda follower: follower.unsent, default=None)
            if slowest is None or not slowest.unsent:
                return False
            slowest.fail(
                f"The client has not read that {slowest.unsent} streams ended (limits.max_followed_streams counts"
                " them); read faster, and send the POST again."
            )
        return self.cursors + self.elsewhere < self.max_streams

    def count(self, cursors: int) -> None:
        """Count streams that are followed now, or with a negative number no longer."""
        self.cursors += cursors
        if self.on_change is not None:
            self.on_change()

    def end_excess(self) -> None:
        """End the last follower if other workers followed too many streams at the same moment."""
        if self.cursors and self.cursors + self.elsewhere > self.max_streams:
            last = next((follower for follower in reversed(self._open) if follower.failure is None), None)
            if last is not None:
                last.fail_over_limit()

    def _created(self, stream: LiveStream) -> None:
        if self._open:
            if len(self._created_names) >= self.max_streams:
                self._end_all()
            self._created_names.append(stream.name)
            self._announce()

    def _end_all(self) -> None:
        """End all followers, because they would miss new streams; they find them when they begin again."""
        self._created_names.clear()
        for follower in tuple(self._open):
            if follower.failure is None:
                follower.fail(
                    f"{self.max_streams} streams were created faster than they could be announced"
                    " (limits.max_followed_streams); send the POST again."
                )

    def _announce(self) -> None:
        if self._created_names and not self._is_announcing:
            self._is_announcing = True
            self.slices.add(self._announce_all(), self._announced)

    def _announced(self, error: Exception | None) -> None:
        self._is_announcing = False
        if error is not None:
            log.error("a new stream could not be announced to a follower", exc_info=error)
        self._announce()

    def _announce_all(self) -> Iterator[None]:
        """Announce every new stream to every follower: there may be many of both, and each follower sends at once."""
        while self._created_names:
            name = self._created_names.popleft()
            for follower in tuple(self._open):
                follower.on_created(name)
                yield


class _Cursor:
    """The position in one stream."""

    __slots__ = ("at", "many", "name", "stream")

    def __init__(self, many: ManyFollower, name: str, stream: LiveStream, at: Offset) -> None:
        self.many = many
        self.name = name
        self.stream = stream
        self.at = at

    @property
    def has_more(self) -> bool:
        return self.at.message_index != self.stream.durable_index or self.stream.durable_closed

    def wake(self) -> None:
        self.many.mark(self)

    def gone(self, refusal: Refusal) -> None:
        self.many.drop(self, refusal)


class ManyFollower:
    def __init__(
        self,
        follows: Follows,
        wanted: FollowRequest,
        allows: Callable[[str], bool],
        on_ready: Callable[[], None],
        is_here: Callable[[str], bool] | None,
    ) -> None:
        self._follows = follows
        self._engine = follows.engine
        self._wanted = wanted
        self._allows = allows
        self._on_ready = on_ready
        self._is_here = is_here
        self._cursors: dict[str, _Cursor] = {}
        self._ready: dict[_Cursor, None] = {}
        """Cursors with more to read, in the order of their turns."""
        self._notices: deque[FollowProblem | FollowBeginning] = deque()
        self.unsent = 0
        """The number of problems in `_notices`."""
        self._open = False
        self.failure: Refusal | None = None
        """Why the follower cannot continue: it follows too many streams."""
        self.is_complete = False
        """Whether all streams that existed at the start have been added."""

    def start(self) -> None:
        self._open = True
        self._follows.add(self)
        self._follows.slices.add(self._add_named(), self._on_named_added)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._follows.discard(self)
        self._forget_notices()
        self._follows.count(-len(self._cursors))
        self._ready.clear()
        cursors, self._cursors = list(self._cursors.values()), {}
        # In slices, because there may be many, and `unfollow` may save the last use of a stream.
        self._follows.slices.add(self._unfollow_all(cursors), _ignore)

    def next_event(self) -> FollowedChunk | FollowProblem | FollowBeginning | None:
        """The next event to send; None if there is none now, in which case `on_ready` will be called."""
        if self._notices:
            notice = self._notices.popleft()
            if isinstance(notice, FollowProblem):
                self.unsent -= 1
                self._follows.count(-1)
            return notice
        while self._ready:
            cursor = next(iter(self._ready))
            del self._ready[cursor]
            if not cursor.has_more:
                continue
            try:
                if not self._engine.reader.is_tiered:
                    return self._read(cursor)
                with self._engine.reader.deferring():
                    return self._read(cursor)
            except ColdRead as miss:
                miss.when_fetched(self._follows.scheduler, partial(self._fetched, cursor))
            except Refusal as refusal:
                self._remove(cursor)
                return FollowProblem(cursor.name, refusal)
        return None

    def _fetched(self, cursor: _Cursor, refusal: Refusal | None) -> None:
        """Continue with a stream after its data was fetched from the object store, or could not be fetched."""
        if self._cursors.get(cursor.name) is not cursor:
            return
        if refusal is None:
            self.mark(cursor)
        else:
            self.drop(cursor, refusal)

    def _read(self, cursor: _Cursor) -> FollowedChunk:
        stream = cursor.stream
        if cursor.at.message_index < stream.durable_retained_index:
            raise gone_before(stream)
        reader = self._engine.reader
        chunk = reader.chunk(stream, cursor.at, STEP_BYTES)
        if not stream.type.json and chunk.end.message_index - chunk.start.message_index > STEP_MESSAGES:
            end = reader.first_messages(stream, chunk.start, chunk.end, STEP_MESSAGES)
            chunk = reader.run(stream, chunk.start, end, STEP_BYTES)
        if reader.is_tiered:
            # Load it now: the code that sends it cannot wait.
            reader.fetch(chunk)
            reader.lengths(chunk)
        self._engine.touch(stream)
        cursor.at = chunk.end
        if chunk.closed:
            self._remove(cursor)
        elif not chunk.up_to_date:
            self._ready[cursor] = None
        return FollowedChunk(cursor.name, chunk)

    # -- added and removed streams -----------------------------------------------------------------------------------

    def mark(self, cursor: _Cursor) -> None:
        """Queue a stream that may have more data."""
        self._ready[cursor] = None
        self._on_ready()

    def drop(self, cursor: _Cursor, refusal: Refusal) -> None:
        """Stop following a stream that was deleted, or cannot be read any further."""
        self._remove(cursor)
        self._report(FollowProblem(cursor.name, refusal))

    def fail(self, detail: str) -> None:
        """End the response with a problem, and forget what was not sent."""
        self._forget_notices()
        self.failure = TooManyFollowed(detail)
        self._on_ready()

    def fail_over_limit(self) -> None:
        self.fail(
            f"All followers together follow {self._follows.max_streams} streams, which is the limit"
            " (limits.max_followed_streams); follow fewer streams, or raise it."
        )

    def on_created(self, name: str) -> None:
        if not self._open or self.failure is not None or name in self._cursors:
            return
        if not self._wanted.wants(name) or not self._allows(name):
            return
        try:
            self._engine.look_up(name)
        except Refusal:
            # It was deleted in the meantime.
            return
        self._add(name, BEGINNING)

    def _add(self, name: str, offset: str) -> None:
        if not self._follows.has_room() or self.failure is not None:
            if self.failure is None:
                self.fail_over_limit()
            return
        try:
            stream = self._engine.look_up(name, touch=True)
            cursor = _Cursor(self, name, stream, self._engine.reader.begin(stream, offset))
        except Refusal as refusal:
            self._report(FollowProblem(name, refusal))
            return
        self._cursors[name] = cursor
        self._follows.count(1)
        self._engine.follow(stream, cursor)
        if offset == NOW:
            self._notices.append(FollowBeginning(name, stream, cursor.at))
            self._on_ready()
        if cursor.has_more:
            self.mark(cursor)

    def _report(self, problem: FollowProblem) -> None:
        """Queue a problem; it takes the place of its stream until it is sent."""
        if self.failure is None and self._open:
            self._notices.append(problem)
            self.unsent += 1
            self._follows.count(1)
        self._on_ready()

    def _forget_notices(self) -> None:
        self._follows.count(-self.unsent)
        self.unsent = 0
        self._notices.clear()

    def _remove(self, cursor: _Cursor) -> None:
        if self._cursors.get(cursor.name) is cursor:
            del self._cursors[cursor.name]
            self._follows.count(-1)
            self._ready.pop(cursor, None)
            self._engine.unfollow(cursor.stream, cursor)

    def _add_named(self) -> Iterator[None]:
        for name, offset in self._wanted.offsets.items():
            if not self._open or self.failure is not None:
                return
            if name not in self._cursors and (self._is_here is None or self._is_here(name)):
                self._add(name, offset)
            yield

    def _on_named_added(self, error: Exception | None) -> None:
        assert error is None, "refusals are problems of their streams"
        if self._wanted.prefix is None:
            self._complete()
        else:
            self._add_page(None)

    def _add_page(self, after: str | None) -> None:
        assert self._wanted.prefix is not None
        self._engine.index.page(self._wanted.prefix, after, _PAGE, self._page_found)

    def _page_found(self, page: IndexPage | Refusal) -> None:
        assert not isinstance(page, Refusal), "a page is never refused"
        for stream in page.streams:
            if not self._open or self.failure is not None:
                return
            if (
                stream.name not in self._cursors
                and stream.name not in self._wanted.offsets
                and (self._is_here is None or self._is_here(stream.name))
                and self._allows(stream.name)
            ):
                self._add(stream.name, self._wanted.start)
        if page.has_more:
            after = page.streams[-1].name
            self._follows.scheduler.soon(lambda: self._add_page(after))
        else:
            self._complete()

    def _complete(self) -> None:
        self.is_complete = True
        if self._open:
            self._on_ready()

    def _unfollow_all(self, cursors: list[_Cursor]) -> Iterator[None]:
        for cursor in cursors:
            self._engine.unfollow(cursor.stream, cursor)
            yield


def _ignore(error: Exception | None) -> None:
    """Ignore errors of `unfollow`: there is no request to report them to."""
