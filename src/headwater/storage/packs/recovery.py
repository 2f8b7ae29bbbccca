"""Recovery of a pack store after a shutdown or a crash.

First everything is read without changes. Only if the manifest, the packs and the journal are valid and consistent are
they repaired: torn writes are cut, data that was read is synced before anything relies on it, and unreferenced files
are removed. A crash during the repair leaves a directory that recovers to the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headwater.core.records import Append, Create, Delete, Document, Image, Record, Retain
from headwater.storage import extents
from headwater.storage.extents import EXTENT, NO_EXTENTS
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError
from headwater.storage.journal.frames import Frame, Logged, read_batch
from headwater.storage.journal.replay import Replay
from headwater.storage.journal.segments import (
    HEADER_BYTES,
    FileJournal,
    remove_segments_before,
    segment_numbers,
    segment_path,
)
from headwater.storage.journal_location import journal_directory
from headwater.storage.packs.manifest import NAME, NEW_NAME, Manifest, SavedState
from headwater.storage.packs.pack import Pack, pack_numbers, pack_path
from headwater.storage.stream_data import StreamData, new_stream

PACKS_NAME: Final = "packs"


class Recovery:
    """One recovery. Run `records` to its end, then `open_journal`; the fields are then the state of the store."""

    def __init__(self, filesystem: Filesystem, directory: Path, manifest: Manifest) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self.journal_directory: Final = journal_directory(filesystem, directory)
        self._pack_directory = directory / PACKS_NAME
        self.manifest: Final = manifest
        self._replay: Replay | None = None
        self._names: dict[int, str] = {}
        self._ahead: dict[int, int] = {}
        self._missing: dict[int, tuple[str, tuple[int, int], int]] = {}
        self.streams: dict[int, StreamData] = {}
        self.dirty: set[int] = set()
        self.documents: dict[str, bytes | None] = {}
        self.removed: dict[int, StreamData] = {}
        self.last_lsn = 0
        self.last_pack = 0

    def records(self) -> Iterator[Record]:
        """The records that rebuild the catalog: states as of the last checkpoint, then the records of the journal."""
        if not self._filesystem.exists(self._directory / NAME):
            self._check_empty()
            return
        if not self._filesystem.exists(self._pack_directory):
            # Tools that copy directories often leave out empty ones.
            self._filesystem.make_directory(self._pack_directory)
        yield from self._saved_records()
        replay = Replay(self._filesystem, self.journal_directory, self.manifest.segment, self.name_of)
        for frame in replay.batches():
            yield from self._replay_batch(frame)
        if replay.has_losses:
            yield from self._repeat_lost_retains()
        else:
            self._check_complete(replay)
        self._replay = replay
        self.last_lsn = max(self.last_lsn, replay.last_lsn)

    def open_journal(self, *, durable: bool, segment_bytes: int) -> FileJournal:
        """Repair the directory, and begin a new segment."""
        if self._replay is None:
            return self._create(durable=durable, segment_bytes=segment_bytes)
        self.manifest.repair()
        self._replay.repair()
        writer = FileJournal(
            self._filesystem,
            self.journal_directory,
            number=self._replay.next_number,
            last_lsn=self.last_lsn,
            previous_lsn=self._replay.last_lsn,
            segment_bytes=segment_bytes,
            durable=durable,
            older=self._replay.segments,
            follows_a_loss=self._replay.has_losses,
        )
        self._remove_leftovers()
        return writer

    def name_of(self, stream_id: int) -> str | None:
        """Describe a stream for an error message; None if there is no such stream."""
        name = self._names.get(stream_id)
        if name is None and stream_id not in self.manifest.at:
            return None
        return name_of(self.manifest, stream_id, name)

    # -- implementation --------------------------------------------------------------------------------------------

    def _check_empty(self) -> None:
        """Refuse a store with data but without a manifest."""
        for directory, numbers in ((self.journal_directory, segment_numbers), (self._pack_directory, pack_numbers)):
            if self._filesystem.exists(directory):
                for number in numbers(self._filesystem, directory):
                    path = segment_path(directory, number)
                    if directory == self._pack_directory or self._filesystem.size(path) > HEADER_BYTES:
                        raise CorruptError(f"{self._directory / NAME} is missing, but {directory} has data.")

    def _saved_records(self) -> Iterator[Record]:
        """The states as of the last checkpoint."""
        states = self.manifest.load()
        saved = self._saved_extents()
        self.last_lsn = self.manifest.lsn
        for kept in states:
            self._restore_state(kept, saved)
            yield kept.state

    def _replay_batch(self, frame: Frame) -> Iterator[Record]:
        if frame.number + frame.entries > self.manifest.lsn + 1:
            for logged in read_batch(frame):
                if logged.lsn > self.manifest.lsn:
                    yield from self._replay_record(logged)

    def _saved_extents(self) -> dict[int, bytes]:
        """The extents of all streams, including removed ones, from the directories of the packs."""
        saved: dict[int, bytes] = {}
        get = saved.get
        pack_extent = EXTENT.pack
        self.last_pack = max((*pack_numbers(self._filesystem, self._pack_directory), *self.manifest.packs), default=0)
        for info in sorted(self.manifest.packs.values(), key=lambda info: info.born):
            try:
                pack = Pack(self._filesystem, self._pack_directory, info)
            except FileNotFoundError:
                raise CorruptError(f"{pack_path(self._pack_directory, info.number)} is missing.") from None
            try:
                number = info.number
                for stream_id, *location in pack.directory():
                    saved[stream_id] = get(stream_id, NO_EXTENTS) + pack_extent(number, *location)
            finally:
                pack.close()
        return saved

    def _restore_state(self, kept: SavedState, saved: dict[int, bytes]) -> None:
        state = kept.state
        if isinstance(state, Document):
            return
        fork = state.fork
        base = (fork.message_index, fork.byte_position) if fork is not None else (0, 0)
        blob = saved.pop(state.id, NO_EXTENTS)
        if blob and not extents.is_chain(blob, *base, state.message_index, state.byte_position):
            blob = extents.chain(extents.split(blob), state.message_index, state.byte_position)
        start = (state.message_index, state.byte_position)
        if blob:
            first = extents.at(blob, 0)
            start = (first.first_index, first.byte_position)
        if start > base and not state.deleted:
            # That is correct only if the missing part was trimmed, so that it cannot be read any more.
            self._missing[state.id] = (state.name, start, state.accessed_ms)
            self._note_retained(state.id, state.retained_position)
        self.streams[state.id] = StreamData(*start, blob)
        if kept.lsn > self.manifest.lsn:
            self._ahead[state.id] = kept.lsn
            self.last_lsn = max(self.last_lsn, kept.lsn)

    def _replay_record(self, logged: Logged) -> Iterator[Record]:
        is_known = logged.lsn <= self._ahead.get(logged.stream_id, 0)
        record = logged.record
        if is_known and not isinstance(record, Delete):
            return
        if isinstance(record, Document):
            self.documents[record.key] = record.value
            yield record
            return
        assert not isinstance(record, Image)
        if isinstance(record, Create):
            self._names[record.id] = record.name
            stored = self.streams[record.id] = new_stream(record.fork)
        elif record.id in self.streams:
            stored = self.streams[record.id]
        else:
            raise CorruptError(
                f"{self.journal_directory} has record {logged.lsn} of stream {record.id:016x}, which is not in the"
                " checkpoint and was not created by an earlier record."
            )
        if isinstance(record, Create | Append) and record.payload:
            stored.growing_tail().extend(record.payload, record.lengths, record.at_ms)
        self.dirty.add(record.id)
        if isinstance(record, Retain):
            self._note_retained(record.id, record.byte_position)
        elif isinstance(record, Delete):
            self._missing.pop(record.id, None)
        yield record
        for stream_id in logged.removed:
            self._remove(stream_id)

    def _note_retained(self, stream_id: int, byte_position: int) -> None:
        if stream_id in self._missing and byte_position >= self._missing[stream_id][1][1]:
            del self._missing[stream_id]

    def _remove(self, stream_id: int) -> None:
        stored = self.streams.pop(stream_id)
        self._missing.pop(stream_id, None)
        self.dirty.discard(stream_id)
        if stream_id in self.manifest.at:
            stored.tail = None
            self.removed[stream_id] = stored

    def _check_complete(self, replay: Replay) -> None:
        if replay.segments and replay.last_lsn < self.manifest.lsn:
            raise CorruptError(
                f"{self.journal_directory} ends at record {replay.last_lsn}, before checkpoint {self.manifest.lsn}."
            )
        for stream_id, (name, start, _) in self._missing.items():
            raise CorruptError(f"Stream {name!r} ({stream_id:016x}): bytes before position {start[1]} are missing.")

    def _repeat_lost_retains(self) -> Iterator[Record]:
        """Repeat the `Retain` records of trimmed bytes that were in the lost end of the journal."""
        for stream_id, (_, start, accessed_ms) in self._missing.items():
            self.dirty.add(stream_id)
            yield Retain(stream_id, accessed_ms, *start)

    def _create(self, *, durable: bool, segment_bytes: int) -> FileJournal:
        """Create a new store. The manifest is written last: a store exists when it has one."""
        filesystem = self._filesystem
        for directory in (self.journal_directory, self._pack_directory):
            filesystem.make_directory(directory)
        filesystem.sync_directory(self._directory)
        for number in segment_numbers(filesystem, self.journal_directory):
            filesystem.unlink(segment_path(self.journal_directory, number))
        writer = FileJournal(
            filesystem,
            self.journal_directory,
            number=1,
            last_lsn=0,
            previous_lsn=0,
            segment_bytes=segment_bytes,
            durable=durable,
        )
        self.manifest.create()
        return writer

    def _remove_leftovers(self) -> None:
        filesystem = self._filesystem
        remove_segments_before(filesystem, self.journal_directory, self.manifest.segment)
        leftovers = [
            pack_path(self._pack_directory, number)
            for number in pack_numbers(filesystem, self._pack_directory)
            if number not in self.manifest.packs
        ]
        if filesystem.exists(self._directory / NEW_NAME):
            leftovers.append(self._directory / NEW_NAME)
        for path in leftovers:
            filesystem.unlink(path)


def name_of(manifest: Manifest, stream_id: int, name: str | None = None) -> str:
    """Describe a stream for an error message, with its name if it is known."""
    if name is None:
        try:
            kept = manifest.saved_state(stream_id)
        except (OSError, CorruptError):
            kept = None
        if kept is not None and isinstance(kept.state, Image):
            name = kept.state.name
    return f"stream {name!r} ({stream_id:016x})" if name is not None else f"stream {stream_id:016x}"
