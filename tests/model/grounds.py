"""Where the real stores live while the model test runs over them: each in a directory of its own.

A crash here loses what the engine had queued; the store itself is closed. How stores bear being killed in the middle
of a write is tested beside each of them, with real processes and with disks that forget.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from headwater.storage.interface import Storage


class DirectoryGround:
    survives = True

    def __init__(self, store_of: Callable[[Path], Storage]) -> None:
        self._store_of = store_of
        self._root = Path(tempfile.mkdtemp(prefix="headwater-model-"))

    def open(self) -> Storage:
        return self._store_of(self._root / "data")

    def crash(self, storage: Storage) -> None:
        storage.close()

    def discard(self) -> None:
        shutil.rmtree(self._root)
