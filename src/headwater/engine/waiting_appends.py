"""Appends with large bodies that wait while data arrives faster than storage can save it, instead of being refused.

They would be refused at once (see `write_gate`), and a client that sends large bodies would spend its time with sending
them again. The wait is limited, and so is what is admitted at a time. Appends with small bodies never wait here: other
clients must not be delayed by a checkpoint.

While storage is busy nothing is committed, so nothing else continues the checkpoint that ends this: it is continued
here, every few milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from headwater.core.errors import Refusal, StorageBusy
from headwater.engine.committer import guarded
from headwater.engine.results import OnAppended
from headwater.engine.scheduler import Scheduler, Timer
from headwater.storage.interface import Storage

WAITS_FROM_BYTES: Final = 16 * 1024
"""The size of a body that waits; a smaller one is refused at once."""
WAIT_S: Final = 5.0
"""How long an append waits until it is refused."""
ADMITTED_BYTES: Final = 8 * 1024 * 1024
"""Bodies that are admitted together: what is not committed yet does not make storage busy."""
INTERVAL_S: Final = 0.002


class WaitingAppend(msgspec.Struct, frozen=True):
    size: int
    begin: Callable[[], None]
    done: OnAppended
    until_s: float
    refusal: StorageBusy


class WaitingAppends:
    def __init__(self, storage: Storage, scheduler: Scheduler, maintain: Callable[[], None]) -> None:
        self._storage = storage
        self._scheduler = scheduler
        self._maintain = maintain
        """Continue the maintenance of storage."""
        self._waiting: deque[WaitingAppend] = deque()
        self._timer: Timer | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, size: int, begin: Callable[[], None], done: OnAppended, refusal: StorageBusy) -> None:
        """Call `begin` when storage accepts writes again, or `done` with the refusal after a while."""
        until_s = self._scheduler.timer_s() + WAIT_S
        self._waiting.append(WaitingAppend(size, begin, done, until_s, refusal))

    def on_busy(self) -> None:
        """Note that storage has refused a write, because it is busy."""
        if self._timer is None:
            self._timer = self._scheduler.later(INTERVAL_S, self._continue)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _continue(self) -> None:
        self._timer = None
        self._maintain()
        waiting = self._waiting
        now_s = self._scheduler.timer_s()
        admitted = 0
        while waiting and admitted < ADMITTED_BYTES and self._storage.busy() is None:
            first = waiting.popleft()
            admitted += first.size
            guarded(_begin, first)
        while waiting and waiting[0].until_s <= now_s:
            first = waiting.popleft()
            guarded(first.done, first.refusal)
        if waiting or self._storage.busy() is not None:
            self.on_busy()


def _begin(append: WaitingAppend) -> None:
    try:
        append.begin()
    except Refusal as refusal:
        append.done(refusal)
    except Exception:
        append.done(append.refusal)
        raise
