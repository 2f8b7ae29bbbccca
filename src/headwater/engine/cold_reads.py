"""Reads of data that is in an object store: the event loop never waits for it, but the reader does.

A read raises `ColdRead`, and what it needs is fetched in the background. Who can wait repeats the read when that is
done (`then`); to anyone else it is a refusal like others: 503, try again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, TypeAlias

from headwater.core.errors import BeingFetched, Refusal
from headwater.engine.scheduler import Scheduler
from headwater.storage.tiering.block_cache import NotLocalError

LOOK_S: Final = 0.01

Deferring: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Within it, reads raise `ColdRead`; elsewhere they wait."""


class ColdRead(BeingFetched):
    """Part of what is read is being fetched."""

    def __init__(self, name: str, error: NotLocalError) -> None:
        super().__init__(f"Data of stream {name!r} is being fetched; try again.", (("Retry-After", "1"),))
        self._fetched = error.fetched

    def then(self, loop: asyncio.AbstractEventLoop, resume: Callable[[Refusal | None], None]) -> None:
        """Call `resume` on the event loop when it is here, or with the refusal when it could not be fetched."""
        self._fetched.add_done_callback(lambda _: loop.call_soon_threadsafe(self._resume, resume))

    def when_fetched(self, scheduler: Scheduler, resume: Callable[[Refusal | None], None]) -> None:
        """The same, for who has the engine's scheduler instead of the loop: it is looked for now and then."""
        if self._fetched.done():
            self._resume(resume)
        else:
            scheduler.later(LOOK_S, lambda: self.when_fetched(scheduler, resume))

    def _resume(self, resume: Callable[[Refusal | None], None]) -> None:
        failed = self._fetched.cancelled() or self._fetched.exception() is not None
        resume(self if failed else None)


class Pending(bytes):
    """An empty piece of a body: the next one is being fetched."""

    miss: ColdRead


def pending(miss: ColdRead) -> Pending:
    piece = Pending()
    piece.miss = miss
    return piece
