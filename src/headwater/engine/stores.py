"""Which storage mode the settings ask for, opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.storage.interface import Storage, StorageError
from headwater.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from headwater.config import Storage as StorageSettings


def open_storage(settings: StorageSettings) -> Storage:
    """The store for a mode. Its directory is locked from here on; `Storage.close` lets it go."""
    if settings.mode == "memory":
        return MemoryStorage()
    raise StorageError(f"Storage mode {settings.mode!r} is not available in this build.")
