"""Offline tools for `acid` stores: read, count, copy and bulk-load. The check is in `check`.

A store is read without being changed: the states and bytes that the shards have, then what only the journal has, held
in memory. Each record is skipped for the shards that already have it, because a crash, or a copy taken while a server
writes, may leave one shard ahead of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
import msgspec

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create, Delete, Document, Image, Record
from headwater.storage.acid.check import find_problems, open_shard
from headwater.storage.acid.environment import map_bytes_each, open_environment, reading, used_bytes
from headwater.storage.acid.layout import (
    DIRECTORY,
    FIRST_FORMAT,
    AcidManifest,
    check_shard_count,
    making,
    old_journal_path,
    read_manifest,
    read_mark,
    shard_of,
    shard_path,
    write_manifest,
    write_mark,
)
from headwater.storage.acid.old_journal import MAP_BYTES, OldJournal
from headwater.storage.acid.reader import ShardReader, ShardRun
from headwater.storage.acid.shard import Shard, ShardChange, make_store
from headwater.storage.acid.shard_store import PendingRecord, check_same_age, pending_in_journal, saved_stream
from headwater.storage.cold_store import UnsavedState
from headwater.storage.directory import open_directory
from headwater.storage.extents import Extent
from headwater.storage.filesystem import DIRECTORY_MODE, FILE_MODE, Filesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal.replay import JournalReader, Replay, copy_journal
from headwater.storage.journal.segments import JOURNAL_NAME, create_journal, segment_numbers, segment_path
from headwater.storage.journal_location import journal_directory
from headwater.storage.offline.interface import CopyFile, StoredRun
from headwater.storage.stream_data import StreamData, new_stream

TRIES: Final = 100
"""How often a copy is restarted because the server trimmed the journal during it."""


class AcidTools:
    """The tools for the family of `acid`."""

    def problems(self, filesystem: Filesystem, directory: Path) -> Iterator[str]:
        return find_problems(filesystem, directory)

    def open(self, filesystem: Filesystem, directory: Path) -> AcidSource:
        return AcidSource(filesystem, directory)

    def parts(self, filesystem: Filesystem, directory: Path) -> dict[str, int]:
        parts = self.live_parts(filesystem, directory)
        with closing(AcidSource(filesystem, directory)) as source:
            return {**parts, "journal_entries": sum(1 for _ in source.pending())}

    def live_parts(self, filesystem: Filesystem, directory: Path) -> dict[str, int]:
        root = directory / DIRECTORY
        parts = {"shards": 0, "shard_bytes": 0, "used_bytes": 0, "segments": 0, "journal_bytes": 0}
        if not root.exists():
            return parts
        manifest = read_manifest(root)
        for number in range(manifest.shard_count):
            with closing(open_shard(root, number, manifest)) as shard:
                found = _shard_figures(shard)
            parts["shards"] += 1
            parts["shard_bytes"] += found.file_bytes
            parts["used_bytes"] += found.used_bytes
        log = journal_directory(filesystem, directory)
        for number in segment_numbers(filesystem, log) if filesystem.exists(log) else ():
            try:
                parts["journal_bytes"] += filesystem.size(segment_path(log, number))
                parts["segments"] += 1
            except FileNotFoundError:
                # A running server may have removed it just now.
                continue
        return parts

    def copy(self, filesystem: Filesystem, source: Path, target: Path, copy_file: CopyFile) -> None:
        """Copy the checkpoint file, then a snapshot of each shard, then the journal from the segment in that file.

        So no shard is behind the checkpoint file, and none is ahead of the journal: together they are the store as of
        the last whole batch of that journal. A running server may trim the journal: then the copy starts again.
        """
        root = source / DIRECTORY
        if not root.exists():
            # No server has opened the store yet.
            return
        for _ in range(TRIES):
            try:
                _copy_once(filesystem, source, target, copy_file)
            except FileNotFoundError:
                for number in segment_numbers(filesystem, target / JOURNAL_NAME):
                    filesystem.unlink(segment_path(target / JOURNAL_NAME, number))
                continue
            return
        raise StorageError("The store is too busy to be copied; try again.")

    def bulk_load(self, filesystem: Filesystem, directory: Path, *, shard_count: int, map_bytes: int) -> ShardBulkLoad:
        return ShardBulkLoad(filesystem, directory, shard_count, map_bytes)


# -- reading -----------------------------------------------------------------------------------------------------------


class AcidSource:
    """An `acid` store, read without being changed."""

    def __init__(self, filesystem: Filesystem, directory: Path) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._root: Final = directory / DIRECTORY
        self._shards: list[Shard] = []
        if not self._root.exists():
            return
        self._manifest: AcidManifest = read_manifest(self._root)
        try:
            for number in range(self._manifest.shard_count):
                self._shards.append(open_shard(self._root, number, self._manifest))
        except BaseException:
            self.close()
            raise
        self._readers: list[ShardReader] = [ShardReader(shard) for shard in self._shards]

    def recover(self, unsaved: UnsavedState) -> Iterator[Image | Document]:
        catalog: Catalog[StreamState] = Catalog(StreamState)
        shard_by_stream: dict[int, int] = {}
        for shard in self._shards:
            for state in shard.states():
                catalog.apply(state)
                if isinstance(state, Image):
                    shard_by_stream[state.id] = shard.number
                    unsaved.streams[state.id] = saved_stream(state, shard.number)
        for pending in self.pending():
            self._apply(pending, catalog, shard_by_stream, unsaved.streams)
        for stream in catalog:
            yield stream.image()
        for key, value in catalog.documents.items():
            yield Document(key, value)

    def pending(self) -> Iterator[PendingRecord]:
        """The records of the journal that some shard may not have."""
        if not self._shards:
            return
        if self._manifest.format == FIRST_FORMAT:
            path = old_journal_path(self._root)
            with closing(OldJournal(path, self._manifest.id_bytes, self._manifest.shard_count)) as journal:
                journal.check_same_age(self._shards)
                for seq, batch in journal.entries():
                    for routed in batch:
                        yield PendingRecord(seq, routed.record, tuple(stream_id for stream_id, _ in routed.removed))
            return
        log = journal_directory(self._filesystem, self._directory)
        mark = read_mark(self._root, self._manifest)
        replay = Replay(self._filesystem, log, mark.segment, lambda _: None)
        for _ in replay.batches():
            pass
        check_same_age(self._shards, mark, replay)
        yield from pending_in_journal(JournalReader(self._filesystem, log, mark.segment), replay.last_lsn, mark.lsn)

    def _apply(
        self,
        pending: PendingRecord,
        catalog: Catalog[StreamState],
        shard_by_stream: dict[int, int],
        streams: dict[int, StreamData],
    ) -> None:
        lsn, record, removed = pending
        if isinstance(record, Document):
            shard: int | None = shard_of(record.key, len(self._shards))
        elif isinstance(record, Create | Image):
            shard = shard_by_stream[record.id] = shard_of(record.name, len(self._shards))
        else:
            shard = shard_by_stream.get(record.id)
        if shard is not None and self._shards[shard].ledger.lsn < lsn:
            if isinstance(record, Delete):
                # The journal lists what it removes: the catalog cannot know it while some shards are ahead.
                catalog.apply(msgspec.structs.replace(catalog.by_id[record.id].image(), deleted=True))
            else:
                catalog.apply(record)
            if isinstance(record, Create):
                streams[record.id] = new_stream(record.fork)
            elif isinstance(record, Image) and record.id not in streams:
                streams[record.id] = StreamData(record.message_index, record.byte_position)
            if isinstance(record, Create | Append) and record.payload:
                streams[record.id].growing_tail().extend(bytes(record.payload), record.lengths, record.at_ms)
        for stream_id in removed:
            if stream_id in streams and self._shards[shard_by_stream[stream_id]].ledger.lsn < lsn:
                del streams[stream_id]
                gone = catalog.by_id.pop(stream_id)
                if catalog.by_name.get(gone.name) is gone:
                    del catalog.by_name[gone.name]

    def run(self, stream_id: int, extent: Extent) -> ShardRun:
        return ShardRun(self._readers[extent.pack], stream_id, extent)

    def release(self, stream_id: int, blob: bytes, byte_position: int) -> None:
        raise AssertionError("an offline store is never trimmed")

    def name_of(self, stream_id: int) -> str:
        return f"stream {stream_id:016x}"

    def close(self) -> None:
        for shard in self._shards:
            shard.close()
        self._shards.clear()


# -- copying -----------------------------------------------------------------------------------------------------------


def _copy_once(filesystem: Filesystem, source: Path, target: Path, copy_file: CopyFile) -> None:
    root = source / DIRECTORY
    manifest = read_manifest(root)
    mark = read_mark(root, manifest) if manifest.format != FIRST_FORMAT else None
    with ExitStack() as opened:
        copies: list[tuple[lmdb.Environment, Path, str]] = []
        for number in range(manifest.shard_count):
            shard = opened.enter_context(closing(open_shard(root, number, manifest)))
            copies.append((shard.environment, shard.path, shard_path(Path(), number).name))
        if mark is None:
            path = old_journal_path(root)
            environment = opened.enter_context(closing(open_environment(path, MAP_BYTES, 0, readonly=True)))
            copies.append((environment, path, path.name))
        views = [opened.enter_context(environment.begin()) for environment, _, _ in copies]
        if mark is not None:
            filesystem.make_directory(target / JOURNAL_NAME)
            journal = journal_directory(filesystem, source)
            copy_journal(filesystem, journal, target / JOURNAL_NAME, mark.segment, copy_file)
        with making(filesystem, target / DIRECTORY) as unfinished:
            for (environment, path, name), view in zip(copies, views, strict=True):
                _copy_environment(filesystem, environment, view, path, unfinished / name)
            if mark is not None:
                write_mark(filesystem, unfinished, manifest, mark)
            write_manifest(filesystem, unfinished, manifest)


def _copy_environment(
    filesystem: Filesystem, environment: lmdb.Environment, view: lmdb.Transaction[bytes], source: Path, target: Path
) -> None:
    target.mkdir(mode=DIRECTORY_MODE)
    try:
        environment.copy(str(target), compact=True, txn=view)
        # LMDB gives a copy the mode that the umask allows.
        (target / "data.mdb").chmod(FILE_MODE)
        filesystem.sync(target / "data.mdb")
    except lmdb.Error as error:
        raise StorageError(f"Copying {source} to {target} failed: {error}") from error


# -- figures -----------------------------------------------------------------------------------------------------------


class _ShardFigures(NamedTuple):
    file_bytes: int
    used_bytes: int
    """The rest of the file is free, and reused by later writes."""


def _shard_figures(shard: Shard) -> _ShardFigures:
    with reading(shard.path), shard.environment.begin() as txn:
        return _ShardFigures((shard.path / "data.mdb").stat().st_size, used_bytes(txn, shard.databases))


BATCH_BYTES: Final = 4 * 2**20
"""Bytes that are collected for a shard before they are written in one transaction."""

_RECORD_BYTES: Final = 256


class ShardBulkLoad:
    """Fill a new store: for each stream its state without bytes, its bytes, then its complete state."""

    def __init__(self, filesystem: Filesystem, directory: Path, shard_count: int, map_bytes: int) -> None:
        check_shard_count(shard_count)
        self._directory = open_directory(filesystem, directory, "acid")
        self._shards: list[Shard] = []
        self._changes: list[list[ShardChange]] = [[] for _ in range(shard_count)]
        self._sizes = [0] * shard_count
        root = directory / DIRECTORY
        make_store(filesystem, root, shard_count, create_journal(filesystem, directory / JOURNAL_NAME))
        store_id = read_manifest(root).id_bytes
        size = map_bytes_each(map_bytes, shard_count)
        for number in range(shard_count):
            self._shards.append(Shard(shard_path(root, number), number, shard_count, size, store_id))

    def add_stream(self, image: Image, runs: Iterable[StoredRun]) -> None:
        shard = shard_of(image.name, len(self._shards))
        is_new = True
        for run in runs:
            if is_new:
                self._put(shard, _without_bytes(image, run.message_index, run.byte_position), 0)
                is_new = False
            for append in _appends(image.id, run):
                self._put(shard, append, len(append.payload))
        self._put(shard, image, 0)

    def add_document(self, document: Document) -> None:
        self._put(shard_of(document.key, len(self._shards)), document, len(document.value or b""))

    def finish(self) -> None:
        for number in range(len(self._shards)):
            self._apply(number)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()
        self._shards = []
        self._directory.close()

    def _put(self, shard: int, record: Record, size: int) -> None:
        self._changes[shard].append(ShardChange(record, ()))
        self._sizes[shard] += size + _RECORD_BYTES
        if self._sizes[shard] >= BATCH_BYTES:
            self._apply(shard)

    def _apply(self, number: int) -> None:
        if self._changes[number]:
            self._shards[number].apply(0, self._changes[number])
        self._changes[number] = []
        self._sizes[number] = 0


def _appends(stream_id: int, run: StoredRun) -> Iterator[Append]:
    """The messages of a run as records, one for each arrival time."""
    payload = memoryview(b"".join(run.pieces))
    message_index, byte_position, at, number = run.message_index, run.byte_position, 0, 0
    for messages, at_ms in run.times:
        lengths = tuple(run.lengths[number : number + messages])
        size = sum(lengths)
        yield Append(stream_id, at_ms, message_index, byte_position, bytes(payload[at : at + size]), lengths)
        message_index, byte_position = message_index + messages, byte_position + size
        at, number = at + size, number + messages


def _without_bytes(image: Image, message_index: int, byte_position: int) -> Image:
    """The state of a stream before any of its bytes are stored."""
    return msgspec.structs.replace(
        image,
        message_index=message_index,
        byte_position=byte_position,
        closed=False,
        closed_by=None,
        producers={},
        ages=None,
        deleted=False,
    )
