"""Check whether storage accepts writes, before every write.

The result can change only with time and with writes, so storage is asked once per iteration of the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from headwater.core.errors import StorageBusy, StorageFull
from headwater.engine.committer import Committer
from headwater.storage.interface import Storage

log = logging.getLogger("headwater.engine")


class WriteGate:
    def __init__(self, storage: Storage, committer: Committer, on_busy: Callable[[], None]) -> None:
        self._storage = storage
        self._committer = committer
        self._on_busy = on_busy
        """Called for each write that is refused because storage is busy."""
        self._reported: str | None = None

    @property
    def failure(self) -> str | None:
        """Why writes are refused, or None."""
        return self._committer.failure or self._storage.refusal()

    def check(self) -> None:
        """Refuse a write that storage does not accept."""
        committer = self._committer
        if committer.batch_is_checked:
            return
        if committer.failure is not None:
            committer.check()
        refusal = self._storage.refusal()
        if refusal is not None:
            self._report(refusal)
            raise StorageFull(refusal)
        busy = self._storage.busy()
        if busy is not None:
            self._on_busy()
            raise StorageBusy(busy, (("Retry-After", "1"),))

    def check_failure(self) -> None:
        """Refuse a write only after storage has failed: for deletions, which free space."""
        self._committer.check()

    def report(self) -> None:
        """Log when storage begins to refuse writes, and when it accepts them again. Called about once a second."""
        self._report(self._storage.refusal())

    def _report(self, refusal: str | None) -> None:
        if (refusal is None) != (self._reported is None):
            if refusal is not None:
                log.error("writes are refused: %s", refusal)
            else:
                log.info("writes are accepted again")
        self._reported = refusal
