"""Alarms: many deadlines, one heap, one timer.

The owner of an alarm computes its deadline. A deadline that was extended is noticed when the old one is reached, so
extending a lease costs nothing here; a deadline that became earlier must be set again.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from headwater.engine.clock import Clock
from headwater.engine.committer import guarded
from headwater.engine.scheduler import Scheduler, Timer


class HasAlarm(Protocol):
    alarm_ms: int | None
    """The earliest time in the heap for this owner; kept by `Alarms`."""

    def deadline_ms(self) -> int | None: ...


OwnerT = TypeVar("OwnerT", bound=HasAlarm)


class Alarms(Generic[OwnerT]):
    def __init__(self, clock: Clock, scheduler: Scheduler, on_alarm: Callable[[OwnerT], None]) -> None:
        self._clock = clock
        self._scheduler = scheduler
        self._on_alarm = on_alarm
        self._heap: list[tuple[int, int, OwnerT]] = []
        self._order = itertools.count()
        self._timer: Timer | None = None
        self._timer_ms = 0

    def set(self, owner: OwnerT) -> None:
        """Set the alarm to the owner's deadline, unless there is none or the alarm is already set to an earlier
        time."""
        deadline_ms = owner.deadline_ms()
        if deadline_ms is None or (owner.alarm_ms is not None and owner.alarm_ms <= deadline_ms):
            return
        owner.alarm_ms = deadline_ms
        heapq.heappush(self._heap, (deadline_ms, next(self._order), owner))
        if self._timer is None or deadline_ms < self._timer_ms:
            self._set_timer()

    def stop(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, _, owner = heapq.heappop(self._heap)
            if owner.alarm_ms == at_ms:
                owner.alarm_ms = None
            deadline_ms = owner.deadline_ms()
            if deadline_ms is None:
                continue
            if deadline_ms > now_ms:
                self.set(owner)
            else:
                guarded(self._on_alarm, owner)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            self._timer_ms = self._heap[0][0]
            delay_s = max(0, self._timer_ms - self._clock.now_ms()) / 1000
            self._timer = self._scheduler.later(delay_s, self._tick)
