"""The store's worker: runs long jobs in small steps on a separate thread.

A job is a generator: it does a small step, yields, and at its end returns a result. An urgent job runs before
background ones, between any two of their steps. All jobs run on one thread, so they need no locks between each other.
The event loop applies the result of a job to its own state.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Any, Final, Protocol, TypeAlias

Job: TypeAlias = Generator[None, None, Any]

_PAUSE_S: Final = 0.0002
"""Sleeping this long after a step lets the event loop acquire the GIL."""


class Outcome:
    """The outcome of a job: `done` becomes true once, then either `error` or `result` is set."""

    __slots__ = ("done", "error", "job", "result")

    def __init__(self, job: Job) -> None:
        self.job: Final = job
        self.done = False
        self.error: BaseException | None = None
        self.result: Any = None

    def step(self) -> None:
        """Run one step of the job; a worker calls this until it is done."""
        try:
            next(self.job)
        except StopIteration as stop:
            self.result = stop.value
            self.done = True
        except BaseException as error:
            self.error = error
            self.done = True


class Worker(Protocol):
    hurry: bool
    """Whether jobs run without pauses, although the event loop then gets the GIL less often."""

    def submit(self, job: Job, *, urgent: bool, first: bool = False) -> Outcome:
        """Queue a job. With `first` it runs before other jobs of its queue, between two of their steps."""

    def close(self) -> None:
        """Finish urgent jobs, interrupt the others, and stop."""


class ThreadWorker:
    """Runs jobs on a separate thread, which is started with the first of them."""

    def __init__(self) -> None:
        self._urgent: deque[Outcome] = deque()
        self._background: deque[Outcome] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.hurry = False
        self._closing = False

    def submit(self, job: Job, *, urgent: bool, first: bool = False) -> Outcome:
        outcome = Outcome(job)
        with self._changed:
            queue = self._urgent if urgent else self._background
            (queue.appendleft if first else queue.append)(outcome)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headwater-store", daemon=True)
            self._thread.start()
        return outcome

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (outcome := self._next()) is not None:
            outcome.step()
            if outcome.done:
                with self._changed:
                    queue = self._urgent if outcome in self._urgent else self._background
                    queue.remove(outcome)
                    self._changed.notify_all()
            elif not self.hurry:
                time.sleep(_PAUSE_S)
        for outcome in self._background:
            # An interrupted job removes the files that it has written.
            outcome.job.close()

    def _next(self) -> Outcome | None:
        with self._changed:
            while not self._urgent and not self._background and not self._closing:
                self._changed.wait()
            if self._urgent:
                return self._urgent[0]
            return None if self._closing else self._background[0]
