"""Background threads for work that no commit waits for: large blobs, and compression.

They are separate from the commit thread, which must never wait for a file of hundreds of megabytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

THREADS: Final = 4


class Background(Protocol):
    def run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run `work` on a thread, then call `done` on the event loop with the exception that it raised, or None."""

    def close(self) -> None:
        """Wait for running work."""


class Threads:
    """Background threads of an asyncio loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str = "headwater-blobs", threads: int = THREADS) -> None:
        self._loop = loop
        self._name = name
        self._count = threads
        self._threads: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, self._name)

        def finished(future: Future[None]) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(done, future.exception())

        self._threads.submit(work).add_done_callback(finished)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)


class AtOnce:
    """Runs work immediately in the calling thread. For stores that never block, and for tests."""

    def run(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        try:
            work()
        except Exception as error:
            done(error)
        else:
            done(None)

    def close(self) -> None:
        """Nothing is running."""
