"""Event loop lag: a histogram of the delay of a timer.

A callback that blocks the loop delays everything else. The meter sets a timer every `INTERVAL_S` and records how
much later than planned it ran, so the histogram shows stalls of every cause: requests, maintenance, garbage collection.
"""

from __future__ import annotations

import asyncio
from typing import Final

from headwater.engine.metrics import Histogram

INTERVAL_S: Final = 0.05
"""Twenty wake-ups a second cost about 0.02 % of a core. A stall that is shorter than this may not be measured."""


class LoopLag:
    """The meter of one event loop."""

    def __init__(self, seconds: Histogram) -> None:
        self._seconds = seconds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._planned_s = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start measuring; must be called on the loop's thread."""
        assert self._loop is None, "the meter is running"
        self._loop = loop
        self._plan()

    def stop(self) -> None:
        """Stop measuring; no error if it is not running."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None

    def _plan(self) -> None:
        assert self._loop is not None
        self._planned_s = self._loop.time() + INTERVAL_S
        self._timer = self._loop.call_at(self._planned_s, self._measure)

    def _measure(self) -> None:
        assert self._loop is not None
        # Some loops read their clock at the start of an iteration, so the difference may be negative.
        self._seconds.observe(max(0.0, self._loop.time() - self._planned_s))
        self._plan()
