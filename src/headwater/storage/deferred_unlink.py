"""A filesystem that defers deletions while a backup runs.

Storage removes only files that are no longer referenced, and records its references before it removes anything. So
a process that begins a hold and then reads the references finds all files, however long the copy takes and
whatever is written during it. Deferred deletions happen when the last hold ends, or at the next start.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Final

from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.filesystem import RealFilesystem

log = logging.getLogger("headwater.storage")

_UNFINISHED: Final = (".new", ".part")
"""Suffixes of unfinished files: nothing refers to them yet, and their names are reused."""


class DeferredUnlinkFilesystem(RealFilesystem):
    def __init__(self, reserve: DescriptorReserve | None = None) -> None:
        super().__init__(reserve)
        self._lock = threading.Lock()
        self._holds = 0
        self._deferred: list[Path] = []

    def unlink(self, path: Path) -> None:
        if path.suffix not in _UNFINISHED:
            with self._lock:
                if self._holds:
                    self._deferred.append(path)
                    return
        super().unlink(path)

    def recycle(self, path: Path, target: Path) -> bool:
        with self._lock:
            return not self._holds and super().recycle(path, target)

    def hold(self) -> None:
        """Defer the deletion of finished files until `release`."""
        with self._lock:
            self._holds += 1

    def release(self) -> None:
        """End one hold; the last one removes the files whose deletion was deferred."""
        with self._lock:
            self._holds -= 1
            assert self._holds >= 0, "release without hold"
            if self._holds:
                return
            paths, self._deferred = self._deferred, []
        for path in paths:
            try:
                super().unlink(path)
            except OSError as error:
                log.warning("%s is no longer needed and will be removed at the next start: %s", path, error)
