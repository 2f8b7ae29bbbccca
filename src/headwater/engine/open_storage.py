"""Open the configured storage mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headwater.engine.cold_reads import Deferring
from headwater.storage.acid.shard_store import acid_storage
from headwater.storage.blobs import BLOBS_NAME, BlobStore, FileBlobs, MemoryBlobs
from headwater.storage.deferred_unlink import DeferredUnlinkFilesystem
from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import Storage, StorageError
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.memory import MemoryStorage
from headwater.storage.packs.pack_set import OPEN_MAX
from headwater.storage.packs.pack_store import file_storage
from headwater.storage.tiering.claimed_prefix import read_mark
from headwater.storage.tiering.open import TierSettings, open_objects, open_tiered

if TYPE_CHECKING:
    from headwater.config import StorageSettings


class Store(NamedTuple):
    """An open store. Its directory is locked until `storage` is closed."""

    storage: Storage
    blobs: BlobStore
    """The store of snapshots; in the persistent modes it is in the directory that `storage` has locked."""
    files: DeferredUnlinkFilesystem
    deferring: Deferring | None = None
    """Set if packs and blobs are in an object store: the context for reads that must not wait for it."""


def open_store(settings: StorageSettings, open_packs_max: int = OPEN_MAX, hot_tail_bytes: int | None = None) -> Store:
    if settings.mode == "memory":
        return Store(MemoryStorage(), MemoryBlobs(), DeferredUnlinkFilesystem())
    sizes = StoreSettings(
        segment_bytes=settings.segment_bytes,
        hot_tail_bytes=settings.hot_tail_bytes if hot_tail_bytes is None else hot_tail_bytes,
        open_packs_max=open_packs_max,
        journal_dir=settings.journal_dir.resolve() if settings.journal_dir is not None else None,
    )
    check_tier(settings)
    if settings.cold is not None:
        return _open_tiered(settings, settings.cold, sizes)
    files = DeferredUnlinkFilesystem(DescriptorReserve())
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


def check_tier(settings: StorageSettings) -> None:
    """Refuse to open a directory without the object store that has its packs."""
    mark = read_mark(RealFilesystem(), settings.data_dir) if settings.data_dir.exists() else None
    if mark is not None and settings.cold is None:
        raise StorageError(
            f"The packs of {settings.data_dir} are in {mark.url}. Set storage.cold to it, or copy the store into a"
            " plain directory with `headwater store copy`."
        )


def _open_tiered(settings: StorageSettings, url: str, sizes: StoreSettings) -> Store:
    tier = TierSettings(
        settings.cold_cache_bytes, settings.cold_backlog_bytes, settings.cold_grace_secs, settings.accept_data_loss
    )
    storage, files = open_tiered(open_objects(url), settings.data_dir, tier, sizes, reserve=DescriptorReserve())
    try:
        blobs = FileBlobs(files, settings.data_dir / BLOBS_NAME, durable=True)
    except BaseException:
        storage.close()
        raise
    return Store(storage, blobs, files, files.cache.deferring)
