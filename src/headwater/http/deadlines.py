"""Deadlines of live reads: one timer for all of them.

All deadlines of one kind have the same delay, so they are due in the order in which they were set, and a queue is
sufficient. Cancelled ones are skipped when they are due.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from headwater.engine.committer import guarded

DUE_S: Final = 0.008
"""Time for the deadlines of one iteration of the event loop; thousands of long-polls may end together."""


class Deadline:
    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Callable[[], None]) -> None:
        self.at_s = at_s
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Deadlines:
    """Deadlines with the same delay, `delay_s`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._queue: deque[Deadline] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def set(self, action: Callable[[], None]) -> Deadline:
        deadline = Deadline(self._loop.time() + self._delay_s, action)
        self._queue.append(deadline)
        if self._timer is None:
            self._timer = self._loop.call_at(deadline.at_s, self._due)
        return deadline

    def _due(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        until_s = time.perf_counter() + DUE_S
        while self._queue and (self._queue[0].action is None or self._queue[0].at_s <= now_s):
            action = self._queue.popleft().action
            if action is not None:
                guarded(action)
                if time.perf_counter() >= until_s:
                    break
        if self._queue and self._timer is None:
            self._timer = self._loop.call_at(self._queue[0].at_s, self._due)
