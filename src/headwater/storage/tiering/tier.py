"""The object store below a pack store: which files it has, which are on the disk, and which can be evicted.

A pack is written to the disk first, as without a tier, and uploaded by the `Uploader`. After that its local file is a
cache: the least recently used files and cached blocks are removed when they exceed the limit. A pack or blob that is
not on the disk is read through the block cache (`TieredFilesystem.map`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from headwater.storage.blobs import BLOBS_NAME, is_finished
from headwater.storage.deferred_unlink import DeferredUnlinkFilesystem
from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.filesystem import MappedFile, RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal.replica import JournalReplica
from headwater.storage.packs.manifest import SavedManifest
from headwater.storage.packs.pack import pack_number
from headwater.storage.packs.recovery import PACKS_NAME
from headwater.storage.tiering.block_cache import BlockCache
from headwater.storage.tiering.claimed_prefix import PACKS_PER_EPOCH, ClaimedPrefix
from headwater.storage.tiering.objects import Objects, required_store
from headwater.storage.tiering.uploader import BLOBS_PREFIX, PACKS_PREFIX, Uploader, pack_key

CACHE_NAME: Final = "cache"
SAVE_AFTER_S: Final = 60.0
"""Data is in a pack, and so in the object store, after about this long, which limits the loss if the disk is lost."""


class TieredFilesystem(DeferredUnlinkFilesystem):
    """The file system of a data directory whose packs and blobs may be in an object store."""

    def __init__(
        self, objects: Objects, directory: Path, reserve: DescriptorReserve | None = None, *, caches: bool = True
    ) -> None:
        super().__init__(reserve)
        self._objects = objects
        self._prefixes = {directory / PACKS_NAME: PACKS_PREFIX, directory / BLOBS_NAME: BLOBS_PREFIX}
        self.cache: Final = BlockCache(objects, directory / CACHE_NAME, keeps=caches)
        self.uploader: Uploader | None = None
        self.stores_blobs_first: bool = False
        """Whether a blob is uploaded before it exists, so that records can refer to it even if this disk is lost."""
        self._listed: dict[str, int] | None = None
        self.used: dict[str, float] = {}
        """The time at which each object was last opened."""

    @property
    def stored(self) -> dict[str, int]:
        """The packs and blobs in the store, with their sizes."""
        if self.uploader is not None:
            return self.uploader.stored
        return self.list_again() if self._listed is None else self._listed

    def list_again(self) -> dict[str, int]:
        """List the objects, because another process may have changed them."""
        self._listed = {
            key: size for prefix in self._prefixes.values() for key, size in self._objects.sizes(prefix).items()
        }
        return self._listed

    def map(self, path: Path) -> MappedFile:
        prefix = self._prefixes.get(path.parent)
        if prefix is None:
            return super().map(path)
        key = prefix + path.name
        self.used[key] = time.monotonic()
        try:
            return super().map(path)
        except FileNotFoundError:
            size = self.stored.get(key)
            if size is None:
                raise
            return self.cache.open(key, size)

    def names(self, path: Path) -> list[str]:
        found = super().names(path)
        if self._prefixes.get(path) != BLOBS_PREFIX:
            return found
        stored = {key.removeprefix(BLOBS_PREFIX) for key in list(self.stored) if key.startswith(BLOBS_PREFIX)}
        return sorted({*found, *stored})

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        if self.uploader is not None and self._prefixes.get(target.parent) == BLOBS_PREFIX:
            if self.stores_blobs_first:
                self.uploader.store_blob(target)
            else:
                self.uploader.add_blob(target)

    def unlink(self, path: Path) -> None:
        prefix = self._prefixes.get(path.parent)
        if prefix == BLOBS_PREFIX and is_finished(path.name) and self.uploader is not None:
            # It is kept until no manifest in the object store refers to it.
            self.uploader.mark_unreferenced(path.name)
            return
        try:
            super().unlink(path)
        except FileNotFoundError:
            if prefix is None or prefix + path.name not in self.stored:
                raise

    def parts(self) -> dict[str, int]:
        """Figures for `headwater store stats`."""
        sizes = list(self.stored.values())
        return {"cold_objects": len(sizes), "cold_bytes": sum(sizes)}

    def remove(self, path: Path) -> None:
        """Remove a file that the object store has, or that is not referenced."""
        if self.exists(path):
            RealFilesystem.unlink(self, path)

    def local(self) -> dict[str, Path]:
        """The local files that are also in the object store, by their keys."""
        stored = self.stored
        found = {}
        for directory, prefix in self._prefixes.items():
            for name in RealFilesystem.names(self, directory) if self.exists(directory) else ():
                if prefix + name in stored:
                    found[prefix + name] = directory / name
        return found


class Tier:
    """The implementation of `LowerTier` for a pack store."""

    save_after_s: float = SAVE_AFTER_S

    def __init__(
        self,
        files: TieredFilesystem,
        uploader: Uploader,
        claimed: ClaimedPrefix,
        directory: Path,
        *,
        cache_bytes: int,
        backlog_bytes: int,
        replica: JournalReplica | None = None,
    ) -> None:
        assert claimed.head is not None
        self.replica = replica
        self._files = files
        self._uploader = uploader
        self._directory = directory
        self._cache_bytes = cache_bytes
        self._backlog_bytes = backlog_bytes
        self._stored_lsn = claimed.head.lsn
        self.first_pack: int = claimed.head.epoch * PACKS_PER_EPOCH + 1
        """The number of the first pack of this epoch."""

    def open(self, state: SavedManifest, written_lsn: Callable[[], int]) -> None:
        """Start with this recovered manifest. `written_lsn` returns the last record that was written."""
        if state.lsn < self._stored_lsn:
            raise StorageError(
                f"The manifest of {self._directory} ends at record {state.lsn}, and the one in the object store at"
                f" {self._stored_lsn}: this is an older copy of the data directory. Start with the newest one."
            )
        if self.replica is None:
            with required_store():
                self._uploader.commit_first()
        self._uploader.saved(state)
        self._uploader.start(written_lsn)

    def saved(self, state: SavedManifest) -> None:
        self._uploader.saved(state)

    @property
    def failure(self) -> str | None:
        return self._uploader.failure

    def busy(self) -> str | None:
        waiting = self._uploader.waiting_bytes
        if waiting < self._backlog_bytes:
            return None
        return (
            f"{waiting} bytes wait for the object store, and storage.cold_backlog_bytes allows {self._backlog_bytes};"
            " retry in a moment."
        )

    def content(self) -> object:
        """A value that changes when the cache may have grown."""
        return len(self._uploader.stored), self._files.cache.fetched_bytes

    def evict(self, recent: Sequence[int]) -> list[int]:
        """Remove files from the cache until it is within its limit; returns the packs that should be closed.

        `recent` are the open packs, the most recently used one last: they are evicted last.
        """
        order = {pack_key(number): rank for rank, number in enumerate(recent, 1)}
        stored = dict(self._uploader.stored)
        local, cached = self._files.local(), self._files.cache.sizes()
        sizes = {key: stored.get(key, 0) for key in local} | cached
        excess = sum(sizes.values()) - self._cache_bytes
        numbers: list[int] = []
        for key in sorted(sizes, key=lambda key: (order.get(key, 0), self._files.used.get(key, 0.0), key)):
            if excess <= 0:
                break
            excess -= sizes[key]
            number = pack_number(key.removeprefix(PACKS_PREFIX))
            if number is not None:
                numbers.append(number)
            if key in local:
                self._files.remove(local[key])
            if key in cached:
                self._files.cache.drop(key)
            self._files.used.pop(key, None)
        return numbers

    def parts(self) -> dict[str, int]:
        """Figures for `headwater store stats`."""
        stored = self._uploader.stored
        cached = sum(stored.get(key, 0) for key in self._files.local()) + sum(self._files.cache.sizes().values())
        return {
            **self._files.parts(),
            "cold_cached_bytes": cached,
            "cold_waiting_bytes": self._uploader.waiting_bytes,
            "cold_fetched_bytes": self._files.cache.fetched_bytes,
        }

    def close(self) -> None:
        self._uploader.close()
        self._files.cache.close()
