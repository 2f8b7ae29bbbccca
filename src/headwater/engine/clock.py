"""The engine's clock: wall time that advances steadily.

It is based on the monotonic clock, so a step of the system clock does not change it at once. Once a second the
`ClockGuard` compares it with the wall clock and moves it forward where that is ahead: after a suspend, or when the
system clock was corrected. It never moves back, because deadlines that have passed must not be pending again.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """The time for all decisions. It never decreases."""


class AdjustableClock(Clock, Protocol):
    def wall_ms(self) -> int:
        """The current time of the machine."""

    def move_to(self, now_ms: int) -> None:
        """Continue from a later time."""


class SteadyClock:
    __slots__ = ("_start_s",)

    def __init__(self) -> None:
        self._start_s = time.time() - time.monotonic()

    def now_ms(self) -> int:
        return int((self._start_s + time.monotonic()) * 1000)

    def wall_ms(self) -> int:
        return int(time.time() * 1000)

    def move_to(self, now_ms: int) -> None:
        self._start_s = max(self._start_s, now_ms / 1000 - time.monotonic())
