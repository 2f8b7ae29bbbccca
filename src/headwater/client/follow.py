"""Following a stream as state: bootstrap, apply, tail, and bootstrap again when retention has moved on (§3.3, §3.4).

Invariant: between two `restore`s a state sees every update behind what it was restored from, once and in order. A
bootstrap that breaks off is begun again with another `restore`; a live read that breaks off is resumed at the last
offset that the server named.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import httpx

from headwater.client.errors import HistoryMissing, MalformedAnswer, NoEvents, OffsetGone, Refused
from headwater.client.multipart import Part
from headwater.client.stream import Batch, Stream

log = logging.getLogger("headwater.client")

RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 5.0
_PASSING: Final = frozenset((408, 429, 500, 502, 503, 504))


class State(Protocol):
    """What a stream folds to."""

    def restore(self, snapshot: Part | None) -> None:
        """Forget everything and begin from a snapshot, or from nothing. May be called at any time."""

    def apply(self, update: bytes) -> None:
        """Take in the next message."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a state has come."""

    next_offset: str
    up_to_date: bool
    closed: bool
    restored: bool
    """The state was just built from a bootstrap."""


def follow(
    stream: Stream, state: State, *, live: str = "sse", retries: int | None = None, allow_missing: bool = False
) -> Iterator[Place]:
    """Keep a state up to date with a stream, for ever or until the stream is closed; stop by leaving the loop.

    `live` is the mode to begin with: "sse" falls back to "long-poll" where events are not to be had. `retries` bounds
    failures in a row (of the network, or of a server that is not well), None never gives up. Where retention has
    dropped messages that no snapshot covers, `HistoryMissing` is raised; with `allow_missing` the state begins with
    what is left.
    """
    follower = _Follower(stream, state, live, allow_missing=allow_missing)
    failures = 0
    while not follower.closed:
        try:
            for place in follower.go_on():
                failures = 0
                yield place
        except OffsetGone:
            log.info("%s: retention has moved on, bootstrapping again", stream.url)
            follower.offset = None
        except (httpx.TransportError, MalformedAnswer, Refused) as error:
            if isinstance(error, Refused) and error.status not in _PASSING:
                raise
            failures += 1
            if retries is not None and failures > retries:
                raise
            log.warning("%s: %s; trying again", stream.url, error)
            time.sleep(min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(failures - 1, 10)))


class _Follower:
    def __init__(self, stream: Stream, state: State, live: str, *, allow_missing: bool) -> None:
        self._stream = stream
        self._state = state
        self._live = live
        self._allow_missing = allow_missing
        self._cursor: str | None = None
        self._position: int | None = None
        self.offset: str | None = None
        """Where to go on; None asks for a bootstrap."""
        self.closed = False

    def go_on(self) -> Iterator[Place]:
        """One request's worth of updates."""
        if self.offset is None:
            yield self._bootstrap()
        elif self._live == "sse":
            yield from self._events()
        else:
            batch = self._stream.long_poll(self.offset, self._cursor, self._position)
            self._position = batch.position
            yield self._take(batch)

    def _bootstrap(self) -> Place:
        with self._stream.bootstrap() as answer:
            if answer.missing_before is not None and not self._allow_missing:
                raise HistoryMissing(f"{self._stream.url}: messages before {answer.missing_before} are gone")
            parts = answer.parts
            first = next(parts, None)
            if first is None:
                raise MalformedAnswer("a bootstrap without its first part")
            self._state.restore(first if answer.has_snapshot else None)
            for part in parts:
                self._state.apply(part.read())
        self.offset, self._position, self._cursor = answer.next_offset, answer.position, None
        self.closed = answer.closed
        return Place(answer.next_offset, up_to_date=True, closed=answer.closed, restored=True)

    def _events(self) -> Iterator[Place]:
        assert self.offset is not None
        silent = True
        try:
            for batch in self._stream.events(self.offset, self._cursor):
                # Events do not tell positions; a long-poll after them learns its first one anew.
                self._position = None
                silent = False
                yield self._take(batch)
        except httpx.ReadTimeout:
            if silent:
                # A server begins with an event at once: something on the way holds them back.
                self._fall_back("nothing comes")
        except NoEvents as error:
            self._fall_back(str(error))

    def _fall_back(self, reason: str) -> None:
        log.info("%s: no events to be had (%s), going on by long-poll", self._stream.url, reason)
        self._live = "long-poll"

    def _take(self, batch: Batch) -> Place:
        for message in batch.messages:
            self._state.apply(message)
        self.offset, self._cursor, self.closed = batch.next_offset, batch.cursor, batch.closed
        return Place(batch.next_offset, batch.up_to_date, batch.closed, restored=False)
