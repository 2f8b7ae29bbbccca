"""The engine's interface to the event loop: run soon, run later, run on a thread, and how long a step has taken.

Tests replace it to step through time and crashes without a loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Scheduler(Protocol):
    def soon(self, callback: Callable[[], None]) -> None:
        """Run in the next iteration of the event loop."""

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer: ...

    def on_thread(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run `work` on the commit thread, then call `done` on the event loop with its exception, or None."""

    def timer_s(self) -> float:
        """Return the value of a precise timer, which limits how long one step holds the event loop."""

    def close(self) -> None: ...


class LoopScheduler:
    """The real scheduler, on an asyncio loop."""

    timer_s = staticmethod(time.perf_counter)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread: ThreadPoolExecutor | None = None

    def soon(self, callback: Callable[[], None]) -> None:
        self._loop.call_soon(callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self._loop.call_later(delay_s, callback)

    def on_thread(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "headwater-commit")

        def finished(future: Future[None]) -> None:
            self._loop.call_soon_threadsafe(done, future.exception())

        self._thread.submit(work).add_done_callback(finished)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
