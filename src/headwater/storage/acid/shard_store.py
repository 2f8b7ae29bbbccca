"""The cold store of mode `acid`: LMDB shards, which other tools can open and copy while the server runs.

A checkpoint applies the journal's records to the shards: one transaction in each shard that they touch, some megabytes
at a time, with the shard's ledger in the same transaction. Each shard skips what its ledger already covers, so applying
a record again is harmless, and shards may be ahead of each other after a crash. A start applies what is left in the
journal, then reads the states of all streams from the shards.

Invariants: the file `acid/checkpoint` never claims a record that a shard does not have durably, and the journal is
trimmed only up to what that file claims.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from headwater.core.records import Append, Create, Document, Image, Record
from headwater.storage.acid.environment import map_bytes_each, reading
from headwater.storage.acid.layout import (
    DIRECTORY,
    FIRST_FORMAT,
    FORMAT,
    Mark,
    check_manifest,
    check_shard_count,
    old_journal_path,
    read_manifest,
    read_mark,
    remove_old_format,
    shard_of,
    shard_path,
    upgrade_manifest,
    write_mark,
)
from headwater.storage.acid.old_journal import OldJournal
from headwater.storage.acid.reader import ShardReader, ShardRun
from headwater.storage.acid.shard import Reached, Shard, ShardChange, make_store
from headwater.storage.blobs import BLOBS_NAME
from headwater.storage.cold_store import Checkpoint, Chore, Step, Steps, UnsavedState
from headwater.storage.directory import open_directory
from headwater.storage.extents import NO_EXTENTS, Extent, at, join
from headwater.storage.filesystem import Filesystem, RealFilesystem
from headwater.storage.interface import CorruptError, StorageError, WriteFailedError
from headwater.storage.journal.frames import read_batch
from headwater.storage.journal.replay import JournalReader, Replay
from headwater.storage.journal.segments import (
    FileJournal,
    Segment,
    create_journal,
    remove_segments_before,
)
from headwater.storage.journal_location import journal_directory, place_journal
from headwater.storage.journaled_store import JournaledStorage, StoreSettings
from headwater.storage.stream_data import StreamData, memory_of
from headwater.storage.worker import Job, Worker

log = logging.getLogger("headwater.storage")

FAMILY: Final = "acid"
SAVE_AFTER_S: Final = 5.0
"""A checkpoint begins when something has waited this long, so that other tools never see much older data in the shards.
It costs two flushes of the disk in every shard that it touches."""
ROUND_BYTES: Final = 16 * 2**20
"""How much is applied to the shards at a time: it bounds the memory that decoded records and a transaction take."""
DISK_RESERVE_BYTES: Final = 128 * 2**20
"""With less free disk no new writes begin: unsaved data must still fit into the shards, and a shard that cannot be
written disables writes until a restart."""
MAP_RESERVE_SHARE: Final = 16
MAP_RESERVE_BYTES: Final = 512 * 2**20
"""With less of its map left than the smaller of these, a database counts as full: a transaction needs room beside
what it replaces."""
MAP_RESERVE_MIN_BYTES: Final = 2**20
"""Joining pieces frees and takes runs of pages, and a run needs pages that are side by side."""
CHECK_SPACE_S: Final = 1.0
CHECK_READERS_S: Final = 60.0
PUBLISH_EVERY: Final = 64
"""Streams that are published between two checks of the clock."""

_RECORD_BYTES: Final = 256
"""Estimated size of a record without its payload."""


class PendingRecord(NamedTuple):
    """A record of the journal that some shard may not have yet."""

    lsn: int
    record: Record
    removed: tuple[int, ...]


class ShardStore:
    def __init__(
        self,
        filesystem: Filesystem,
        directory: Path,
        shard_count: int,
        map_bytes: int,
        *,
        cache_bytes: int = 0,
        save_after_s: float = SAVE_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_shard_count(shard_count)
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[int, int] = OrderedDict()
        """Memory of each tail that also caches saved data; the streams that were saved longest ago come first."""
        self.save_after_s: float | None = save_after_s
        self._filesystem = filesystem
        self._root: Final = directory / DIRECTORY
        self._journal_directory: Final = journal_directory(filesystem, directory)
        self._clock = clock
        self._unsaved = UnsavedState()
        self.shards: Final[list[Shard]] = []
        self._mark = Mark(0, 1, 0, ())
        self._segments: list[Segment] = []
        self._replay: Replay | None = None
        self._reader: JournalReader | None = None
        self._reached: dict[int, Reached] = {}
        """The end of streams in their shards, not yet published."""
        self._trims: dict[int, int] = {}
        self._trims_at_checkpoint: dict[int, int] = {}
        self._trims_due: dict[int, int] = {}
        self._space_checked_at: float | None = None
        self._readers_checked_at = clock()
        self._refusal: str | None = None
        try:
            self._open(shard_count, map_bytes)
        except BaseException:
            self.close()
            raise

    def _open(self, shard_count: int, map_bytes: int) -> None:
        if not self._root.exists():
            if (self._root.parent / BLOBS_NAME).exists():
                # That is created after the store, so there was one.
                raise StorageError(f"{self._root} is missing. Restore it from a backup, or give another data_dir.")
            segment = create_journal(self._filesystem, self._journal_directory)
            make_store(self._filesystem, self._root, shard_count, segment)
        manifest = read_manifest(self._root)
        check_manifest(self._root, manifest, shard_count)
        size = map_bytes_each(map_bytes, shard_count)
        self._manifest = manifest
        for number in range(shard_count):
            path = shard_path(self._root, number)
            self.shards.append(Shard(path, number, shard_count, size, manifest.id_bytes))
        self._readers: list[ShardReader] = [ShardReader(shard) for shard in self.shards]

    # -- startup and shutdown --------------------------------------------------------------------------------------

    def recover(self, unsaved: UnsavedState) -> Iterator[Image | Document]:
        """Apply the records that the last run left in the journal, then read the state of every stream and document."""
        self._unsaved = unsaved
        try:
            if self._manifest.format == FIRST_FORMAT:
                self._upgrade()
            elif self._manifest.format != FORMAT:
                self._manifest = upgrade_manifest(self._filesystem, self._root, self._manifest)
            self._recover_journal()
        except WriteFailedError as error:
            raise StorageError(f"The journal cannot be applied to the shards: {error}") from error
        self._reached.clear()
        unsaved.lsn = self._mark.lsn
        for shard in self.shards:
            for state in shard.states():
                if isinstance(state, Image):
                    unsaved.streams[state.id] = saved_stream(state, shard.number)
                yield state

    def _recover_journal(self) -> None:
        mark = self._mark = read_mark(self._root, self._manifest)
        replay = self._replay = Replay(self._filesystem, self._journal_directory, mark.segment, lambda _: None)
        for _ in replay.batches():
            # Read to its end and repaired before a shard depends on it.
            pass
        check_same_age(self.shards, mark, replay)
        replay.repair()
        reader = JournalReader(self._filesystem, self._journal_directory, mark.segment)
        self._apply_all(pending_in_journal(reader, replay.last_lsn, mark.lsn))
        self._segments = replay.segments
        self._save_mark(replay.last_lsn, replay.segments[-1].number)

    def open_journal(self, *, segment_bytes: int, durable: bool) -> FileJournal:
        replay = self._replay
        assert replay is not None
        remove_segments_before(self._filesystem, self._journal_directory, self._mark.segment)
        journal = FileJournal(
            self._filesystem,
            self._journal_directory,
            number=replay.next_number,
            last_lsn=self._mark.lsn,
            previous_lsn=replay.last_lsn,
            segment_bytes=segment_bytes,
            durable=durable,
            older=[segment for segment in replay.segments if segment.number >= self._mark.segment],
        )
        self._segments = journal.segments
        self._reader = JournalReader(self._filesystem, self._journal_directory, replay.next_number)
        return journal

    def finish(self) -> None:
        """Apply everything, so that the shards are complete for other tools and the next start is fast."""
        assert self._replay is not None
        for _ in self._save_up_to(self._unsaved.lsn, self._mark.segment):
            pass

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        self.shards.clear()

    # -- upgrade from format 1, whose journal was an LMDB database -------------------------------------------------

    def _upgrade(self) -> None:
        """Apply the old journal to the shards, begin a file journal, and upgrade the manifest to the current format.

        A crash before the manifest is replaced leaves a store of format 1, which is upgraded again. The old journal and
        manifest stay until the first checkpoint of the new format.
        """
        log.info("%s: converting to format %d", self._root, FORMAT)
        path = old_journal_path(self._root)
        journal = OldJournal(path, self._manifest.id_bytes, self._manifest.shard_count)
        try:
            journal.check_same_age(self.shards)
            self._apply_all(
                PendingRecord(seq, routed.record, tuple(stream_id for stream_id, _ in routed.removed))
                for seq, batch in journal.entries()
                for routed in batch
            )
            lsn = journal.last_seq
        finally:
            journal.close()
        self._segments = [create_journal(self._filesystem, self._journal_directory, lsn)]
        write_mark(self._filesystem, self._root, self._manifest, self._current_mark(lsn, 1))
        self._manifest = upgrade_manifest(self._filesystem, self._root, self._manifest)

    # -- reading ---------------------------------------------------------------------------------------------------

    def run(self, stream_id: int, extent: Extent) -> ShardRun:
        return ShardRun(self._readers[extent.pack], stream_id, extent)

    def release(self, stream_id: int, blob: bytes, byte_position: int) -> None:
        self._trims[stream_id] = byte_position
        if stream_id in self._cached:
            self._account(stream_id, self._unsaved.streams[stream_id])

    def name_of(self, stream_id: int) -> str:
        extents = self._unsaved.extents_of(stream_id)
        name = self._readers[at(extents, 0).pack].name_of(stream_id) if extents else None
        return f"stream {name!r} ({stream_id:016x})" if name is not None else f"stream {stream_id:016x}"

    # -- a checkpoint ----------------------------------------------------------------------------------------------

    def capture(self, stream_id: int, stored: StreamData, lsn: int) -> None:
        """Remove the stream from the cache. There is nothing to save, because the journal has its records."""
        self._unsaved.cached_bytes -= self._cached.pop(stream_id, 0)

    def freeze(self, checkpoint: Checkpoint) -> Steps:
        self._trims_at_checkpoint |= self._trims
        self._trims.clear()
        return iter(())

    def save(self, checkpoint: Checkpoint) -> Job:
        yield from self._save_up_to(checkpoint.lsn, checkpoint.segment)
        return self._reached

    def _save_up_to(self, lsn: int, segment: int) -> Job:
        assert self._reader is not None
        try:
            for batch in _rounds(pending_in_journal(self._reader, lsn, self._mark.lsn)):
                self._apply(batch)
                yield
        except BaseException:
            # Records were read and not applied: the next attempt begins again, and the shards skip what they have.
            self._reader = JournalReader(self._filesystem, self._journal_directory, self._mark.segment)
            raise
        # A segment that ended with this record is removed; the next one may have begun already.
        self._reader.skip_to(segment)
        if lsn != self._mark.lsn or segment != self._mark.segment:
            self._save_mark(lsn, segment)
            remove_old_format(self._filesystem, self._root)

    def publish(self, saved: dict[int, Reached]) -> Steps:
        unsaved = self._unsaved
        self._reached = {}
        for steps, reached in enumerate(saved.values(), 1):
            stored = unsaved.streams.get(reached.stream_id)
            if stored is not None:
                self._publish_one(stored, reached)
                self._shrink_cache()
            if steps % PUBLISH_EVERY == 0:
                yield Step.MORE
        self._trims_due |= self._trims_at_checkpoint
        self._trims_at_checkpoint = {}

    def _publish_one(self, stored: StreamData, reached: Reached) -> None:
        """Set the new end of a stream in the shard. Saved data stays in the tail, where it is read faster."""
        unsaved = self._unsaved
        unsaved.bytes -= stored.unsaved_memory
        if reached.end_position <= stored.base_position:
            stored.extents = NO_EXTENTS
        else:
            if stored.extents:
                first = at(stored.extents, 0)
                start = (first.first_index, first.byte_position)
            else:
                start = (stored.base_index, stored.base_position)
            stored.extents = _extent(reached.shard, start, (reached.end_index, reached.end_position))
        unsaved.bytes += stored.unsaved_memory
        self._account(reached.stream_id, stored)

    def _account(self, stream_id: int, stored: StreamData) -> None:
        """Count what the tail of a stream caches."""
        cached = memory_of(stored.tail) - stored.unsaved_memory
        self._unsaved.cached_bytes += cached - self._cached.pop(stream_id, 0)
        if cached:
            self._cached[stream_id] = cached

    def _shrink_cache(self) -> None:
        """Shrink the cache to below its limit, by more than necessary, so that this is not repeated for every
        stream."""
        unsaved = self._unsaved
        if unsaved.cached_bytes <= self._cache_bytes:
            return
        limit = self._cache_bytes * 7 // 8
        while unsaved.cached_bytes > limit:
            stream_id = next(iter(self._cached))
            stored = unsaved.streams[stream_id]
            unsaved.bytes -= stored.unsaved_memory
            stored.drop_cached(unsaved.cached_bytes - limit)
            unsaved.bytes += stored.unsaved_memory
            self._account(stream_id, stored)

    # -- applying records, on the worker ---------------------------------------------------------------------------

    def _apply_all(self, pending: Iterable[PendingRecord]) -> None:
        for batch in _rounds(pending):
            self._apply(batch)

    def _apply(self, pending: list[PendingRecord]) -> None:
        """Apply records to the shards that do not have them yet, in one transaction per shard."""
        by_shard: dict[int, list[ShardChange]] = {}
        known: dict[int, int] = {}
        for lsn, record, removed in pending:
            shard = self._shard_of(record, known)
            removed_here: list[int] = []
            for stream_id in removed:
                owner = self._shard_of_stream(stream_id, known)
                if owner is None:
                    continue
                if owner == shard:
                    removed_here.append(stream_id)
                elif self.shards[owner].ledger.lsn < lsn:
                    by_shard.setdefault(owner, []).append(ShardChange(None, (stream_id,)))
            if shard is None:
                if lsn > max(each.ledger.lsn for each in self.shards):
                    raise CorruptError(f"{self._journal_directory}: record {lsn} is about a stream that no shard has.")
            elif self.shards[shard].ledger.lsn < lsn:
                by_shard.setdefault(shard, []).append(ShardChange(record, tuple(removed_here)))
        lsn = pending[-1].lsn
        for number, changes in sorted(by_shard.items()):
            for reached in self.shards[number].apply(lsn, changes):
                self._reached[reached.stream_id] = reached

    def _shard_of(self, record: Record, known: dict[int, int]) -> int | None:
        """The shard of a record, or None if a shard that is ahead has already removed its stream."""
        count = len(self.shards)
        if isinstance(record, Document):
            return shard_of(record.key, count)
        if isinstance(record, Create | Image):
            shard = known[record.id] = shard_of(record.name, count)
            return shard
        return self._shard_of_stream(record.id, known)

    def _shard_of_stream(self, stream_id: int, known: dict[int, int]) -> int | None:
        shard = known.get(stream_id)
        if shard is None:
            extents = self._unsaved.extents_of(stream_id)
            shard = at(extents, 0).pack if extents else None
            if shard is None:
                shard = next((each.number for each in self.shards if each.has_stream(stream_id)), None)
            if shard is not None:
                known[stream_id] = shard
        return shard

    def _save_mark(self, lsn: int, segment: int) -> None:
        mark = self._current_mark(lsn, segment)
        write_mark(self._filesystem, self._root, self._manifest, mark)
        self._mark = mark

    def _current_mark(self, lsn: int, segment: int) -> Mark:
        salt = next(each.salt for each in self._segments if each.number == segment)
        return Mark(lsn, segment, salt, tuple(shard.ledger.lsn for shard in self.shards))

    # -- chores ----------------------------------------------------------------------------------------------------

    def next_chore(self) -> Chore | None:
        if self._unsaved.lsn == self._mark.lsn:
            self._trims_due |= self._trims
            self._trims.clear()
        if not self._trims_due and not any(shard.has_graves for shard in self.shards):
            return None
        trims, self._trims_due = self._trims_due, {}
        return Chore("removing trimmed and deleted data", self._clean(trims), lambda _: iter(()), lambda _: None)

    def _clean(self, trims: dict[int, int]) -> Job:
        """Delete trimmed pieces and the pieces of removed streams, in small transactions."""
        for stream_id, byte_position in trims.items():
            shard = self._shard_of_stream(stream_id, {})
            while shard is not None and not self.shards[shard].trim(stream_id, byte_position):
                yield
            yield
        for each in self.shards:
            while each.has_graves:
                each.reap()
                yield

    # -- free space ------------------------------------------------------------------------------------------------

    def busy(self) -> str | None:
        return None

    @property
    def failure(self) -> str | None:
        return None

    def refusal(self) -> str | None:
        now = self._clock()
        if self._space_checked_at is None or now - self._space_checked_at >= CHECK_SPACE_S:
            self._space_checked_at = now
            try:
                self._refusal = self._space_shortage()
                if now - self._readers_checked_at >= CHECK_READERS_S:
                    self._readers_checked_at = now
                    self._forget_dead_readers()
            except (StorageError, OSError) as error:
                self._refusal = f"The free space of {self._root} is unknown: {error}"
        return self._refusal

    def _space_shortage(self) -> str | None:
        if self._filesystem.free_bytes(self._root) < DISK_RESERVE_BYTES:
            return f"The disk of {self._root} has less than {DISK_RESERVE_BYTES >> 20} MiB left."
        for shard in self.shards:
            if not shard.has_room(_reserve_bytes(shard.map_bytes)):
                return f"{shard.path} has nearly reached storage.acid_map_bytes."
        return None

    def _forget_dead_readers(self) -> None:
        """Release the pages that readers of dead processes still hold."""
        for shard in self.shards:
            with reading(self._root):
                shard.environment.reader_check()

    def parts(self) -> dict[str, int]:
        # The shards are counted from another process, by the offline tools.
        return {"journal_entries": self._unsaved.lsn - self._mark.lsn}


def acid_storage(
    directory: Path,
    shard_count: int,
    map_bytes: int,
    *,
    filesystem: Filesystem | None = None,
    settings: StoreSettings | None = None,
    save_after_s: float = SAVE_AFTER_S,
    worker: Worker | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> JournaledStorage:
    """Open a data directory in mode `acid`."""
    filesystem = filesystem if filesystem is not None else RealFilesystem()
    check_shard_count(shard_count)
    opened = open_directory(filesystem, directory, FAMILY)
    settings = settings if settings is not None else StoreSettings()
    # Half of the memory is left to what is unsaved: a checkpoint begins when that is used.
    cache_bytes = settings.hot_tail_bytes // 2
    try:
        place_journal(filesystem, opened, settings.journal_dir)
        cold = ShardStore(
            filesystem,
            directory,
            shard_count,
            map_bytes,
            cache_bytes=cache_bytes,
            save_after_s=save_after_s,
            clock=clock,
        )
    except BaseException:
        opened.close()
        raise
    return JournaledStorage(filesystem, opened, cold, durable=True, settings=settings, worker=worker, clock=clock)


def check_same_age(shards: Iterable[Shard], mark: Mark, replay: Replay) -> None:
    """Refuse shards that are older than the checkpoint file says, and a journal that is older than the shards."""
    if replay.segments[0].salt != mark.salt:
        raise StorageError(f"{replay.directory} is the journal of another store; files were mixed up.")
    for shard, seen in zip(shards, mark.shard_lsns, strict=True):
        if shard.ledger.lsn < seen:
            raise CorruptError(
                f"{shard.path} is at record {shard.ledger.lsn}, and the last checkpoint had it at {seen}: it is from"
                " an older copy, or damaged. Restore all of the store from one backup."
            )
    newest = max(mark.lsn, *(shard.ledger.lsn for shard in shards))
    if newest > replay.last_lsn:
        raise CorruptError(
            f"The shards are at record {newest}, beyond the end of the journal ({replay.last_lsn}): the journal is from"
            " an older copy, or damaged. Restore all of the store from one backup."
        )


def pending_in_journal(reader: JournalReader, last_lsn: int, after_lsn: int) -> Iterator[PendingRecord]:
    for frame in reader.batches(last_lsn):
        if frame.number + frame.entries > after_lsn + 1:
            for logged in read_batch(frame):
                if logged.lsn > after_lsn:
                    yield PendingRecord(logged.lsn, logged.borrowed_record, logged.removed)


def _rounds(pending: Iterable[PendingRecord]) -> Iterator[list[PendingRecord]]:
    batch: list[PendingRecord] = []
    size = 0
    for each in pending:
        # An entry of an old journal has one number for all of its records, and must not be divided.
        if size >= ROUND_BYTES and each.lsn != batch[-1].lsn:
            yield batch
            batch, size = [], 0
        batch.append(each)
        record = each.record
        size += _RECORD_BYTES + (len(record.payload) if isinstance(record, Append | Create) else 0)
    if batch:
        yield batch


def saved_stream(image: Image, shard: int) -> StreamData:
    """The data of a stream that is entirely in its shard."""
    base = (image.fork.message_index, image.fork.byte_position) if image.fork is not None else (0, 0)
    end = (image.message_index, image.byte_position)
    return StreamData(*base, _extent(shard, base, end) if end > base else NO_EXTENTS)


def _extent(shard: int, start: tuple[int, int], end: tuple[int, int]) -> bytes:
    """The bytes of a stream in a shard, which are one extent to readers."""
    return join((Extent(shard, 0, *start, end[0] - start[0], end[1] - start[1]),))


def _reserve_bytes(map_bytes: int) -> int:
    """How much of a map is left when its database counts as full."""
    share = min(map_bytes // MAP_RESERVE_SHARE, MAP_RESERVE_BYTES)
    return max(share, min(MAP_RESERVE_MIN_BYTES, map_bytes // 4))
