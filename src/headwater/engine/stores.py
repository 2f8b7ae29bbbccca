"""Which storage mode the settings ask for, opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.storage.acid.store import AcidStorage
from headwater.storage.blobs import BLOBS_NAME, BlobStore, FileBlobs, MemoryBlobs
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Storage
from headwater.storage.log.storage import LogSettings, LogStorage
from headwater.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from headwater.config import Storage as StorageSettings


def open_storage(settings: StorageSettings) -> Storage:
    """The store for a mode. Its directory is locked from here on; `Storage.close` lets it go."""
    if settings.mode == "memory":
        return MemoryStorage()
    if settings.mode == "acid":
        return AcidStorage(
            settings.data_dir, settings.acid_shard_count, settings.acid_map_bytes, settings.hot_tail_bytes
        )
    return LogStorage(
        RealFilesystem(),
        settings.data_dir,
        durable=settings.mode == "file-durable",
        settings=LogSettings(segment_bytes=settings.segment_bytes, hot_tail_bytes=settings.hot_tail_bytes),
    )


def open_blobs(settings: StorageSettings) -> BlobStore:
    """Where snapshots are kept. In the persistent modes the directory must have been locked by `open_storage`."""
    if settings.mode == "memory":
        return MemoryBlobs()
    return FileBlobs(RealFilesystem(), settings.data_dir / BLOBS_NAME, durable=settings.mode != "file-fast")
