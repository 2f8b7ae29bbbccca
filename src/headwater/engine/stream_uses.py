"""The uses of streams, which restart their sliding windows: reads, and live readers for as long as they follow.

Invariant: a stream never expires early. A use is not saved on every read, so a restart loses the last ones; the window
is then extended by the most that they can have extended it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

from headwater.core.records import Touch
from headwater.engine.clock import Clock
from headwater.engine.quota import Quota
from headwater.engine.stream import LiveStream, StreamFollower

TOUCH_SHARE: Final = 16
"""A sliding TTL window is saved at most this often per window: reads must not cause a write each, and must still extend
the window."""


class StreamUses:
    def __init__(
        self, streams: Container[int], clock: Clock, quota: Quota, save: Callable[[LiveStream, Touch], None]
    ) -> None:
        self._streams: Final = streams
        self._clock: Final = clock
        self._quota: Final = quota
        self._save: Final = save

    def recover(self, stream: LiveStream, ttl_secs: int, latest_ms: int) -> None:
        """Extend a sliding window after a restart. The stream was not used after `latest_ms`."""
        unsaved_ms = ttl_secs * 1000 // TOUCH_SHARE
        stream.used_ms = max(stream.accessed_ms, min(latest_ms, stream.accessed_ms + unsaved_ms))

    def touch(self, stream: LiveStream) -> None:
        """Restart a sliding window because the stream was used.

        Readers see a stream until its deletion is durable, so until then its window is extended, but not saved.
        """
        if stream.ttl_secs is None:
            return
        now_ms = self._clock.now_ms()
        if stream.expired(now_ms):
            return
        stream.used_ms = now_ms
        if stream.deleted or stream.id not in self._streams:
            return
        if now_ms - stream.accessed_ms >= stream.ttl_secs * 1000 // TOUCH_SHARE:
            self._save(stream, Touch(stream.id, now_ms))

    def follow(
        self, stream: LiveStream, follower: StreamFollower, *, reading: bool = True, relaying: bool = False
    ) -> None:
        """Wake the follower when something is published. It must check the tail again after this call.

        A follower that is `reading` uses the stream until `unfollow`, so the sliding window does not end. One that is
        `relaying` serves readers of another worker, which counts them.
        """
        if stream.followers is None:
            stream.followers = {}
        stream.followers[follower] = reading
        if reading:
            stream.live_readers += 1
            stream.relays += relaying
            if self._quota.namespaces is not None and not relaying:
                self._quota.namespaces.add(stream.name, readers=1)

    def unfollow(self, stream: LiveStream, follower: StreamFollower, *, relaying: bool = False) -> None:
        if stream.followers is None:
            return
        if stream.followers.pop(follower, False):
            # Before it stops counting: its reading is what has kept the window open until now.
            self.touch(stream)
            stream.live_readers -= 1
            stream.relays -= relaying
            if self._quota.namespaces is not None and not relaying:
                self._quota.namespaces.add(stream.name, readers=-1)
        if not stream.followers:
            stream.followers = None
            stream.frame = None
