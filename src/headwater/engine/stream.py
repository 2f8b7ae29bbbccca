"""The state of a stream in the engine: its pending state, and how much of that is durable.

The fields of `StreamState` are *pending*: the state after all queued records are committed. Writers are
checked against them. The fields added here are *durable*: readers see nothing beyond them.
"""

from __future__ import annotations

from typing import Protocol

from headwater.core.catalog import StreamState
from headwater.core.errors import Refusal
from headwater.core.expiry import deadline_ms
from headwater.core.records import Image


class StreamFollower(Protocol):
    """A live reader: a cursor on a stream, woken when there may be more data."""

    def wake(self) -> None:
        """Continue to read from the cursor, because something was published."""

    def gone(self, refusal: Refusal) -> None:
        """End, because the stream was deleted, or the cursor is before the earliest retained offset."""


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
        "relays",
        "used_ms",
        "visible",
    )

    def __init__(self, image: Image) -> None:
        super().__init__(image)
        self.publish_pending()
        self.floor_index = self.base_index
        """Data before the floor is no longer stored: it cannot be read, neither here nor through a fork."""
        self.floor_position = self.base_position
        self.visible = True
        self.in_flight = 0
        self.used_ms = 0
        """The latest use that is not recorded yet (see `Engine.touch`)."""
        self.followers: dict[StreamFollower, bool] | None = None
        """Followers to wake when data is published; the value says whether it is a live reader."""
        self.lineage: Lineage | None = None
        """The location of the data before the stream's own; computed when it is first needed."""
        self.live_readers = 0
        self.relays = 0
        """Followers that serve the live readers of other workers."""
        self.producers_idle_ms = 0
        """No producer can be evicted before this time."""
        self.frame: object = None
        """The last encoded event frame, shared by all followers at the tail."""

    def publish_pending(self) -> None:
        """Make the pending state the durable one, which readers see."""
        self.durable_index, self.durable_position = self.message_index, self.byte_position
        self.durable_closed = self.closed
        self.durable_retained_index, self.durable_retained_position = self.retained_index, self.retained_position
        self.durable_snapshot = self.snapshot

    @property
    def last_used_ms(self) -> int:
        return max(self.accessed_ms, self.used_ms)

    def deadline_ms(self) -> int | None:
        return deadline_ms(self.ttl_secs, self.expires_at_ms, self.last_used_ms) if self.mortal else None

    def expired(self, now_ms: int) -> bool:
        """Whether the stream has expired. Live readers extend a sliding window, but not a fixed time."""
        if self.live_readers and self.expires_at_ms is None:
            return False
        return super().expired(now_ms)


class Lineage:
    """The location of the data before a fork's own (see `lineage`). For other streams both are the stream itself."""

    __slots__ = ("depth", "generation", "jump", "origin")

    def __init__(self, origin: LiveStream, jump: LiveStream, depth: int, generation: int) -> None:
        self.origin = origin
        self.jump = jump
        self.depth = depth
        """The number of origins above the stream."""
        self.generation = generation
        """The number of sources above the stream."""
