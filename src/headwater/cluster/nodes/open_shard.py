"""Open the store of a shard from Postgres and the object store; the local directory is only a cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import psycopg

from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.worker_tiers import share
from headwater.config import Settings
from headwater.engine.open_storage import Store
from headwater.storage.blobs import BLOBS_NAME, FileBlobs
from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.interface import StorageError
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.tiering.objects import Objects
from headwater.storage.tiering.open import TierSettings, open_objects, open_replicated

KEPT_S: Final = 10.0
"""How long batches that the object store has are kept for standbys, which read them five times per second."""


def shard_directory(root: Path, shard: int, epoch: int) -> Path:
    """The directory of one process of a shard.

    Every epoch has its own, because a process that was replaced may still be running.
    """
    return root / f"shard-{shard:03}" / f"{epoch:010}"


def empty_directory(settings: Settings, shard: int, epoch: int) -> Path:
    """The directory of a process that starts now; those of earlier processes are removed."""
    directory = shard_directory(settings.storage.data_dir, shard, epoch)
    with suppress(FileNotFoundError):
        shutil.rmtree(directory.parent)
    return directory


def open_journal(settings: Settings, shard: int, epoch: int, is_ours: Callable[[], bool]) -> PostgresJournal:
    """The journal of a shard, for the owner. Raises `StorageError`, also if the epoch is not current."""
    cluster = settings.cluster
    try:
        return PostgresJournal(
            cluster.postgres_url,
            shard,
            epoch,
            require_standby=cluster.require_standby,
            is_ours=is_ours,
            keep_s=KEPT_S if cluster.standbys else 0.0,
        )
    except psycopg.Error as error:
        raise StorageError(f"The journal of shard {shard} cannot be opened: {error}") from error


def tier_settings(settings: Settings, shards: int) -> TierSettings:
    storage = settings.storage
    return TierSettings(
        share(storage.cold_cache_bytes, shards),
        share(storage.cold_backlog_bytes, shards),
        storage.cold_grace_secs,
    )


def store_settings(settings: Settings, open_packs_max: int) -> StoreSettings:
    return StoreSettings(
        segment_bytes=settings.storage.segment_bytes,
        hot_tail_bytes=settings.hot_tail_bytes,
        open_packs_max=open_packs_max,
    )


def shard_objects(cold: str, shard: int) -> Objects:
    """The location of the packs of a shard."""
    return open_objects(f"{cold.rstrip('/')}/shard-{shard:03}")


def open_shard(
    settings: Settings, shard: int, shards: int, epoch: int, open_packs_max: int, is_ours: Callable[[], bool]
) -> Store:
    """Open a shard in an epoch that this node owns. Raises `StorageError` if it does not, or if something is
    missing."""
    storage = settings.storage
    directory = empty_directory(settings, shard, epoch)
    journal = open_journal(settings, shard, epoch, is_ours)
    assert storage.cold is not None
    try:
        opened = open_replicated(
            shard_objects(storage.cold, shard),
            directory,
            tier_settings(settings, shards),
            store_settings(settings, open_packs_max),
            epoch=epoch,
            replica=journal,
            reserve=DescriptorReserve(),
        )
    except psycopg.Error as error:
        raise StorageError(f"The journal of shard {shard} cannot be read: {error}") from error
    try:
        blobs = FileBlobs(opened.files, directory / BLOBS_NAME, durable=True)
    except BaseException:
        opened.storage.close()
        raise
    return Store(opened.storage, blobs, opened.files, opened.files.cache.deferring)
