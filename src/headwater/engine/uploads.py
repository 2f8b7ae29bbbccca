"""Upload of a blob, which is written while it is received, so that only a few pieces of it are in memory.

If writes can block, one job at a time runs on a background thread, and `is_full` says that the sender must wait.
Invariant: an upload is either finished or aborted, and an aborted upload leaves nothing in the store.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from typing import Final

from headwater.core.errors import PayloadTooLarge, Refusal, StorageFull, StorageUnavailable
from headwater.engine.background_threads import Background
from headwater.storage.blobs import PAGE_BYTES, BlobStore, BlobWriter
from headwater.storage.tiering.objects import ObjectStoreError

log = logging.getLogger("headwater.engine")

FULL_BYTES: Final = 4 * PAGE_BYTES
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
        self._collected: list[bytes] = []
        self._collected_bytes = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._busy = False
        self._aborted = False
        self._is_ended = False
        self._failure: Refusal | None = None
        self._finished: Callable[[Refusal | None], None] | None = None
        self.blob_id: Final = blob_id
        self.size = 0
        self.stream_id: int | None = None
        """The incarnation that the blob is for, if it was known when the upload began."""
        self.on_drained: Callable[[], None] | None = None
        """Called when `is_full` becomes false."""

    @property
    def is_full(self) -> bool:
        return self._waiting_bytes >= FULL_BYTES

    def write(self, data: bytes) -> None:
        """Write the next piece. Raises the refusal if the blob cannot be stored."""
        if self._failure is not None:
            raise self._failure
        if self.size + len(data) > self._max_bytes:
            raise too_large(self._max_bytes)
        self._claim(len(data))
        self.size += len(data)
        self._collected.append(data)
        self._collected_bytes += len(data)
        if self._collected_bytes >= PAGE_BYTES:
            self._queue_collected()
            self._continue()

    def finish(self, done: Callable[[Refusal | None], None]) -> None:
        """Finish the blob. `done` is called when it is durable, or with the refusal if it cannot be stored."""
        self._is_ended = True
        self._queue_collected()
        self._finished = done
        self._continue()

    def abandon(self) -> None:
        """Abort the upload unless `finish` was called, because the client disconnected or was refused."""
        if not self._is_ended:
            self.abort()

    def abort(self) -> None:
        """Remove the unfinished blob. A finished upload cannot be aborted."""
        if self._aborted:
            return
        self._aborted = self._is_ended = True
        self._release(self.size)
        self._collected.clear()
        self._waiting_bytes -= sum(map(len, self._waiting))
        self._waiting.clear()
        self._finished = None
        if not self._busy:
            self._discard()

    def _queue_collected(self) -> None:
        if self._collected:
            self._waiting.append(self._collected[0] if len(self._collected) == 1 else b"".join(self._collected))
            self._waiting_bytes += self._collected_bytes
            self._collected = []
            self._collected_bytes = 0

    def _continue(self) -> None:
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
            was_full = self.is_full
            self._waiting_bytes -= sum(map(len, pieces))
            if self._aborted:
                self._discard()
            elif error is not None:
                self._failure = _refusal_of(error)
                self._continue()
            elif last:
                self._end(None)
            else:
                self._continue()
            if was_full and not self.is_full and self.on_drained is not None:
                self.on_drained()

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


def too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The snapshot is larger than {max_bytes} bytes (limits.max_snapshot_bytes); send a smaller one."
    )


def _refusal_of(error: BaseException) -> Refusal:
    log.error("a snapshot could not be written: %s", error, exc_info=error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull("The disk is full, and the snapshot was not stored; free disk space.")
    if isinstance(error, ObjectStoreError):
        return StorageUnavailable(
            "The object store cannot be used at the moment, and the snapshot was not stored; retry.",
            (("Retry-After", "1"),),
        )
    return StorageUnavailable(
        "The snapshot could not be written and was not stored; the log of the server has the reason."
    )


def _log_failure(error: BaseException | None) -> None:
    if error is not None:
        log.warning("an aborted snapshot could not be removed; the next start will remove it: %s", error)
