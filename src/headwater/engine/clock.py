"""The engine's clock: wall time that never jumps.

It reads the wall clock once and then counts on the monotonic one, so that a corrected system clock can't make whole
windows of streams expire at once. A restart takes up the new wall time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int: ...


class SteadyClock:
    __slots__ = ("_start_s",)

    def __init__(self) -> None:
        self._start_s = time.time() - time.monotonic()

    def now_ms(self) -> int:
        return int((self._start_s + time.monotonic()) * 1000)
