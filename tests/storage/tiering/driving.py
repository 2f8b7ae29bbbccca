"""A tiered store that a test drives step by step, in the way that the engine does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.packs.pack_store import PackStore
from headwater.storage.tiering.objects import Objects
from headwater.storage.tiering.open import TierSettings, open_tiered
from headwater.storage.tiering.tier import Tier, TieredFilesystem
from headwater.storage.tiering.uploader import Uploader
from tests.storage.acid.driver import Driver
from tests.waiting import wait_until

SMALL = StoreSettings(segment_bytes=65_536, hot_tail_bytes=2**20, reserve_bytes=0, fanout=100)


class TieredRun:
    """One open store."""

    def __init__(self, storage: JournaledStorage, files: TieredFilesystem, directory: Path) -> None:
        self.storage = storage
        self.files = files
        self.directory = directory
        self.driver = Driver([storage])
        self.driver.recover(storage)

    @property
    def uploader(self) -> Uploader:
        assert self.files.uploader is not None
        return self.files.uploader

    @property
    def tier(self) -> Tier:
        assert isinstance(self.storage._cold, PackStore)
        assert isinstance(self.storage._cold._tier, Tier)
        return self.storage._cold._tier

    def save(self) -> None:
        """Commit the queued records, and wait until a checkpoint has saved them on the local disk."""
        self.driver.commit()
        maintenance = self.storage._maintenance
        assert maintenance is not None
        wanted = self.storage._unsaved.lsn

        def is_saved() -> bool:
            if maintenance.idle and maintenance._saved_lsn < wanted:
                self.storage.checkpoint_soon()
            self.storage.maintain(lambda _: None)
            is_saved = maintenance.idle and maintenance._saved_lsn >= wanted
            return is_saved or self.storage.refusal() is not None

        wait_until(is_saved, what="a checkpoint", every_s=0.0005)

    def store(self) -> None:
        """Commit and save, and wait until the object store has the checkpoint too."""
        self.save()
        wait_until(lambda: self.uploader.is_current or self.uploader.failure, what="the upload", every_s=0.001)

    def tidy(self) -> None:
        """Run the chores (merges and evictions) until there are none left."""
        maintenance = self.storage._maintenance
        assert maintenance is not None

        def is_tidy() -> bool:
            if maintenance._chores is None:
                maintenance._chores_at = 0.0
            self.storage.maintain(lambda _: None)
            # The time of the next chores is set when they begin.
            return maintenance.idle and maintenance._chores is None and maintenance._chores_at > 0.0

        wait_until(is_tidy, what="the chores", every_s=0.0005)

    def local_packs(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "packs").iterdir())


@contextmanager
def opened(
    objects: Objects,
    directory: Path,
    *,
    cache_bytes: int = 2**30,
    backlog_bytes: int = 2**30,
    grace_s: float = 3600.0,
    accept_data_loss: bool = False,
    settings: StoreSettings = SMALL,
) -> Iterator[TieredRun]:
    tier = TierSettings(cache_bytes, backlog_bytes, grace_s, accept_data_loss, retry_s=0.02)
    storage, files = open_tiered(objects, directory, tier, settings)
    try:
        yield TieredRun(storage, files, directory)
    finally:
        storage.close()
