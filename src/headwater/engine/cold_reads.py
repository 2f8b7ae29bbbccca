"""Reads of data in an object store: the reader waits for it, the event loop does not.

A read raises `ColdRead`, and the data is fetched in the background. A caller that can wait repeats the read when that
is done (`then`); for other callers it is a refusal with status 503 and `Retry-After`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, TypeAlias

from headwater.core.errors import BeingFetched, Refusal
from headwater.engine.scheduler import Scheduler
from headwater.storage.tiering.block_cache import NotLocalError

POLL_S: Final = 0.01

Deferring: TypeAlias = Callable[[], AbstractContextManager[None]]
"""A context in which reads raise `ColdRead` instead of waiting."""


class ColdRead(BeingFetched):
    """Data of a read is being fetched."""

    def __init__(self, name: str, error: NotLocalError) -> None:
        super().__init__(f"Data of stream {name!r} is being fetched; retry.", (("Retry-After", "1"),))
        self._fetched = error.fetched

    def then(self, loop: asyncio.AbstractEventLoop, resume: Callable[[Refusal | None], None]) -> None:
        """Call `resume` on the event loop when the data is fetched, with the refusal if that failed."""
        self._fetched.add_done_callback(lambda _: loop.call_soon_threadsafe(self._resume, resume))

    def when_fetched(self, scheduler: Scheduler, resume: Callable[[Refusal | None], None]) -> None:
        """The same for callers that have the engine's scheduler instead of the loop; it polls."""
        if self._fetched.done():
            self._resume(resume)
        else:
            scheduler.later(POLL_S, lambda: self.when_fetched(scheduler, resume))

    def _resume(self, resume: Callable[[Refusal | None], None]) -> None:
        failed = self._fetched.cancelled() or self._fetched.exception() is not None
        resume(self if failed else None)


class Pending(bytes):
    """An empty piece of a body, whose next piece is being fetched."""

    miss: ColdRead


def pending(miss: ColdRead) -> Pending:
    piece = Pending()
    piece.miss = miss
    return piece
