"""The file of the journal's next segment, created in advance and, if the journal is synced, filled in advance.

A sync of a file that grows makes the file system commit metadata as well; in a file that is overwritten it writes only
data. A write without a sync takes half the CPU time there, because blocks and pages exist. So the next segment is a
former segment that a checkpoint made unnecessary, or, if the journal is synced, a file filled with zeros. Everything
here runs on the store's worker, except `take` and `forget`.

Invariants: the file has no valid header until the journal begins it; it is taken only once, and not filled after that.
Its old content is never valid: the frames of a segment have its own random salt, and record numbers only grow (`replay`
states how an unused file is distinguished from a damaged one).
"""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Final, NamedTuple

from headwater.storage.filesystem import FileAppender, Filesystem, write_whole
from headwater.storage.worker import Job

SPARE_PREFIX: Final = "spare-"
"""Prefix of the names of former segments that are kept to be overwritten."""
SPARES_MAX: Final = 2
"""About the number of segments that a checkpoint makes unnecessary."""
FILL_STEP_BYTES: Final = 1024 * 1024
"""Bytes that are written and synced at a time, so that no commit waits for more than this."""
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class PreparedFile(NamedTuple):
    file: FileAppender
    filled_bytes: int
    """The size of its previous content; 0 for a new file."""


class NextSegment:
    def __init__(
        self, filesystem: Filesystem, directory: Path, *, segment_bytes: int, fills: bool, header_bytes: int
    ) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._fills = fills
        self._header_bytes = header_bytes
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._file: FileAppender | None = None
        self._is_named = False
        self._is_filling = False
        self._is_taken = False
        self._cannot_fill = False
        self._filled_bytes = 0
        self._spares: list[Path] = []
        self._spare_number = 0

    @property
    def exists(self) -> bool:
        return self._is_named

    @property
    def is_ready(self) -> bool:
        """Whether it can be taken."""
        return self._is_named and not self._is_filling

    @property
    def is_filled(self) -> bool:
        return self.is_ready and self._filled_bytes > 0

    @property
    def wants_fill(self) -> bool:
        return (
            self._is_named
            and self._fills
            and not self._filled_bytes
            and not self._is_filling
            and not self._is_taken
            and not self._cannot_fill
        )

    def prepare(self, path: Path) -> None:
        """Make sure that the file exists and survives a power loss. After an OSError it can be called again."""
        if self._file is None:
            self._filled_bytes = self._reuse(path) if self._spares else 0
            self._file = self._filesystem.overwrite(path) if self._filled_bytes else self._filesystem.create(path)
            self._path = path
        self._filesystem.sync_directory(self._directory)
        self._is_named = True

    def fill(self) -> Job:
        """Write zeros to the file in advance, in steps. On a full disk the file is left empty.

        After another error while it is written, the file is never used.
        """
        with self._lock:
            if not self.wants_fill:
                return
            self._is_filling = True
        path = self._path
        assert path is not None
        try:
            file = self._filesystem.overwrite(path)
        except OSError:
            self._is_filling = False
            raise
        try:
            for start in range(0, self._segment_bytes, FILL_STEP_BYTES):
                write_whole(file, bytes(min(FILL_STEP_BYTES, self._segment_bytes - start)))
                file.sync()
                yield
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
            self._filesystem.truncate(path, 0)
            self._cannot_fill = True
        else:
            self._filled_bytes = self._segment_bytes
        finally:
            file.close()
        self._is_filling = False

    def take(self) -> PreparedFile | None:
        """The file, for the journal to begin; None while it is missing or being filled."""
        with self._lock:
            if not self._is_named or self._is_filling:
                return None
            self._is_taken = True
        assert self._file is not None
        return PreparedFile(self._file, self._filled_bytes)

    def forget(self) -> None:
        """Reset after the taken file has become the current segment, so that another one can be prepared."""
        self._file = self._path = None
        self._is_taken = self._cannot_fill = False
        self._filled_bytes = 0
        # Last, because this lets the worker begin.
        self._is_named = False

    def keep_spare(self, path: Path) -> bool:
        """Keep a segment that is no longer needed, to be overwritten later; False if it has to be removed."""
        if len(self._spares) >= SPARES_MAX:
            return False
        if not self._segment_bytes <= self._filesystem.size(path) <= 2 * self._segment_bytes:
            return False
        self._spare_number += 1
        spare = self._directory / f"{SPARE_PREFIX}{self._spare_number}"
        if not self._filesystem.recycle(path, spare):
            return False
        self._spares.append(spare)
        return True

    def close(self, *, remove: bool) -> None:
        """Close the file; with `remove`, remove the prepared and spare files."""
        if self._file is not None:
            self._file.close()
        if remove:
            for path in filter(None, (self._path, *self._spares)):
                self._filesystem.unlink(path)

    def _reuse(self, path: Path) -> int:
        """Erase the header of a spare file and rename it to the next segment; returns its size."""
        spare = self._spares[-1]
        filled_bytes = self._filesystem.size(spare)
        file = self._filesystem.overwrite(spare)
        try:
            write_whole(file, bytes(self._header_bytes))
            file.sync()
        finally:
            file.close()
        self._filesystem.replace(spare, path)
        self._spares.pop()
        return filled_bytes


def remove_spares(filesystem: Filesystem, directory: Path) -> None:
    """Remove the spare files of an earlier run."""
    for name in filesystem.names(directory):
        if name.startswith(SPARE_PREFIX):
            filesystem.unlink(directory / name)
