"""Temporary data directories for the model test over real stores.

A crash here loses what the engine had queued; the store itself is closed. Kills in the middle of a write are tested
with each store, with real processes and with simulated disks that lose unsynced data.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from headwater.storage.interface import Storage


class DirectoryBacking:
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
