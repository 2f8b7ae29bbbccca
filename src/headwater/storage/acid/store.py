"""Storage mode `acid`: LMDB, one transaction per batch, in shards that other tools can open and copy live.

A batch is durable when its one transaction in the journal is committed; that is when it is acknowledged. A thread
carries it on into the shards, where streams are kept in rows and pieces under checksums. Until a shard has it, a
batch is read from the hot tails. A boot carries what the last run left in the journal, then reads the shards.

Invariant: what is readable is in a hot tail or in a shard, without a gap; what is acknowledged is in the journal or
in every shard that it touches.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from headwater.core.records import Append, Create, Document, Image, Record
from headwater.storage.acid.carrier import CARRY_AFTER_S, CARRY_BYTES, Carrier, Load, Trim
from headwater.storage.acid.environment import map_bytes_each, reading
from headwater.storage.acid.hot import HotTails
from headwater.storage.acid.journal import Journal, Mark, Routed, make_journal
from headwater.storage.acid.layout import (
    DIRECTORY,
    Manifest,
    check_manifest,
    check_shard_count,
    journal_path,
    making,
    new_manifest,
    read_manifest,
    shard_of,
    shard_path,
    write_manifest,
)
from headwater.storage.acid.reader import ShardReader
from headwater.storage.acid.shard import Shard, make_shard
from headwater.storage.blobs import BLOBS_NAME
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import Filesystem, RealFilesystem
from headwater.storage.interface import (
    Committed,
    CorruptError,
    ImageOf,
    StorageError,
    Usage,
    WriteFailedError,
    check_batch,
)

DISK_RESERVE_BYTES: Final = 128 * 2**20
"""Below this much free disk no new writes begin: what waits for the shards must still find room in them."""
MAP_RESERVE_SHARE: Final = 16
MAP_RESERVE_BYTES: Final = 512 * 2**20
"""With less of its map left than the smaller of these, a database counts as full: a transaction needs room beside
what it replaces."""
MAP_RESERVE_MIN_BYTES: Final = 2**20
"""Joining pieces frees and takes runs of pages, and a run needs pages that lie side by side."""
LOOK_AT_ROOM_S: Final = 1.0
CHECK_READERS_S: Final = 60.0
ROUND_BYTES: Final = 16 * 2**20
"""How much a boot carries into the shards at a time."""

_BOOKKEEPING_BYTES: Final = 256
"""About what a record takes beside its payload while it waits."""


def _reserve_bytes(map_bytes: int) -> int:
    """How much of a map is left when its database counts as full."""
    share = min(map_bytes // MAP_RESERVE_SHARE, MAP_RESERVE_BYTES)
    return max(share, min(MAP_RESERVE_MIN_BYTES, map_bytes // 4))


class _Known:
    """Where a stream is, from which position on it is kept, and how many bytes that is."""

    __slots__ = ("shard", "size", "start")

    def __init__(self, shard: int, start: int, size: int) -> None:
        self.shard = shard
        self.start = start
        self.size = size


class _Written(NamedTuple):
    """A batch between `write` and `absorb`."""

    seq: int
    batch: Sequence[Routed]
    size: int


class AcidStorage:
    waits_for_disk = True

    def __init__(
        self,
        directory: Path,
        shard_count: int,
        map_bytes: int,
        hot_tail_bytes: int,
        *,
        carry_bytes: int = CARRY_BYTES,
        carry_after_s: float = CARRY_AFTER_S,
    ) -> None:
        check_shard_count(shard_count)
        self._filesystem: Filesystem = RealFilesystem()
        self._directory = open_directory(self._filesystem, directory, "acid")
        self._root: Final = directory / DIRECTORY
        self._shards: list[Shard] = []
        self._journal: Journal | None = None
        try:
            manifest = self._make_or_check(shard_count)
            self._open(manifest, map_bytes_each(map_bytes, shard_count + 1))
        except BaseException:
            self._close_files()
            raise
        self._readers: Final = [ShardReader(shard) for shard in self._shards]
        self._carrier: Final = Carrier(self._shards, carry_bytes, carry_after_s)
        self._hot: Final = HotTails(hot_tail_bytes)
        self._known: Final[dict[int, _Known]] = {}
        self._written: Final[deque[_Written]] = deque()
        self._payload_bytes = 0
        self._recovered = False
        self._looked_s = 0.0
        self._readers_checked_s = time.monotonic()
        self._refusal: str | None = None
        self._failure: str | None = None

    # -- writing ---------------------------------------------------------------------------------------------------

    def recover(self) -> Iterator[Image | Document]:
        """Finish what the last run left in the journal, then the state of every stream, and every document."""
        journal = self._opened_journal()
        self._check_same_age(journal)
        try:
            for loads in _rounds(journal.entries()):
                self._carrier.carry(loads)
            journal.trim(Mark(journal.last_seq, tuple(shard.ledger.seq for shard in self._shards)))
        except WriteFailedError as error:
            raise StorageError(f"The journal cannot be carried into the shards: {error}") from error
        self._carrier.reached.clear()
        for shard in self._shards:
            for state in shard.states():
                if type(state) is Image:
                    start = state.fork.byte_position if state.fork is not None else 0
                    self._known[state.id] = _Known(shard.number, start, state.byte_position - start)
                    self._payload_bytes += state.byte_position - start
                yield state
        self._look_at_room()
        self._carrier.start(journal.last_seq)
        self._recovered = True

    def write(self, batch: Sequence[Committed]) -> None:
        if self._failure is not None:
            raise WriteFailedError(self._failure)
        self._carrier.check()
        check_batch(batch)
        known = self._known
        routed = [
            Routed(known[record.id].shard, record) if type(record) is Append else self._route(record, removed)
            for record, removed in batch
        ]
        try:
            seq = self._opened_journal().write(routed, self._carrier.mark)
        except BaseException as error:
            # Whether the batch is in the journal is unknown now; a second try could acknowledge what was lost.
            self._failure = str(error) or type(error).__name__
            raise
        self._written.append(_Written(seq, routed, sum(_size(record) for record, _ in batch)))

    def publish(self, batch: Sequence[Committed]) -> None:
        for record, removed in batch:
            if type(record) is Append:
                if record.payload:
                    self._hot.extend(
                        record.id, record.message_index, record.byte_position, record.payload, record.lengths
                    )
                    self._grow(record.id, len(record.payload))
            elif type(record) is Create:
                base_index, base_position = (
                    (record.fork.message_index, record.fork.byte_position) if record.fork else (0, 0)
                )
                self._hot.begin(record.id, base_index, base_position)
                self._hot.extend(record.id, base_index, base_position, record.payload, record.lengths)
                self._grow(record.id, len(record.payload))
            elif type(record) is Image and self._hot.get(record.id) is None:
                self._hot.begin(record.id, record.message_index, record.byte_position)
            for stream_id in removed:
                self._hot.remove(stream_id)
                self._payload_bytes -= self._known.pop(stream_id).size
        seq, routed, size = self._written.popleft()
        self._carrier.submit(Load(seq, routed, size))
        self._take_note()

    def trim(self, stream_id: int, index: int, position: int) -> None:
        known = self._known[stream_id]
        if position <= known.start:
            return
        self._payload_bytes -= position - known.start
        known.size -= position - known.start
        known.start = position
        self._hot.trim(stream_id, index)
        self._carrier.trim(Trim(known.shard, stream_id, position))

    def maintain(self, image_of: ImageOf) -> None:
        self._take_note()
        if time.monotonic() - self._looked_s >= LOOK_AT_ROOM_S:
            self._look_at_room()

    def refusal(self) -> str | None:
        return self._failure or self._carrier.failure or self._refusal

    def busy(self) -> str | None:
        if self._carrier.is_full:
            return "Data arrives faster than the disk can save it; try again in a moment."
        return None

    def usage(self) -> Usage:
        return Usage(self._payload_bytes, self._hot.bytes + self._carrier.waiting_bytes)

    def close(self) -> None:
        """Carry all into the shards and leave an empty journal, unless the store has failed."""
        self._carrier.stop()
        journal = self._journal
        if journal is not None and self._recovered and not self._failure and not self._carrier.failure:
            journal.trim(self._carrier.mark)
        self._hot.clear()
        self._close_files()

    # -- reading ---------------------------------------------------------------------------------------------------

    def boundary(self, stream_id: int, index: int) -> int | None:
        tail = self._hot.get(stream_id)
        if tail is not None and index >= tail.index:
            return tail.boundary(index)
        return self._reader(stream_id).boundary(stream_id, index)

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        tail = self._hot.get(stream_id)
        if tail is None:
            return self._reader(stream_id).cut(stream_id, index, position, end_index, max_bytes)
        if index >= tail.index:
            return tail.cut(index, position, end_index, max_bytes)
        stored_end = min(end_index, tail.index)
        at, at_position = self._reader(stream_id).cut(stream_id, index, position, stored_end, max_bytes)
        if at == tail.index < end_index:
            more = bisect_right(tail.ends, position + max_bytes, 0, end_index - tail.index)
            if more:
                return tail.index + more, tail.ends[more - 1]
        return at, at_position

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]:
        if index == end_index:
            return ()
        tail = self._hot.get(stream_id)
        if tail is None:
            return self._reader(stream_id).lengths(stream_id, index, end_index)
        if index >= tail.index:
            return tail.lengths(index, end_index)
        if end_index <= tail.index:
            return self._reader(stream_id).lengths(stream_id, index, end_index)
        stored = self._reader(stream_id).lengths(stream_id, index, tail.index)
        return stored + tail.lengths(tail.index, end_index)

    def read(self, stream_id: int, position: int, end_position: int) -> Sequence[bytes | memoryview]:
        if position >= end_position:
            return ()
        tail = self._hot.get(stream_id)
        if tail is None:
            return self._reader(stream_id).read(stream_id, position, end_position)
        if position >= tail.position:
            return tail.read(position, end_position)
        if end_position <= tail.position:
            return self._reader(stream_id).read(stream_id, position, end_position)
        stored = self._reader(stream_id).read(stream_id, position, tail.position)
        return [*stored, *tail.read(tail.position, end_position)]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _make_or_check(self, shard_count: int) -> Manifest:
        if self._root.exists():
            manifest = read_manifest(self._root)
            check_manifest(self._root, manifest, shard_count)
            return manifest
        if (self._root.parent / BLOBS_NAME).exists():
            # That is made after the store has been made, so there was one.
            raise StorageError(f"{self._root} is missing. Restore it from a backup, or give another data_dir.")
        manifest = new_manifest(shard_count)
        with making(self._filesystem, self._root) as unfinished:
            for number in range(shard_count):
                make_shard(shard_path(unfinished, number), number, manifest.id_bytes)
            make_journal(journal_path(unfinished), manifest.id_bytes, shard_count)
            write_manifest(self._filesystem, unfinished, manifest)
        return manifest

    def _open(self, manifest: Manifest, map_bytes: int) -> None:
        count, store_id = manifest.shard_count, manifest.id_bytes
        for number in range(count):
            self._shards.append(Shard(shard_path(self._root, number), number, count, map_bytes, store_id))
        self._journal = Journal(journal_path(self._root), map_bytes, store_id, count)

    def _check_same_age(self, journal: Journal) -> None:
        """Refuse shards that are older than the journal has seen them, and a journal that is older than they are."""
        for shard, seen in zip(self._shards, journal.mark.shard_seqs, strict=True):
            if shard.ledger.seq < seen:
                raise CorruptError(
                    f"{shard.path} is at entry {shard.ledger.seq}, and the journal has seen it at {seen}: it is from"
                    " an older copy, or damaged. Restore all of the store from one backup."
                )
            if shard.ledger.seq > journal.last_seq:
                raise CorruptError(
                    f"{shard.path} is at entry {shard.ledger.seq}, beyond the journal's last ({journal.last_seq}):"
                    " the journal is from an older copy, or damaged. Restore all of the store from one backup."
                )

    def _route(self, record: Record, removed: tuple[int, ...]) -> Routed:
        if isinstance(record, Document):
            shard = shard_of(record.key, len(self._shards))
        elif type(record) is Create or (type(record) is Image and record.id not in self._known):
            shard = shard_of(record.name, len(self._shards))
            if isinstance(record, Image):
                start = record.byte_position
            else:
                start = record.fork.byte_position if record.fork is not None else 0
            self._known[record.id] = _Known(shard, start, 0)
        else:
            shard = self._known[record.id].shard
        return Routed(shard, record, tuple((gone, self._known[gone].shard) for gone in removed))

    def _grow(self, stream_id: int, size: int) -> None:
        self._known[stream_id].size += size
        self._payload_bytes += size

    def _take_note(self) -> None:
        """Learn what the carrier has brought into the shards, and let go of what memory need not hold for them."""
        reached = self._carrier.reached
        if not reached:
            return
        while reached:
            for stream_id, index in reached.popleft():
                self._hot.reached(stream_id, index)
        self._hot.shrink()

    def _look_at_room(self) -> None:
        self._looked_s = time.monotonic()
        try:
            self._refusal = self._lack_of_room()
            if self._looked_s - self._readers_checked_s >= CHECK_READERS_S:
                self._readers_checked_s = self._looked_s
                self._forget_dead_readers()
        except (StorageError, OSError) as error:
            self._refusal = f"How much room is left cannot be told: {error}"

    def _lack_of_room(self) -> str | None:
        if self._filesystem.free_bytes(self._root) < DISK_RESERVE_BYTES:
            return f"The disk of {self._root} has less than {DISK_RESERVE_BYTES >> 20} MiB left."
        parts: list[Shard | Journal] = [*self._shards, self._opened_journal()]
        for part in parts:
            if not part.has_room(_reserve_bytes(part.map_bytes)):
                return f"{part.path} is nearly as large as storage.acid_map_bytes allows."
        return None

    def _forget_dead_readers(self) -> None:
        """A process that died while it looked at a database would keep its pages from being used again."""
        for environment in (*(shard.environment for shard in self._shards), self._opened_journal().environment):
            with reading(self._root):
                environment.reader_check()

    def _reader(self, stream_id: int) -> ShardReader:
        return self._readers[self._known[stream_id].shard]

    def _opened_journal(self) -> Journal:
        assert self._journal is not None, "the store is open"
        return self._journal

    def _close_files(self) -> None:
        for shard in self._shards:
            shard.close()
        self._shards = []
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._directory.close()


def _size(record: object) -> int:
    payload = record.payload if type(record) is Append or type(record) is Create else b""
    return len(payload) + _BOOKKEEPING_BYTES


def _rounds(entries: Iterator[tuple[int, list[Routed]]]) -> Iterator[list[Load]]:
    loads: list[Load] = []
    total = 0
    for seq, batch in entries:
        size = sum(_size(routed.record) for routed in batch)
        loads.append(Load(seq, batch, size))
        total += size
        if total >= ROUND_BYTES:
            yield loads
            loads, total = [], 0
    if loads:
        yield loads
