"""Maintenance: schedules checkpoints and background chores, and brings their results to the event loop.

`maintain` runs on the event loop in slices of a few milliseconds; the long parts are jobs of the worker. It begins a
checkpoint when enough is unsaved, keeps the next journal segment ready, and runs the cold store's chores when there is
time. There is one checkpoint at a time; see `cold_store` for its phases.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Generator
from typing import Any, Final

from headwater.storage.cold_store import Checkpoint, ColdStore, Step, Steps, UnsavedState
from headwater.storage.interface import ImageOf, WriteFailedError
from headwater.storage.journal.segments import FileJournal
from headwater.storage.worker import Job, Outcome, Worker

log = logging.getLogger("headwater.storage")

SLICE_S: Final = 0.002
LONG_SLICE_S: Final = 0.01
"""The slice while memory is full."""
REFUSE_FACTOR: Final = 2
"""New writes are refused while this multiple of `hot_tail_bytes` is in memory."""
SEGMENTS_MAX: Final = 2
"""A checkpoint is made when the journal has more segments, so that a start never has much to replay."""
REST_S: Final = 1.0
RETRY_S: Final = 1.0
CHORE_RETRY_S: Final = 60.0

_TEMPORARY: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Temporary errors: the attempt is repeated, with other files."""


class Maintenance:
    def __init__(
        self,
        cold: ColdStore,
        unsaved: UnsavedState,
        journal: FileJournal,
        worker: Worker,
        *,
        hot_tail_bytes: int,
        busy_floor_bytes: int,
        segments_max: int = SEGMENTS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cold = cold
        self._unsaved = unsaved
        self._journal = journal
        self._worker = worker
        self._hot_max = hot_tail_bytes
        self._refuse_from_bytes = max(REFUSE_FACTOR * hot_tail_bytes, busy_floor_bytes)
        self._segments_max = segments_max
        self._clock = clock
        self._steps: Steps | None = None
        self._chores: Steps | None = None
        self._preparing: Outcome | None = None
        self._prepare_at = 0.0
        self._chores_at = 0.0
        self._seen_lsn = -1
        self._saved_lsn = unsaved.lsn
        self._unsaved_since: float | None = None
        self.requested = False
        """Set to request a checkpoint as soon as possible."""
        self.problem: str | None = None
        """Why a checkpoint cannot be saved at the moment, or None."""

    @property
    def is_memory_full(self) -> bool:
        """Whether there is so much unsaved data that the running checkpoint gets longer slices."""
        return self._unsaved.memory_bytes >= self._hot_max

    @property
    def must_refuse_writes(self) -> bool:
        """Whether there is so much unsaved data that new writes must be refused."""
        return self._unsaved.memory_bytes >= self._refuse_from_bytes

    @property
    def idle(self) -> bool:
        """Whether no checkpoint is running."""
        return self._steps is None

    def maintain(self, image_of: ImageOf) -> None:
        if self._journal.failure is not None:
            return
        failure = self._cold.failure
        if failure is not None:
            log.critical("writes are disabled: %s", failure)
            self._journal.fail(failure)
            return
        self._prepare_segment()
        if self._steps is None and self._is_due():
            self.requested = False
            self._unsaved_since = None
            self._steps = self._checkpoint()
        if self._steps is not None:
            self._unsaved.image_of = image_of
            self._steps = self._advance(self._steps)
            self._unsaved.image_of = None
        now = self._clock()
        if self._chores is None and now >= self._chores_at and self._steps is None:
            self._chores_at = now + REST_S
            self._chores = self._run_chores()
        if self._chores is not None:
            self._chores = self._advance(self._chores)

    def _is_due(self) -> bool:
        unsaved = self._unsaved
        return (
            self.requested
            or 2 * unsaved.bytes >= self._hot_max
            or 2 * unsaved.removed_bytes >= self._hot_max
            or len(self._journal.segments) > self._segments_max
            or self._is_overdue()
        )

    def _is_overdue(self) -> bool:
        """Whether data has been unsaved for as long as the cold store allows."""
        limit_s = self._cold.save_after_s
        if limit_s is None or self._unsaved.lsn == self._saved_lsn:
            return False
        now = self._clock()
        if self._unsaved_since is None:
            self._unsaved_since = now
        return now - self._unsaved_since >= limit_s

    def _advance(self, steps: Steps) -> Steps | None:
        """Run steps for one slice, or until they wait for a job; None when they are done."""
        is_memory_full = self.is_memory_full
        self._worker.hurry = is_memory_full
        deadline = self._clock() + (LONG_SLICE_S if is_memory_full else SLICE_S)
        for step in steps:
            if step is Step.WAIT or self._clock() >= deadline:
                return steps
        return None

    # -- a checkpoint ----------------------------------------------------------------------------------------------

    def _checkpoint(self) -> Steps:
        unsaved = self._unsaved
        segment = max(each.number for each in self._journal.segments if each.first_lsn <= unsaved.lsn + 1)
        checkpoint = unsaved.begin_checkpoint(segment)
        yield from self._cold.freeze(checkpoint)
        saved = None
        while saved is None:
            saved = yield from self._save(checkpoint)
            if self._journal.failure is not None:
                return
        yield from self._cold.publish(saved)
        unsaved.end_checkpoint()
        self._saved_lsn = checkpoint.lsn
        self._chores_at = 0.0

    def _save(self, checkpoint: Checkpoint) -> Generator[Step, None, Any]:
        outcome = self._worker.submit(self._save_and_trim(checkpoint), urgent=True)
        while not outcome.done:
            yield Step.WAIT
        error = outcome.error
        if error is None:
            self.problem = None
            return outcome.result
        if not (isinstance(error, OSError) and error.errno in _TEMPORARY):
            log.critical("a checkpoint failed; writes are disabled: %s", error, exc_info=error)
            self._journal.fail(f"Saving a checkpoint failed: {error}")
            return None
        log.error("a checkpoint failed and will be repeated: %s", error)
        self.problem = f"Data cannot be saved at the moment: {error}"
        retry_at = self._clock() + RETRY_S
        while self._clock() < retry_at:
            yield Step.WAIT
        return None

    def _save_and_trim(self, checkpoint: Checkpoint) -> Job:
        saved = yield from self._cold.save(checkpoint)
        self._journal.trim(checkpoint.segment)
        return saved

    # -- the next segment ------------------------------------------------------------------------------------------

    def _prepare_segment(self) -> None:
        """Create and fill the file of the next journal segment before it is needed."""
        outcome = self._preparing
        if outcome is not None and outcome.done:
            self._preparing = None
            error = outcome.error
            if isinstance(error, OSError) and error.errno in _TEMPORARY:
                log.warning("the next journal segment cannot be prepared yet: %s", error)
                self._prepare_at = self._clock() + RETRY_S
            elif error is not None:
                log.critical("the next journal segment cannot be prepared; writes are disabled: %s", error)
                self._journal.fail(f"Preparing the next journal segment failed: {error}")
        if self._preparing is None and self._clock() >= self._prepare_at:
            if self._journal.wants_next:
                # Ahead of a running checkpoint, which may take longer than the current segment lasts.
                self._preparing = self._worker.submit(_call(self._journal.prepare), urgent=True, first=True)
            elif self._journal.wants_fill:
                self._preparing = self._worker.submit(self._journal.fill(), urgent=False, first=True)

    # -- chores ----------------------------------------------------------------------------------------------------

    def _run_chores(self) -> Steps:
        """Mark an idle journal as complete, then run the cold store's chores one at a time."""
        if (
            self._seen_lsn == self._unsaved.lsn
            and not self._journal.is_marked_complete
            and self._journal.failure is None
        ):
            outcome = self._worker.submit(_call(self._journal.mark_complete), urgent=False)
            while not outcome.done:
                yield Step.WAIT
            if outcome.error is not None:
                log.critical("writes are disabled: %s", outcome.error)
        self._seen_lsn = self._unsaved.lsn
        while self._journal.failure is None and (chore := self._cold.next_chore()) is not None:
            outcome = self._worker.submit(chore.job, urgent=False)
            while not outcome.done:
                yield Step.WAIT
            error = outcome.error
            if error is None:
                yield from chore.complete(outcome.result)
                continue
            log.error("%s failed: %s", chore.what, error)
            if isinstance(error, WriteFailedError):
                self._journal.fail(str(error))
            else:
                chore.failed(error)
            self._chores_at = self._clock() + CHORE_RETRY_S
            return


def _call(function: Callable[[], None]) -> Job:
    function()
    yield
