"""Sessions of followers of many streams: the streams of each id, and the offsets up to which events were sent.

An id is valid while it is used and for a minute after that. A session keeps the offsets of the events that were sent
last, so that an `EventSource` that reconnects with `Last-Event-ID` continues where it was. What all sessions keep is
limited; a client whose session was dropped sends its POST again, with the offsets that it has received.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from headwater.core.errors import FollowNotFound, TooManyFollowed, TooManyFollows
from headwater.core.offsets import BEGINNING, NOW
from headwater.engine.multi_stream_follow import FollowRequest
from headwater.http.scopes import Scope

IDLE_S: Final = 60.0
"""How long an id without a connection stays valid."""
SENT_MAX: Final = 10_000
"""Events whose offsets a session keeps: as many as a socket can buffer before its client receives them."""
SENT_TOTAL_MAX: Final = 500_000
"""The same for all sessions together: about 0.2 KiB each. Beyond it, the session that keeps most forgets half."""


GONE: Final = ""
"""Replaces the offset of a stream that no longer exists."""


class SessionReader(Protocol):
    """The connection of a session."""

    def end(self) -> None: ...


class KeptEvents:
    """The number of events that all sessions keep, and its limit."""

    def __init__(self, limit: int, make_room: Callable[[], None]) -> None:
        self.limit: Final = limit
        self._make_room = make_room
        self.events = 0

    def add(self) -> None:
        self.events += 1
        if self.events > self.limit:
            self._make_room()


class FollowSession:
    """One session: the streams, the client's token, and the offsets up to which events were sent."""

    def __init__(self, session_id: str, wanted: FollowRequest, scope: Scope, kept: KeptEvents) -> None:
        self.id: Final = session_id
        self._kept = kept
        self._named: Final = wanted.offsets
        self._prefix: Final = wanted.prefix
        self.scope: Final = scope
        self.reader: SessionReader | None = None
        self._offsets = dict(wanted.offsets)
        """The offsets after the event `_first`."""
        self._start = wanted.start
        self._first = 0
        self._sent: deque[tuple[str, str]] = deque()
        """Stream and offset of each event after `_first`."""

    @property
    def named(self) -> int:
        """The number of streams that the request lists."""
        return len(self._named)

    @property
    def kept_streams(self) -> int:
        """The number of streams whose offsets it keeps, besides those of recorded events."""
        return len(self._offsets)

    @property
    def kept_events(self) -> int:
        return len(self._sent)

    def names(self, stream: str) -> bool:
        return stream in self._named

    def began(self, name: str, offset: str) -> None:
        """Record the start of a stream that is followed from `now`: a later connection must not skip to its end."""
        if self._offsets.get(name, NOW) == NOW:
            self._offsets[name] = offset

    def mark_listed(self) -> None:
        """Note that all streams of the prefix have been found; others are created later, and start at their
        beginning."""
        self._start = BEGINNING

    def sent(self, name: str, offset: str) -> int:
        """Record an event; returns its number."""
        self._sent.append((name, offset))
        number = self._first + len(self._sent)
        if len(self._sent) > SENT_MAX:
            self.confirm(1)
        self._kept.add()
        return number

    def resume_after(self, event: int) -> FollowRequest:
        """The request that continues after a received event. Later events are sent again."""
        if not self._first <= event <= self._first + len(self._sent):
            raise FollowNotFound("The events after this id are no longer kept; send the POST again.")
        self.confirm(event - self._first)
        self.forget_sent()
        return FollowRequest(dict(self._offsets), self._prefix, self._start)

    def confirm(self, events: int) -> None:
        """Note that the client has received the first recorded events: their streams continue at their offsets."""
        for _ in range(events):
            name, offset = self._sent.popleft()
            if offset != GONE:
                self._offsets[name] = offset
            else:
                # Streams of a prefix are created and deleted during the session.
                self._offsets.pop(name, None)
        self._first += events
        self._kept.events -= events

    def forget_sent(self) -> None:
        """Forget the recorded events: they are sent again, or the session ends."""
        self._kept.events -= len(self._sent)
        self._sent.clear()


class FollowSessions:
    """All sessions, within the limits on their number and on what they keep."""

    def __init__(self, limit: int, max_streams: int, max_sent: int = SENT_TOTAL_MAX) -> None:
        self.limit: Final = limit
        self.max_streams: Final = max_streams
        self.named = 0
        """The streams that the sessions name."""
        self.kept = KeptEvents(max_sent, self._forget_half_of_most)
        self.id_prefix = ""
        """The prefix of the ids of this process."""
        self.elsewhere = 0
        """The number of sessions of other workers of the server."""
        self.named_elsewhere = 0
        """The streams that those name."""
        self.on_change: Callable[[], None] | None = None
        self._by_id: dict[str, FollowSession] = {}
        self._idle: dict[str, tuple[float, int]] = {}
        """The time since which each id has no connection, oldest first, and the streams that its session keeps."""
        self._idle_streams = 0
        """The sum of these streams."""

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, wanted: FollowRequest, scope: Scope, now_s: float) -> FollowSession:
        self._expire(now_s)
        if len(self._by_id) + self.elsewhere >= self.limit:
            detail = f"There are {self.limit} followers of many streams (limits.max_follows); retry later, or raise it."
            raise TooManyFollows(detail, (("Retry-After", "1"),))
        if self.named + self.named_elsewhere + len(wanted.offsets) > self.max_streams:
            detail = (
                f"All followers together may name {self.max_streams} streams (limits.max_followed_streams); name"
                " fewer, or raise the limit."
            )
            raise TooManyFollowed(detail)
        session = FollowSession(self.id_prefix + secrets.token_urlsafe(18), wanted, scope, self.kept)
        self._by_id[session.id] = session
        self.named += session.named
        self._set_idle(session, now_s)
        if self.on_change is not None:
            self.on_change()
        return session

    def find(self, session_id: str, scope: Scope, now_s: float) -> FollowSession:
        self._expire(now_s)
        session = self._by_id.get(session_id)
        if session is None or session.scope != scope:
            raise FollowNotFound(
                "There is no such id; it has expired, or belongs to another token. Send the POST again."
            )
        return session

    def attach(self, session: FollowSession, reader: SessionReader) -> None:
        session.reader = reader
        _, streams = self._idle.pop(session.id, (0.0, 0))
        self._idle_streams -= streams

    def detach(self, session: FollowSession, reader: SessionReader, now_s: float) -> None:
        if session.reader is reader:
            session.reader = None
            self._set_idle(session, now_s)

    def _set_idle(self, session: FollowSession, now_s: float) -> None:
        self._idle[session.id] = (now_s, session.kept_streams)
        self._idle_streams += session.kept_streams
        while self._idle_streams > self.max_streams:
            self._drop_oldest()

    def _expire(self, now_s: float) -> None:
        while self._idle and next(iter(self._idle.values()))[0] + IDLE_S <= now_s:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the session that has been without a connection for longest."""
        session_id, (_, streams) = next(iter(self._idle.items()))
        del self._idle[session_id]
        self._idle_streams -= streams
        session = self._by_id.pop(session_id)
        self.named -= session.named
        session.forget_sent()
        if self.on_change is not None:
            self.on_change()

    def _forget_half_of_most(self) -> None:
        session = max(self._by_id.values(), key=lambda session: session.kept_events)
        session.confirm((session.kept_events + 1) // 2)
