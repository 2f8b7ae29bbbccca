"""Open a data directory with an object store, after checking that the two belong together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.directory import Directory, open_directory
from headwater.storage.filesystem import Filesystem, RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal.replica import JournalReplica
from headwater.storage.journal.segments import HEADER_BYTES, segment_numbers, segment_path
from headwater.storage.journal_location import journal_directory, place_journal
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.packs.manifest import NAME
from headwater.storage.packs.pack_store import FAMILY, PackStore
from headwater.storage.tiering.claimed_prefix import ClaimedPrefix, read_mark
from headwater.storage.tiering.objects import Objects, required_store
from headwater.storage.tiering.restore import restore_directory, restore_replicated
from headwater.storage.tiering.tier import Tier, TieredFilesystem
from headwater.storage.tiering.uploader import RETRY_S, Uploader
from headwater.storage.worker import Worker


@dataclass(frozen=True, slots=True)
class TierSettings:
    cache_bytes: int = 2**30
    """How much of the object store's content is cached on the disk."""
    backlog_bytes: int = 4 * 2**30
    """How much may wait on the disk while the object store cannot be reached."""
    grace_s: float = 3600.0
    """How long an unreferenced object is kept."""
    accept_data_loss: bool = False
    retry_s: float = RETRY_S
    """The delay before a retry after the object store could not be reached."""


class TieredStore(NamedTuple):
    storage: JournaledStorage
    files: TieredFilesystem


def open_tiered(
    objects: Objects,
    directory: Path,
    tier_settings: TierSettings,
    settings: StoreSettings | None = None,
    *,
    reserve: DescriptorReserve | None = None,
    worker: Worker | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TieredStore:
    """Open a data directory in mode `file-durable` over an object store."""
    filesystem = RealFilesystem(reserve)
    settings = settings if settings is not None else StoreSettings()
    opened = open_directory(filesystem, directory, FAMILY)
    try:
        with required_store():
            claimed = _claim(objects, filesystem, directory, accept_data_loss=tier_settings.accept_data_loss)
            place_journal(filesystem, opened, settings.journal_dir)
            return _build(objects, opened, claimed, tier_settings, settings, reserve, worker, clock)
    except BaseException:
        opened.close()
        raise


def open_replicated(
    objects: Objects,
    directory: Path,
    tier_settings: TierSettings,
    settings: StoreSettings,
    *,
    epoch: int,
    replica: JournalReplica,
    reserve: DescriptorReserve | None = None,
) -> TieredStore:
    """Open a store in an empty directory, only from the object store and the replica of its journal.

    The prefix is claimed before anything is read, so its content cannot change any more.
    """
    filesystem = RealFilesystem(reserve)
    opened = open_directory(filesystem, directory, FAMILY)
    try:
        with required_store():
            claimed = ClaimedPrefix(objects)
            head = claimed.claim(filesystem, directory, epoch)
            restore_replicated(filesystem, directory, objects, head, replica, settings.segment_bytes)
            return _build(objects, opened, claimed, tier_settings, settings, reserve, None, time.monotonic, replica)
    except BaseException:
        opened.close()
        raise


def _build(
    objects: Objects,
    opened: Directory,
    claimed: ClaimedPrefix,
    tier_settings: TierSettings,
    settings: StoreSettings,
    reserve: DescriptorReserve | None,
    worker: Worker | None,
    clock: Callable[[], float],
    replica: JournalReplica | None = None,
) -> TieredStore:
    """Build the store of a directory whose prefix is claimed. With a replica, the local journal is not synced."""
    directory = opened.path
    files = TieredFilesystem(objects, directory, reserve)
    tier = build_tier(objects, files, claimed, directory, tier_settings, replica)
    cold = PackStore(files, directory, settings, tier)
    storage = JournaledStorage(
        files, opened, cold, durable=replica is None, settings=settings, worker=worker, clock=clock
    )
    return TieredStore(storage, files)


def build_tier(
    objects: Objects,
    files: TieredFilesystem,
    claimed: ClaimedPrefix,
    directory: Path,
    tier_settings: TierSettings,
    replica: JournalReplica | None,
) -> Tier:
    """The tier of a directory whose prefix is claimed."""
    files.stores_blobs_first = replica is not None
    files.uploader = uploader = Uploader(
        objects, claimed, directory, files, files.remove, grace_s=tier_settings.grace_s, retry_s=tier_settings.retry_s
    )
    if replica is not None:
        uploader.on_stored = replica.trim
    return Tier(
        files,
        uploader,
        claimed,
        directory,
        cache_bytes=tier_settings.cache_bytes,
        backlog_bytes=tier_settings.backlog_bytes,
        replica=replica,
    )


def open_objects(url: str) -> Objects:
    """Open the objects below a URL such as `s3://bucket/prefix`; needs the package `obstore`."""
    try:
        from headwater.storage.tiering.object_store import open_url  # noqa: PLC0415 - optional
    except ImportError:
        raise StorageError(
            "storage.cold needs the package obstore, which is not installed: pip install 'headwater[tiering]'."
        ) from None
    return open_url(url)


def files_of(directory: Path) -> RealFilesystem:
    """The file system to read a data directory, whose packs may be in an object store."""
    mark = read_mark(RealFilesystem(), directory)
    return RealFilesystem() if mark is None else TieredFilesystem(open_objects(mark.url), directory, caches=False)


def _claim(objects: Objects, filesystem: Filesystem, directory: Path, *, accept_data_loss: bool) -> ClaimedPrefix:
    objects.check_conditions()
    claimed = ClaimedPrefix(objects)
    _check_ownership(objects, claimed, filesystem, directory)
    if not filesystem.exists(directory / NAME) and claimed.has_data:
        assert claimed.head is not None
        if not accept_data_loss or _has_journal(filesystem, directory):
            raise journal_missing(objects.url, directory)
        restore_directory(filesystem, directory, objects, claimed.head)
    claimed.claim(filesystem, directory)
    return claimed


def _check_ownership(objects: Objects, claimed: ClaimedPrefix, filesystem: Filesystem, directory: Path) -> None:
    """Refuse a prefix that belongs to another data directory, or a directory that belongs to another prefix."""
    mark, head = read_mark(filesystem, directory), claimed.head
    if mark is None:
        if claimed.has_data and filesystem.exists(directory / NAME):
            raise StorageError(
                f"{objects.url} belongs to another data directory than {directory}. Give each its own storage.cold."
            )
        return
    if head is None:
        raise StorageError(
            f"The packs of {directory} are in {mark.url}, and {objects.url} has no HEAD object: it is another place, or"
            " its objects were deleted. Set storage.cold to the place of the packs."
        )
    if head.store != mark.store:
        raise StorageError(
            f"{objects.url} belongs to another data directory than {directory}; check storage.cold and"
            " storage.data_dir."
        )
    if head.epoch > mark.epoch:
        raise StorageError(
            f"{objects.url} was taken over by a server with another data directory. {directory} is out of date: what"
            " was written there since then is not in it. Start with the other directory."
        )


def journal_missing(url: str, directory: Path) -> StorageError:
    return StorageError(
        f"{url} has data, and {directory} has no journal: what was written last may be only there. If it is lost, start"
        " with an empty data directory and --accept-data-loss: the server then begins with what the object store has."
    )


def _has_journal(filesystem: Filesystem, directory: Path) -> bool:
    journal = journal_directory(filesystem, directory)
    return filesystem.exists(journal) and any(
        filesystem.size(segment_path(journal, number)) > HEADER_BYTES for number in segment_numbers(filesystem, journal)
    )
