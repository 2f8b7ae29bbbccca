"""The sweeper: streams whose time is up are removed, also when nobody asks for them.

One heap and one timer for all streams. A stream that was used since it was put on the heap goes back with its new
deadline, so a touch costs nothing here. One that is being read live is renewed instead of removed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Final

from headwater.engine.clock import Clock
from headwater.engine.scheduler import Scheduler, Timer
from headwater.engine.stream import LiveStream

SWEEP_MAX: Final = 2000
"""Streams looked at in one go; the rest follow on the next tick, so that a mass expiry stalls nobody."""


class Sweeper:
    def __init__(
        self,
        streams: Mapping[int, LiveStream],
        clock: Clock,
        scheduler: Scheduler,
        interval_s: float,
        expire: Callable[[LiveStream], None],
        renew: Callable[[LiveStream], None],
    ) -> None:
        self._streams = streams
        self._clock = clock
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._expire = expire
        self._renew = renew
        self._heap: list[tuple[int, int]] = []
        self._timer: Timer | None = None

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

    def sweep(self) -> bool:
        """Remove what is due; True when there is more to look at."""
        now_ms = self._clock.now_ms()
        for _ in range(SWEEP_MAX):
            if not self._heap or self._heap[0][0] > now_ms:
                return False
            _, stream_id = heapq.heappop(self._heap)
            stream = self._streams.get(stream_id)
            if stream is None or stream.deleted:
                continue
            if stream.expired(now_ms):
                self._expire(stream)
                continue
            if stream.live_readers:
                # Its window would be over but for them; renewed, it also survives a restart.
                self._renew(stream)
            self.watch(stream)
        return True

    def _tick(self) -> None:
        more = self.sweep()
        self._timer = self._scheduler.later(0.0 if more else self._interval_s, self._tick)
