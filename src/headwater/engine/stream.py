"""A stream as the engine sees it: its pending state, and how much of that is durable.

The fields of `core.Stream` are *pending*: what the stream will be once all that is queued is committed. Writers are
checked against them. The fields added here are *durable*: readers see nothing beyond them.
"""

from __future__ import annotations

from typing import Protocol

from headwater.core.catalog import StreamState
from headwater.core.errors import Refusal
from headwater.core.expiry import deadline_ms
from headwater.core.records import Image


class StreamFollower(Protocol):
    """A live reader: a cursor on a stream, woken when there may be more for it."""

    def wake(self) -> None:
        """Something was published: continue to read from the cursor."""

    def gone(self, refusal: Refusal) -> None:
        """The stream was deleted, or the cursor lies before what is retained."""


class LiveStream(StreamState):
    __slots__ = (
        "durable_closed",
        "durable_index",
        "durable_position",
        "durable_retained_index",
        "durable_retained_position",
        "durable_snapshot",
        "floor_index",
        "floor_position",
        "followers",
        "frame",
        "in_flight",
        "lineage",
        "live_readers",
        "producers_idle_ms",
        "used_ms",
        "visible",
    )

    def __init__(self, image: Image) -> None:
        super().__init__(image)
        self.durable_index = self.message_index
        self.durable_position = self.byte_position
        self.durable_closed = self.closed
        self.durable_retained_index = self.retained_index
        self.durable_retained_position = self.retained_position
        self.durable_snapshot = self.snapshot
        self.floor_index = self.base_index
        """Data before the floor is no longer stored: it cannot be read, neither here nor through a fork."""
        self.floor_position = self.base_position
        self.visible = True
        self.in_flight = 0
        self.used_ms = 0
        """The latest use that is not recorded yet (see `Engine.touch`)."""
        self.followers: dict[StreamFollower, bool] | None = None
        """Followers that published data wakes; the value says whether it is a live reader."""
        self.lineage: Lineage | None = None
        """Where the data before the stream's own is found; computed when it is first needed."""
        self.live_readers = 0
        self.producers_idle_ms = 0
        """No producer can be evicted before this time."""
        self.frame: object = None
        """The event frame that was encoded last, shared by all followers at the tail."""

    @property
    def last_used_ms(self) -> int:
        return max(self.accessed_ms, self.used_ms)

    def deadline_ms(self) -> int | None:
        return deadline_ms(self.ttl_secs, self.expires_at_ms, self.last_used_ms) if self.mortal else None

    def expired(self, now_ms: int) -> bool:
        """A stream with live readers does not expire by its sliding window, but it does at a fixed time."""
        if self.live_readers and self.expires_at_ms is None:
            return False
        return super().expired(now_ms)


class Lineage:
    """Where the data before a fork's own is found (see `lineage`). A stream that is not a fork has itself for both."""

    __slots__ = ("depth", "generation", "jump", "origin")

    def __init__(self, origin: LiveStream, jump: LiveStream, depth: int, generation: int) -> None:
        self.origin = origin
        self.jump = jump
        self.depth = depth
        """Origins above the stream."""
        self.generation = generation
        """Sources above the stream."""
