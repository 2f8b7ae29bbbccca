"""Run long work on the event loop in slices that are too short to affect other clients.

All jobs share one slice per iteration of the loop, and take turns: many jobs take longer, but do not block the loop
longer than one job.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from headwater.engine.scheduler import Scheduler

log = logging.getLogger("headwater.engine")

SLICE_S: Final = 0.005
"""Time for one slice. The limit for a block of the loop is 50 ms, and the write after a slice takes as long again."""
STEPS_MAX: Final = 2_000
"""Steps in one slice. Each may save something, and all of it is one commit."""

OnFinished: TypeAlias = Callable[[Exception | None], None]


class Slices:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._jobs: deque[tuple[Iterator[object], OnFinished]] = deque()
        self._is_scheduled = False

    def add(self, steps: Iterator[object], done: OnFinished) -> None:
        """Run `steps` to its end in later iterations of the loop, then call `done` with its exception or None.

        Each `next` of `steps` must be short: a slice can only end between two of them.
        """
        self._jobs.append((steps, done))
        self._schedule()

    def _schedule(self) -> None:
        if self._jobs and not self._is_scheduled:
            self._is_scheduled = True
            self._scheduler.soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        timer_s = self._scheduler.timer_s
        deadline = timer_s() + SLICE_S
        steps_left = STEPS_MAX
        while self._jobs and steps_left > 0 and timer_s() < deadline:
            steps, done = self._jobs.popleft()
            try:
                for _ in steps:
                    steps_left -= 1
                    if steps_left <= 0 or timer_s() >= deadline:
                        self._jobs.append((steps, done))
                        break
                else:
                    _finish(done, None)
            except Exception as error:
                _finish(done, error)
        self._schedule()


def _finish(done: OnFinished, error: Exception | None) -> None:
    try:
        done(error)
    except Exception:
        # One job must not keep the others from running.
        log.exception("completing a job on the event loop failed")
