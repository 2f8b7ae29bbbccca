"""Open the configured storage mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headwater.storage.acid.shard_store import acid_storage
from headwater.storage.blobs import BLOBS_NAME, BlobStore, FileBlobs, MemoryBlobs
from headwater.storage.deferred_unlink import DeferredUnlinkFilesystem
from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.interface import Storage
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.memory import MemoryStorage
from headwater.storage.packs.pack_set import OPEN_MAX
from headwater.storage.packs.pack_store import file_storage

if TYPE_CHECKING:
    from headwater.config import StorageSettings


class Store(NamedTuple):
    """An open store. Its directory is locked until `storage` is closed."""

    storage: Storage
    blobs: BlobStore
    """Where snapshots are kept: in the persistent modes, in the directory that `storage` has locked."""
    files: DeferredUnlinkFilesystem


def open_store(settings: StorageSettings, open_packs_max: int = OPEN_MAX, hot_tail_bytes: int | None = None) -> Store:
    if settings.mode == "memory":
        return Store(MemoryStorage(), MemoryBlobs(), DeferredUnlinkFilesystem())
    files = DeferredUnlinkFilesystem(DescriptorReserve())
    sizes = StoreSettings(
        segment_bytes=settings.segment_bytes,
        hot_tail_bytes=settings.hot_tail_bytes if hot_tail_bytes is None else hot_tail_bytes,
        open_packs_max=open_packs_max,
    )
    storage: Storage
    if settings.mode == "acid":
        shards, map_bytes = settings.acid_shard_count, settings.acid_map_bytes
        storage = acid_storage(settings.data_dir, shards, map_bytes, filesystem=files, settings=sizes)
    else:
        storage = file_storage(files, settings.data_dir, durable=settings.mode == "file-durable", settings=sizes)
    try:
        blobs = FileBlobs(files, settings.data_dir / BLOBS_NAME, durable=settings.mode != "file-fast")
    except BaseException:
        storage.close()
        raise
    return Store(storage, blobs, files)
