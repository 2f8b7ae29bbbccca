"""A warm standby: a store that another process writes, kept current until this process takes it over.

It is recovered as in a start: the states of the manifest, then the batches of the journal. Then the recovery does not
end: it waits for further batches, and `recover` continues to yield their records, until the store is taken over. So the
state of the new owner comes from the same code as after a start, and nothing has to be loaded any more.

When the owner has stored another manifest, the data is recovered from that one, up to the same record; the records are
not yielded again. Otherwise everything since the first manifest would be kept in memory, and packs that the owner has
merged would be missing. The manifest is compared again after the take-over, when nobody else can replace it.

What was applied can be read while the store is followed. For this, `follow` says which of its steps block: they change
nothing that readers use, so they can run on another thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from headwater.core.records import Record
from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.directory import open_directory
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.journal.frames import read_frame
from headwater.storage.journal.replay import Replay
from headwater.storage.journal.replica import JournalReplica
from headwater.storage.journal.segments import FileJournal
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.packs.manifest import Manifest
from headwater.storage.packs.pack import pack_number
from headwater.storage.packs.pack_store import FAMILY, PackStore
from headwater.storage.packs.recovery import Recovery
from headwater.storage.tiering.claimed_prefix import VERSION, ClaimedPrefix, StoreHead
from headwater.storage.tiering.objects import Objects, ObjectStoreError, required_store
from headwater.storage.tiering.open import TierSettings, build_tier
from headwater.storage.tiering.restore import JournalCopy, restore_manifest
from headwater.storage.tiering.tier import TieredFilesystem
from headwater.storage.tiering.uploader import PACKS_PREFIX

log = logging.getLogger("headwater.storage")

HEAD_S: Final = 5.0
"""How often the standby looks for another manifest. Packs that are no longer referenced are kept much longer."""
BATCHES_MAX: Final = 16
"""Batches that are read before they are applied."""


class FollowStep(Enum):
    """What happens next while a store is followed."""

    PAUSES = "nothing is left to read; continue after a moment"
    BLOCKS = "the next step reads, and may block"
    APPLIES = "the next steps change the state that readers use"


class OutdatedError(StorageError):
    """The standby cannot continue from what it has, and must begin again."""


class FollowedJournal(Protocol):
    """The journal of a store that another process writes. All calls block."""

    replicated_lsn: int
    """The last record that may be applied, as of the last call of `last_lsn`."""

    def last_lsn(self) -> int | None:
        """The last record; None if it is not known at the moment. Raises `OutdatedError` if records may be lost."""

    def batches(self, after_lsn: int) -> Iterator[bytearray]: ...

    def close(self) -> None: ...


class Promotion(NamedTuple):
    """This process is the writer from now on."""

    epoch: int
    replica: JournalReplica


class _FollowedRecovery(Recovery):
    """A recovery whose batches are given one by one. They are also written to the local journal, for checkpoints."""

    def __init__(self, files: TieredFilesystem, directory: Path, settings: StoreSettings, head: StoreHead) -> None:
        super().__init__(files, directory, Manifest(files, directory, rewrite_floor=settings.manifest_floor_bytes))
        self.head: Final = head
        self._segment_bytes = settings.segment_bytes
        self._copy: JournalCopy | None = None
        self.applied_lsn = 0
        """The last record of which readers see the effect."""

    @property
    def read_lsn(self) -> int:
        """The last record of the last batch."""
        return self._copy.lsn if self._copy is not None else 0

    def begin(self) -> Iterator[Record]:
        yield from self._saved_records()
        self._copy = JournalCopy(self._filesystem, self.journal_directory, self.manifest, self._segment_bytes)
        self.applied_lsn = self.read_lsn

    def apply(self, batch: bytearray) -> Iterator[Record]:
        assert self._copy is not None
        try:
            self._copy.add(batch)
        except CorruptError as error:
            raise OutdatedError(str(error)) from None
        frame = read_frame(memoryview(batch), 0, int.from_bytes(batch[:8], "little"))
        assert frame is not None
        yield from self._replay_batch(frame)
        self.last_lsn = max(self.last_lsn, self.read_lsn)
        self.applied_lsn = self.read_lsn

    def records(self) -> Iterator[Record]:
        """None: they were all yielded while the store was followed."""
        return iter(())

    def end(self) -> None:
        """Close the files; the local journal is complete up to the last batch."""
        assert self._copy is not None
        self._copy.close()

    def open_journal(self, *, durable: bool, segment_bytes: int) -> FileJournal:
        self.end()
        self._replay = Replay(self._filesystem, self.journal_directory, self.manifest.segment, self.name_of)
        for _ in self._replay.batches():
            pass
        self._check_complete(self._replay)
        return super().open_journal(durable=durable, segment_bytes=segment_bytes)


class FollowedStorage(JournaledStorage):
    """The storage of a warm standby. `recover` returns when it was taken over."""

    def __init__(
        self,
        objects: Objects,
        directory: Path,
        tier_settings: TierSettings,
        settings: StoreSettings,
        *,
        journal: FollowedJournal,
        wait: Callable[[], Promotion | None],
        on_warm: Callable[[], None],
        reserve: DescriptorReserve | None = None,
        head_s: float = HEAD_S,
    ) -> None:
        """`wait` returns after a moment, or when this process takes the store over."""
        self.files: Final = TieredFilesystem(objects, directory, reserve)
        opened = open_directory(self.files, directory, FAMILY)
        super().__init__(
            self.files, opened, PackStore(self.files, directory, settings), durable=False, settings=settings
        )
        self._objects = objects
        self._tier_settings = tier_settings
        self._followed = journal
        self._wait = wait
        self._on_warm = on_warm
        self._head_s = head_s
        self._recovery: _FollowedRecovery | None = None
        self._packs: PackStore | None = None
        """The packs that readers use while the store is followed."""
        self._is_taken = False

    @property
    def applied_lsn(self) -> int:
        """The last record of which readers see the effect."""
        return self._recovery.applied_lsn if self._recovery is not None else 0

    def recover(self) -> Iterator[Record]:
        if not self._is_taken:
            for step in self.follow():
                if not isinstance(step, FollowStep):
                    yield step
        yield from super().recover()

    def follow(self) -> Iterator[Record | FollowStep]:
        """Follow the store until it is taken over; `recover` then returns at once. A step after `BLOCKS` may run on
        another thread, one at a time; all others run where the readers are."""
        try:
            with required_store():
                yield from self._follow()
        finally:
            self._followed.close()
        self._is_taken = True

    def _follow(self) -> Iterator[Record | FollowStep]:
        recovery = self._restored(self._read_head())
        yield from recovery.begin()
        self._show(recovery)
        is_warm = False
        look_s = time.monotonic() + self._head_s
        while True:
            yield FollowStep.PAUSES
            taken = self._wait()
            if taken is not None:
                break
            self._shrink_cache()
            yield FollowStep.BLOCKS
            head: StoreHead | None = None
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + self._head_s
                head = self._head_if_readable()
            # After the manifest: the journal then has everything that the manifest has.
            last_lsn = self._followed.last_lsn()
            if last_lsn is None:
                continue
            _check_end(recovery, last_lsn)
            yield from _catch_up(recovery, self._followed, self._followed.replicated_lsn)
            if head is not None and head.parts != recovery.head.parts:
                yield FollowStep.BLOCKS
                recovery = self._based_on(head, recovery, self._followed)
                yield FollowStep.APPLIES
                self._show(recovery)
            if not is_warm:
                is_warm = True
                self._on_warm()
        claimed = ClaimedPrefix(self._objects)
        head = claimed.claim(self.files, self._path, taken.epoch)
        _check_end(recovery, taken.replica.last_lsn)
        yield from _catch_up(recovery, taken.replica, taken.replica.last_lsn)
        recovery = self._based_on(head, recovery, taken.replica)
        tier = build_tier(self._objects, self.files, claimed, self._path, self._tier_settings, taken.replica)
        self._close_packs()
        self._cold = PackStore(self.files, self._path, self._settings, tier, recovery)

    def _show(self, recovery: _FollowedRecovery) -> None:
        """Let readers use this state from now on. It changes with every batch that is applied to it."""
        self._close_packs()
        self._recovery = recovery
        self._streams = recovery.streams
        self._cold = self._packs = PackStore(self.files, self._path, self._settings, recovery=recovery)
        for info in recovery.manifest.packs.values():
            self._packs.pack_set.add(info)

    def _close_packs(self) -> None:
        if self._packs is not None:
            self._packs.pack_set.close()

    def _shrink_cache(self) -> None:
        """Drop what readers have fetched beyond the limit of the disk, the least recently opened first."""
        assert self._packs is not None
        sizes = self.files.cache.sizes()
        excess = sum(sizes.values()) - self._tier_settings.cache_bytes
        for key, size in sizes.items():
            if excess <= 0:
                return
            excess -= size
            number = pack_number(key.removeprefix(PACKS_PREFIX))
            if number is not None:
                self._packs.pack_set.close_packs((number,))
            self.files.cache.drop(key)

    def _read_head(self) -> StoreHead:
        return ClaimedPrefix(self._objects).head or StoreHead(VERSION, "", 0)

    def _head_if_readable(self) -> StoreHead | None:
        try:
            return self._read_head()
        except ObjectStoreError as error:
            log.debug("the object store cannot be read by a standby: %s", error)
            return None

    def _restored(self, head: StoreHead) -> _FollowedRecovery:
        restore_manifest(self.files, self._path, self._objects, head)
        self.files.list_again()
        return _FollowedRecovery(self.files, self._path, self._settings, head)

    def _based_on(
        self, head: StoreHead, recovery: _FollowedRecovery, journal: FollowedJournal | JournalReplica
    ) -> _FollowedRecovery:
        """The same state, on the manifest of `head`. The former one cannot be used any more if that fails."""
        if head.parts == recovery.head.parts:
            return recovery
        recovery.end()
        fresh = self._restored(head)
        for _ in fresh.begin():
            pass
        for batch in journal.batches(fresh.read_lsn):
            if fresh.read_lsn >= recovery.read_lsn:
                break
            for _ in fresh.apply(batch):
                pass
        if fresh.read_lsn != recovery.read_lsn or fresh.last_lsn != recovery.read_lsn:
            raise OutdatedError(f"Record {recovery.read_lsn} cannot be reached from the current manifest.")
        return fresh


def _check_end(recovery: _FollowedRecovery, last_lsn: int) -> None:
    if recovery.read_lsn > last_lsn:
        raise OutdatedError(f"The journal ends at record {last_lsn}, and {recovery.read_lsn} was read before.")


def _catch_up(
    recovery: _FollowedRecovery, journal: FollowedJournal | JournalReplica, until_lsn: int
) -> Iterator[Record | FollowStep]:
    """Apply the batches up to the one that has this record."""
    batches = journal.batches(recovery.read_lsn)
    while recovery.read_lsn < until_lsn:
        yield FollowStep.BLOCKS
        found = list(islice(batches, BATCHES_MAX))
        yield FollowStep.APPLIES
        if not found:
            raise OutdatedError(f"The journal has nothing between the records {recovery.read_lsn} and {until_lsn}.")
        for batch in found:
            if recovery.read_lsn < until_lsn:
                yield from recovery.apply(batch)
