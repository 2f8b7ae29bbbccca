"""The file system of the machine, with a way to keep files for a while: somebody is copying the directory.

Storage removes only files that nothing refers to any more, and says what it refers to before it removes anything. So
whoever holds the files and then reads what is referred to finds all of it, however long the copying takes and whatever
is written meanwhile. What is put off is done when the last hold ends, or by the next start.
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
"""How the names of files end that are still being made: nothing refers to them yet, and their names are used again."""


class DeferredUnlinkFilesystem(RealFilesystem):
    def __init__(self, reserve: DescriptorReserve | None = None) -> None:
        super().__init__(reserve)
        self._lock = threading.Lock()
        self._holds = 0
        self._put_off: list[Path] = []

    def unlink(self, path: Path) -> None:
        if path.suffix not in _UNFINISHED:
            with self._lock:
                if self._holds:
                    self._put_off.append(path)
                    return
        super().unlink(path)

    def hold(self) -> None:
        """From now on every finished file stays."""
        with self._lock:
            self._holds += 1

    def release(self) -> None:
        """End one hold; with the last of them the files that were to go meanwhile go now."""
        with self._lock:
            self._holds -= 1
            assert self._holds >= 0, "a hold ends once"
            if self._holds:
                return
            paths, self._put_off = self._put_off, []
        for path in paths:
            try:
                super().unlink(path)
            except OSError as error:
                log.warning("%s is no longer needed but stays until the next start: %s", path, error)
