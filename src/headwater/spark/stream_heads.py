"""The heads of all streams of a query: the current tail of each, and which of them changed since the last refresh.

On servers with a listing of changes, one long-poll reports the streams that changed, with their tails, so the cost of
a refresh depends on the number of changes, not of streams. On other servers each stream has its own long-poll.
Invariant: the head of a stream is requested if it is unknown; a missing stream is an error, or is waited for.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Final

from headwater.spark.change_feed import ChangeFeed
from headwater.spark.counted_ranges import MessageCounter
from headwater.spark.discovery import REGISTRY, Discovery
from headwater.spark.errors import ServerRefusedError, StreamMissingError
from headwater.spark.long_polls import LongPolls
from headwater.spark.offsets import Place
from headwater.spark.options import SourceOptions
from headwater.spark.planner import map_parallel
from headwater.spark.protocol import Head, connect

log = logging.getLogger("headwater.spark")

_ABSENT_AGAIN_S: Final = 2.0
_LISTED_MIN: Final = 50
"""A list of at least this many streams is followed through the listing of changes; fewer have a long-poll each."""


class StreamHeads(ABC):
    """The known heads of the streams of a query."""

    def __init__(self, options: SourceOptions) -> None:
        self.client = connect(options.connection)
        self.counter = MessageCounter(self.client)
        self.heads: dict[str, Head] = {}
        """The streams that exist."""
        self._options = options
        self._absent_until: dict[str, float] = {}
        self._last_heads: dict[str, Head] = {}

    @abstractmethod
    def refresh(self, begun: Mapping[str, Place]) -> set[str]:
        """Update `heads`, including the streams of a checkpoint; return the names of streams that may have changed."""

    @abstractmethod
    def mark_unread(self, streams: Iterable[str]) -> None:
        """Note that a batch read these streams: they may have more messages by now."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until a stream may have changed, or the timeout."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections that wait for changes."""

    def head(self, stream: str) -> Head:
        """The last known head of a stream, which may have been deleted since."""
        if stream not in self._last_heads:
            self._last_heads[stream] = self.client.head(stream)
        return self._last_heads[stream]

    def _request_heads(self, streams: list[str]) -> None:
        """Request the heads of these streams."""
        for name, head in zip(streams, map_parallel(self._request_head, streams), strict=True):
            if head is None:
                self.heads.pop(name, None)
                self._absent_until[name] = time.monotonic() + _ABSENT_AGAIN_S
            else:
                self._record(name, head)

    def _record(self, name: str, head: Head) -> None:
        self.heads[name] = head
        self._last_heads[name] = head
        self._absent_until.pop(name, None)

    def _request_head(self, stream: str) -> Head | None:
        try:
            return self.client.head(stream)
        except StreamMissingError as missing:
            if not self._options.waits_for_streams:
                raise
            if stream not in self._absent_until:
                log.warning("%s Skipped.", missing)
            return None


def stream_heads(options: SourceOptions) -> StreamHeads:
    """The heads of the streams of a query, from the listing of changes if the server has one."""
    names = options.streams
    if not names or len(names) >= _LISTED_MIN:
        client = connect(options.connection)
        prefix = _common_prefix(names) if names else options.prefix
        try:
            feed = ChangeFeed.open(client, prefix)
        except ServerRefusedError as refused:
            log.debug("no listing of changes: %s", refused)
        else:
            return FollowedHeads(options, feed)
    return PolledHeads(options)


def _common_prefix(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))


class FollowedHeads(StreamHeads):
    """Heads from the listing of changes."""

    def __init__(self, options: SourceOptions, feed: ChangeFeed) -> None:
        super().__init__(options)
        self._feed = feed
        self._wanted = frozenset(options.streams)

    def refresh(self, begun: Mapping[str, Place]) -> set[str]:
        changes, is_complete = self._feed.take(0.0)
        is_wanted = self._wanted.__contains__ if self._wanted else self._options.reads
        changes = {name: head for name, head in changes.items() if is_wanted(name)}
        changed = set(changes)
        if is_complete:
            changed |= self.heads.keys()
            self.heads.clear()
        for name, head in changes.items():
            if head is None:
                self.heads.pop(name, None)
            else:
                self._record(name, head)
        now = time.monotonic()
        # A missing stream is an error, or is waited for: the listing reports its creation.
        missing = (self._wanted or begun.keys()) - self.heads.keys()
        asked = sorted(name for name in missing if self._absent_until.get(name, 0.0) <= now)
        self._request_heads(asked)
        return changed | set(asked)

    def mark_unread(self, streams: Iterable[str]) -> None:
        """Do nothing: the listing reports changes."""

    def wait(self, timeout_s: float) -> None:
        self._feed.wait(timeout_s)

    def close(self) -> None:
        self._feed.close()


class PolledHeads(StreamHeads):
    """Heads from requests: one for each stream, repeated when its long-poll reports a change."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._discovery = Discovery(self.client, options)
        self._watch = LongPolls(self.client, options.connection)
        self._stale: set[str] = set()
        self._closed_until = 0.0

    def refresh(self, begun: Mapping[str, Place]) -> set[str]:
        self._stale |= self._watch.take(0.0)
        if self._discovery.is_due or REGISTRY in self._stale:
            self._stale.discard(REGISTRY)
            self._discovery.refresh()
            self._stale |= self._discovery.take_created()
        self._check_closed()
        names = self._discovery.names if self._options.streams else self._discovery.names | begun.keys()
        now = time.monotonic()
        asked = sorted(
            name
            for name in names
            if (name not in self.heads or name in self._stale) and self._absent_until.get(name, 0.0) <= now
        )
        self._stale.difference_update(asked)
        self._request_heads(asked)
        return set(asked)

    def _check_closed(self) -> None:
        """Closed streams have no long-poll, but may be deleted and created again."""
        now = time.monotonic()
        if self._options.streams and now >= self._closed_until:
            self._closed_until = now + _ABSENT_AGAIN_S
            self._stale.update(name for name, head in self.heads.items() if head.closed)

    def mark_unread(self, streams: Iterable[str]) -> None:
        """Check these streams again: after a batch they may have more messages."""
        self._stale.update(streams)

    def wait(self, timeout_s: float) -> None:
        """Wait until a stream may have changed, or the timeout."""
        offsets = {stream: head.offset for stream, head in self.heads.items() if not head.closed}
        if (registry_offset := self._discovery.registry_offset) is not None:
            offsets[REGISTRY] = registry_offset
        self._watch.open_polls(offsets)
        self._stale |= self._watch.take(timeout_s)

    def close(self) -> None:
        self._watch.close()
