"""The sweeper: removes expired streams that no request accesses.

There is one heap and one timer for all streams. A stream that was used after it was put on the heap is put back with
its new deadline, so a touch does not change the heap. A stream with live readers is renewed instead of removed. Entries
of deleted streams stay in the heap until they outnumber the others; then the heap is rebuilt in slices.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from headwater.engine.clock import Clock
from headwater.engine.scheduler import Scheduler, Timer
from headwater.engine.stream import LiveStream

log = logging.getLogger("headwater.engine")

SWEEP_S: Final = 0.002
"""Time for one tick; the rest follows in the next, so that many expired streams do not delay requests. The commit of a
tick's records takes longer than the tick."""
SWEEP_MAX: Final = 1000
"""Streams in one sweep: about 20 ms without a time limit. Each expired stream is a record, and all are one commit."""
STALE_MIN: Final = 1024
"""Entries of deleted streams below which the heap is not rebuilt."""
RETRY_MS: Final = 60_000
"""After this time the expiry of a stream is repeated, if it has failed."""
REBUILD_MAX: Final = 5000
"""Entries that are moved in one step: a few milliseconds."""


class Sweeper:
    def __init__(
        self,
        streams: Mapping[int, LiveStream],
        clock: Clock,
        scheduler: Scheduler,
        interval_s: float,
        expire: Callable[[LiveStream], bool],
        renew: Callable[[LiveStream], None],
    ) -> None:
        self._streams = streams
        self._clock = clock
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._expire = expire
        """Removes a stream; False if it must be kept for now."""
        self._renew = renew
        self._heap: list[tuple[int, int]] = []
        self._old: list[tuple[int, int]] = []
        """During a rebuild, the rest of the old heap. A heap without its last entry is still a heap."""
        self._stale = 0
        self._timer: Timer | None = None
        self._held: dict[int, None] = {}
        self._released: deque[int] = deque()

    def start(self) -> None:
        self._timer = self._scheduler.later(self._interval_s, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def watch(self, stream: LiveStream) -> None:
        deadline = stream.deadline_ms()
        if deadline is not None:
            heapq.heappush(self._heap, (deadline, stream.id))

    def forget(self, stream: LiveStream) -> None:
        """Handle the deletion of a stream."""
        if not stream.mortal:
            return
        self._held.pop(stream.id, None)
        self._stale += 1
        if not self._old and self._stale > STALE_MIN and 2 * self._stale > len(self._heap):
            self._old, self._heap = self._heap, []
            self._stale = 0

    @property
    def held(self) -> int:
        """Expired streams that are kept for now."""
        return len(self._held)

    @property
    def entries(self) -> int:
        """The size of the heap, stale entries included."""
        return len(self._heap) + len(self._old)

    def release(self) -> None:
        """Remove the streams that were kept, beginning with the next tick."""
        self._released.extend(self._held)
        self._held.clear()

    def sweep(self, max_s: float | None = None) -> bool:
        """Remove expired streams, for at most `max_s`; True if there are more."""
        now_ms = self._clock.now_ms()
        until_s = self._scheduler.timer_s() + max_s if max_s is not None else math.inf
        for _ in range(SWEEP_MAX):
            heap = self._heap
            if self._old and (not heap or self._old[0] < heap[0]):
                heap = self._old
            if not heap or heap[0][0] > now_ms:
                return False
            _, stream_id = heapq.heappop(heap)
            stream = self._streams.get(stream_id)
            if stream is None or stream.deleted:
                continue
            try:
                if stream.expired(now_ms):
                    if not self._expire(stream):
                        self._held[stream_id] = None
                    if self._scheduler.timer_s() >= until_s:
                        return True
                    continue
                if stream.live_readers:
                    # Only its live readers extend the window. A renewed window also survives a restart.
                    self._renew(stream)
            except Exception:
                # Others must not be kept because of it.
                log.exception("the expiry of stream %r failed and is repeated later", stream.name)
                heapq.heappush(self._heap, (now_ms + RETRY_MS, stream_id))
                continue
            self.watch(stream)
        return True

    def _tick(self) -> None:
        # Only one of the three per tick, because all of them together would take too long. The old heap is swept too.
        more = self.sweep(SWEEP_S) or self._put_back_released() or self._rebuild()
        self._timer = self._scheduler.later(0.0 if more else self._interval_s, self._tick)

    def _put_back_released(self) -> bool:
        """Put released streams back on the heap; True if there are more."""
        for _ in range(min(REBUILD_MAX, len(self._released))):
            stream = self._streams.get(self._released.popleft())
            if stream is not None:
                self.watch(stream)
        return bool(self._released)

    def _rebuild(self) -> bool:
        """Move entries of existing streams to the new heap; True if there are more."""
        for _ in range(min(REBUILD_MAX, len(self._old))):
            entry = self._old.pop()
            if entry[1] in self._streams:
                heapq.heappush(self._heap, entry)
        return bool(self._old)
