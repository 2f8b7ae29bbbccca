"""The cold store of the file modes: packs of bytes in a directory, and a manifest of states.

A checkpoint is fuzzy: see `checkpoint`. On the event loop it freezes the streams that changed one by one, each with its
bytes and its state at the same time; a job writes them into packs and the manifest; then each stream gets its new
extents. Until then its frozen data is read from memory. Packs are merged and removed as chores.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from headwater.core.records import Image, Record
from headwater.storage.cold_store import Checkpoint, Chore, Step, Steps, UnsavedState
from headwater.storage.directory import open_directory
from headwater.storage.extents import NO_EXTENTS, Extent, join, merge
from headwater.storage.filesystem import Filesystem
from headwater.storage.journal.replica import JournalReplica
from headwater.storage.journal.segments import FileJournal
from headwater.storage.journal_location import place_journal
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.packs.checkpoint import Frozen, PackContext, Plan, Saved, save_checkpoint
from headwater.storage.packs.compaction import DamagedPackError, Rewritten, forget_packs, rewrite_packs
from headwater.storage.packs.manifest import Manifest, SavedManifest
from headwater.storage.packs.pack import PackRun, pack_path
from headwater.storage.packs.pack_set import PackSet
from headwater.storage.packs.recovery import PACKS_NAME, Recovery, name_of
from headwater.storage.packs.states import is_large
from headwater.storage.stream_data import StreamData, memory_of
from headwater.storage.worker import Job, Worker

log = logging.getLogger("headwater.storage")

FAMILY: Final = "log"
"""The name of the file modes in the file `FORMAT` of a data directory."""


class LowerTier(Protocol):
    """The object store to which packs are uploaded after they were saved here (see `storage.tiering`)."""

    first_pack: int
    """The lowest number for new packs."""
    replica: JournalReplica | None
    """Where each batch of the journal is made durable before it is acknowledged, if not only on this disk."""
    save_after_s: float

    @property
    def failure(self) -> str | None: ...

    def open(self, state: SavedManifest, written_lsn: Callable[[], int]) -> None:
        """Start with this recovered manifest. `written_lsn` returns the last record that was written."""

    def saved(self, state: SavedManifest) -> None:
        """Note that a manifest is durable on this disk."""

    def busy(self) -> str | None:
        """Why new writes should be retried shortly, or None."""

    def content(self) -> object:
        """A value that changes when there may be more to evict."""

    def evict(self, recent: Sequence[int]) -> list[int]:
        """Remove files that the tier has until the disk is within its limit; returns the packs that should be closed.

        `recent` are the open packs, the most recently used one last: they are evicted last. Can be called from any
        thread.
        """

    def parts(self) -> dict[str, int]: ...

    def close(self) -> None: ...


FREEZE_TRIES_MAX: Final = 8
"""How often the state of a busy stream is requested before it is read from the journal."""


class PackStore:
    def __init__(
        self,
        filesystem: Filesystem,
        directory: Path,
        settings: StoreSettings,
        tier: LowerTier | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """With a `recovery`, its state is used: it was made while another process was writing the store."""
        self._tier = tier
        self.save_after_s = tier.save_after_s if tier is not None else None
        self._filesystem = filesystem
        self._path = directory
        self._clock_check_every = settings.clock_check_every
        self._recovery: Final = recovery or Recovery(
            filesystem, directory, Manifest(filesystem, directory, rewrite_floor=settings.manifest_floor_bytes)
        )
        self._manifest: Final = self._recovery.manifest
        self.pack_set: Final = PackSet(
            filesystem, directory / PACKS_NAME, fanout=settings.fanout, open_max=settings.open_packs_max
        )
        self._big_bytes = settings.big_bytes
        self._unsaved = UnsavedState()
        self._context: PackContext | None = None
        self._to_freeze: set[int] = set()
        self._frozen: list[Frozen] = []
        self._to_unlink: tuple[int, ...] = ()
        self._evicted: object = None
        """The tier's `content` at the last eviction."""

    # -- startup and shutdown --------------------------------------------------------------------------------------

    def recover(self, unsaved: UnsavedState) -> Iterator[Record]:
        recovery = self._recovery
        yield from recovery.records()
        self._unsaved = unsaved
        unsaved.streams = recovery.streams
        unsaved.dirty = recovery.dirty
        unsaved.documents = recovery.documents
        unsaved.removed_ids = list(recovery.removed)
        unsaved.removed = recovery.removed
        unsaved.lsn = recovery.last_lsn
        for info in self._manifest.packs.values():
            self.pack_set.add(info)
        for stored in itertools.chain(unsaved.streams.values(), unsaved.removed.values()):
            self.pack_set.add_live(stored.extents)
        self.pack_set.complete(self._manifest.packs.values())

    def open_journal(self, *, segment_bytes: int, durable: bool) -> FileJournal:
        tier = self._tier
        journal = self._recovery.open_journal(durable=durable, segment_bytes=segment_bytes)
        self._context = PackContext(
            self._filesystem,
            self._recovery.journal_directory,
            self._path / PACKS_NAME,
            self._manifest,
            itertools.count(max(self._recovery.last_pack + 1, tier.first_pack if tier is not None else 1)).__next__,
            self._unsaved.extents_of,
            self._big_bytes,
        )
        if tier is not None:
            journal.replica = tier.replica
            self._manifest.on_saved = tier.saved
            tier.open(self._manifest.saved(), lambda: journal.last_lsn)
        return journal

    def name_of(self, stream_id: int) -> str:
        return name_of(self._manifest, stream_id)

    def refusal(self) -> str | None:
        return None

    def busy(self) -> str | None:
        return self._tier.busy() if self._tier is not None else None

    @property
    def failure(self) -> str | None:
        return self._tier.failure if self._tier is not None else None

    def parts(self) -> dict[str, int]:
        live = self.pack_set.live_bytes
        tier = self._tier.parts() if self._tier is not None else {}
        return {"packs": len(self.pack_set), "live_bytes": live, "dead_bytes": self.pack_set.data_bytes - live, **tier}

    def finish(self) -> None:
        """Does nothing: the next start replays the journal."""

    def close(self) -> None:
        self._manifest.close()
        self.pack_set.close()
        if self._tier is not None:
            self._tier.close()

    # -- reading ---------------------------------------------------------------------------------------------------

    def run(self, stream_id: int, extent: Extent) -> PackRun:
        return PackRun(self.pack_set.pack(extent.pack), extent)

    def release(self, stream_id: int, blob: bytes, byte_position: int) -> None:
        self.pack_set.remove_live(blob)

    # -- a checkpoint ----------------------------------------------------------------------------------------------

    def freeze(self, checkpoint: Checkpoint) -> Steps:
        """Freeze each stream's bytes and state at the same time. Busy streams are retried a few times."""
        self._to_freeze = checkpoint.dirty
        self._frozen = []
        for tries_left in range(FREEZE_TRIES_MAX, -1, -1):
            for steps, stream_id in enumerate(tuple(self._to_freeze), 1):
                # A stream that was removed in the meantime is already captured.
                large = stream_id in self._to_freeze and self._freeze_one(stream_id, insist=not tries_left)
                if large or steps % self._clock_check_every == 0:
                    yield Step.MORE
            if not self._to_freeze:
                break
            yield Step.WAIT

    def capture(self, stream_id: int, stored: StreamData, lsn: int) -> None:
        if stream_id in self._to_freeze:
            self._add_frozen(stream_id, stored, lsn, None)

    def _freeze_one(self, stream_id: int, *, insist: bool) -> bool:
        """Freeze a stream; returns whether that took noticeable time."""
        unsaved = self._unsaved
        assert unsaved.image_of is not None
        image = unsaved.image_of(stream_id)
        if image is None and not insist:
            return False
        stored = unsaved.streams[stream_id]
        assert image is None or (image.message_index, image.byte_position) == stored.end
        if stream_id not in unsaved.deleted:
            unsaved.dirty.discard(stream_id)
        elif image is not None:
            # The replay and the next checkpoint apply its deletion.
            image = msgspec.structs.replace(image, deleted=False)
        self._add_frozen(stream_id, stored, unsaved.lsn, image)
        return is_large(image)

    def _add_frozen(self, stream_id: int, stored: StreamData, lsn: int, image: Image | None) -> None:
        tail = stored.freeze()
        size = memory_of(tail)
        self._unsaved.bytes -= size
        self._unsaved.frozen_bytes += size
        self._to_freeze.discard(stream_id)
        self._frozen.append(Frozen(stream_id, lsn, image, tail))

    def save(self, checkpoint: Checkpoint) -> Job:
        assert self._context is not None
        plan = Plan(checkpoint.lsn, checkpoint.segment, self._frozen, checkpoint.documents, checkpoint.removed)
        return save_checkpoint(self._context, plan)

    def publish(self, saved: Saved) -> Steps:
        unsaved = self._unsaved
        for info in saved.packs:
            self.pack_set.add(info)
        for steps, (stream_id, blob) in enumerate(saved.blobs, 1):
            stored = unsaved.find(stream_id)
            assert stored is not None
            unsaved.frozen_bytes -= memory_of(stored.frozen)
            self.pack_set.add_live(blob)
            stored.extents += blob
            stored.frozen = None
            stored.trim_extents(self, stream_id)
            if steps % self._clock_check_every == 0:
                yield Step.MORE
        self.pack_set.complete(saved.packs)
        frozen, self._frozen = self._frozen, []
        while frozen:
            # Memory is freed in slices too: it takes as long as the rest.
            large = is_large(frozen.pop().image)
            del saved.blobs[-1:]
            if large or len(frozen) % self._clock_check_every == 0:
                yield Step.MORE
        for stored in unsaved.being_forgotten.values():
            self.pack_set.remove_live(stored.extents)

    # -- chores ----------------------------------------------------------------------------------------------------

    def next_chore(self) -> Chore | None:
        assert self._context is not None
        if self._to_unlink:
            paths = [pack_path(self._path / PACKS_NAME, number) for number in self._to_unlink]
            self._to_unlink = ()
            return Chore("removing packs", _unlink(self._filesystem, paths), lambda _: iter(()), lambda _: None)
        if dead := self.pack_set.dead():
            return self._rewrite(forget_packs(self._context, dead), dead)
        if (rewrite := self.pack_set.next_rewrite()) is not None:
            return self._rewrite(rewrite_packs(self._context, rewrite), tuple(info.number for info in rewrite.sources))
        return self._eviction(self._tier) if self._tier is not None else None

    def _eviction(self, tier: LowerTier) -> Chore | None:
        """Remove files from the disk that exceed its limit and are in the object store."""
        content = tier.content()
        if content == self._evicted:
            return None
        self._evicted = content

        def close_evicted(numbers: list[int]) -> Steps:
            self.pack_set.close_packs(numbers)
            return iter(())

        return Chore(
            "removing packs that are in the object store",
            _evict(tier, self.pack_set.recent),
            close_evicted,
            lambda _: None,
        )

    def _rewrite(self, job: Job, numbers: tuple[int, ...]) -> Chore:
        def failed(error: BaseException) -> None:
            if isinstance(error, DamagedPackError):
                # The others can still be rewritten.
                self.pack_set.exclude([error.number])
            elif not isinstance(error, OSError):
                self.pack_set.exclude(numbers)

        return Chore(f"rewriting packs {list(numbers)}", job, self._complete_rewrite, failed)

    def _complete_rewrite(self, rewritten: Rewritten) -> Steps:
        for info in rewritten.added:
            self.pack_set.add(info)
        for steps, move in enumerate(rewritten.moves, 1):
            stored = self._unsaved.find(move.stream_id)
            before = stored.extents if stored is not None else NO_EXTENTS
            after = merge(before, move.merged)
            if stored is not None and after != before:
                stored.extents = after
                self.pack_set.add_live(join((move.merged,)))
            if steps % self._clock_check_every == 0:
                yield Step.MORE
        self.pack_set.complete(rewritten.added)
        for number in rewritten.dropped:
            self.pack_set.remove(number)
        self._to_unlink = rewritten.dropped


def file_storage(
    filesystem: Filesystem,
    directory: Path,
    *,
    durable: bool,
    settings: StoreSettings | None = None,
    worker: Worker | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> JournaledStorage:
    """Open a data directory in mode `file-durable`, or `file-fast` if `durable` is False."""
    opened = open_directory(filesystem, directory, FAMILY)
    settings = settings if settings is not None else StoreSettings()
    try:
        place_journal(filesystem, opened, settings.journal_dir)
        cold = PackStore(filesystem, directory, settings)
    except BaseException:
        opened.close()
        raise
    return JournaledStorage(filesystem, opened, cold, durable=durable, settings=settings, worker=worker, clock=clock)


def _evict(tier: LowerTier, recent: Sequence[int]) -> Job:
    numbers = tier.evict(recent)
    yield
    return numbers


def _unlink(filesystem: Filesystem, paths: list[Path]) -> Job:
    for path in paths:
        try:
            filesystem.unlink(path)
        except OSError as error:
            log.warning("%s is no longer needed and will be removed at the next start: %s", path, error)
        yield
