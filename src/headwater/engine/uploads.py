"""A blob that is written while it is received, so that only a few pieces of it are in memory.

Where writing can block, one job at a time runs on a background thread, and `crowded` says that the sender must wait.
Invariant: an upload is either finished or aborted, and an aborted upload leaves nothing in the store.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Final

from headwater.core.errors import Refusal, StorageFull, StorageUnavailable, TooLarge
from headwater.engine.background import Background
from headwater.storage.blobs import PAGE_BYTES, BlobStore, BlobWriter

log = logging.getLogger("headwater.engine")

CROWDED_BYTES: Final = 4 * PAGE_BYTES
"""While this much waits for the disk, the connection is not read."""


class BlobUpload:
    def __init__(
        self,
        store: BlobStore,
        background: Background,
        blob_id: int,
        max_bytes: int,
        claim: Callable[[int], None],
        release: Callable[[int], None],
    ) -> None:
        self._store = store
        self._background = background
        self._max_bytes = max_bytes
        self._claim = claim
        self._release = release
        self._writer: BlobWriter | None = None
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._busy = False
        self._aborted = False
        self._taken = False
        self._failure: Refusal | None = None
        self._finished: Callable[[Refusal | None], None] | None = None
        self.blob_id: Final = blob_id
        self.size = 0
        self.stream_id: int | None = None
        """The incarnation that the blob is for, if it was known when the upload began."""
        self.on_room: Callable[[], None] | None = None
        """Called when `crowded` becomes false."""

    @property
    def crowded(self) -> bool:
        return self._waiting_bytes >= CROWDED_BYTES

    def write(self, data: bytes) -> None:
        """Write the next piece. Raises the refusal if the blob cannot be stored."""
        if self._failure is not None:
            raise self._failure
        if self.size + len(data) > self._max_bytes:
            raise too_large(self._max_bytes)
        self._claim(len(data))
        self.size += len(data)
        self._gathered.append(data)
        self._gathered_bytes += len(data)
        if self._gathered_bytes >= PAGE_BYTES:
            self._hand_over()
            self._work_on()

    def finish(self, done: Callable[[Refusal | None], None]) -> None:
        """Finish the blob. `done` is called when it is durable, or with the refusal if it cannot be stored."""
        self._taken = True
        self._hand_over()
        self._finished = done
        self._work_on()

    def abandon(self) -> None:
        """The client disconnected or was refused: abort the upload, unless `finish` was called."""
        if not self._taken:
            self.abort()

    def abort(self) -> None:
        """Remove what was written. An upload that was finished cannot be aborted."""
        if self._aborted:
            return
        self._aborted = self._taken = True
        self._release(self.size)
        self._gathered.clear()
        self._waiting_bytes -= sum(map(len, self._waiting))
        self._waiting.clear()
        self._finished = None
        if not self._busy:
            self._discard()

    def _hand_over(self) -> None:
        if self._gathered:
            self._waiting.append(self._gathered[0] if len(self._gathered) == 1 else b"".join(self._gathered))
            self._waiting_bytes += self._gathered_bytes
            self._gathered = []
            self._gathered_bytes = 0

    def _work_on(self) -> None:
        if self._busy or self._aborted:
            return
        if self._failure is not None:
            self._end(self._failure)
            return
        last = self._finished is not None
        if not self._waiting and not last:
            return
        pieces, self._waiting = self._waiting, []
        self._busy = True

        def work() -> None:
            if self._writer is None:
                self._writer = self._store.create(self.blob_id)
            for piece in pieces:
                self._writer.write(piece)
            if last:
                self._writer.finish()

        def done(error: BaseException | None) -> None:
            self._busy = False
            was_crowded = self.crowded
            self._waiting_bytes -= sum(map(len, pieces))
            if self._aborted:
                self._discard()
            elif error is not None:
                self._failure = _refusal_of(error)
                self._work_on()
            elif last:
                self._end(None)
            else:
                self._work_on()
            if was_crowded and not self.crowded and self.on_room is not None:
                self.on_room()

        if self._store.blocks:
            self._background.run(work, done)
        else:
            work()
            done(None)

    def _end(self, failure: Refusal | None) -> None:
        done, self._finished = self._finished, None
        if failure is not None and not self._aborted:
            self.abort()
        if done is not None:
            done(failure)

    def _discard(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return

        def remove() -> None:
            writer.abort()
            self._store.delete(self.blob_id)

        if self._store.blocks:
            self._background.run(remove, _log_failure)
        else:
            remove()


def too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"The snapshot is larger than {max_bytes} bytes.")


def _refusal_of(error: BaseException) -> Refusal:
    log.error("a snapshot could not be written: %s", error, exc_info=error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull("The disk is full; the snapshot was not stored.")
    return StorageUnavailable("The snapshot could not be written and was not stored.")


def _log_failure(error: BaseException | None) -> None:
    if error is not None:
        log.warning("an aborted snapshot could not be removed and stays until the next start: %s", error)
