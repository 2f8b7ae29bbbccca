"""The write-ahead journal: all streams in one file at a time, one write (and where it is synced, one sync) per batch.

Invariants: a segment's header and name are durable before its first batch; a segment is begun only when every batch
before it is as durable as the mode promises, and when the previous segment has overwritten all earlier content of its
file; no segment that was begun is ever written by a second process, re-created or filled. The file of the next segment
is prepared in advance (`next_segment`), so that a write needs no new descriptor and does not wait for a directory to be
synced; while the next file is missing, the current segment grows beyond its size. A segment whose file grows is
replaced by a prepared one early, because syncs are faster there. The batch that begins a segment waits for two syncs,
of the header and of the batch: `takes_long` says so before it is written. After the first error nothing more is
written: the result of a failed write or sync is unknown, and a second sync can report success for pages that the first
one lost.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from headwater.core.checksum import crc32
from headwater.storage.filesystem import Bytes, FileAppender, Filesystem, write_all, write_whole
from headwater.storage.interface import Committed, ReplicaFailedError, WriteFailedError
from headwater.storage.journal.frames import FRAME, BatchEncoder, change_salt, seal
from headwater.storage.journal.next_segment import NextSegment, remove_spares
from headwater.storage.journal.replica import JournalReplica
from headwater.storage.worker import Job

log = logging.getLogger("headwater.storage")

JOURNAL_NAME: Final = "log"
"""The directory of the journal, within a data directory."""
SEGMENT_MAX_BYTES: Final = 2**30
"""Upper limit of the setting, because a segment is read completely at startup."""
FILL_AFTER_BYTES: Final = 256 * 1024
"""The next segment is filled when the current one has this size, so that an idle server does not use space for it."""

_HEADER: Final = struct.Struct("<8sQQQQ16sI")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CHECKSUM.size
_MAGIC: Final = b"HWLOG\x00\x00\x01"
_SYNCED: Final = 1
_FOLLOWS_A_LOSS: Final = 2
_OVERWRITES: Final = 4
_SUFFIX: Final = ".log"


class SegmentHeader(NamedTuple):
    number: int
    first_lsn: int
    previous_lsn: int
    """The last record before this segment, to detect a gap."""
    salt: int
    boot_id: bytes
    synced: bool
    """Whether each batch was synced before it was acknowledged."""
    follows_a_loss: bool = False
    """Whether the journal before it lost its end in a restart of the machine."""
    overwrites: bool = False
    """Whether the file had content before: if so, old content may follow the last batch."""


class Segment(NamedTuple):
    """An existing segment. Its salt is random, so segments of another journal are detected."""

    number: int
    first_lsn: int
    salt: int


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:016d}{_SUFFIX}"


def segment_numbers(filesystem: Filesystem, directory: Path) -> list[int]:
    """The segments in a directory, in order."""
    names = (name.removesuffix(_SUFFIX) for name in filesystem.names(directory) if name.endswith(_SUFFIX))
    return sorted(int(name) for name in names if name.isdecimal() and len(name) == 16)


def pack_header(header: SegmentHeader) -> bytes:
    flags = (
        (_SYNCED if header.synced else 0)
        | (_FOLLOWS_A_LOSS if header.follows_a_loss else 0)
        | (_OVERWRITES if header.overwrites else 0)
    )
    packed = _HEADER.pack(
        _MAGIC, header.number, header.first_lsn, header.previous_lsn, header.salt, header.boot_id, flags
    )
    return packed + _CHECKSUM.pack(crc32(packed))


def unpack_header(data: Bytes) -> SegmentHeader | None:
    """The header at the start of a segment, or None if it is incomplete or damaged."""
    if len(data) < HEADER_BYTES:
        return None
    magic, number, first_lsn, previous_lsn, salt, boot_id, flags = _HEADER.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if magic != _MAGIC or crc32(data[: _HEADER.size]) != checksum:
        return None
    return SegmentHeader(
        number,
        first_lsn,
        previous_lsn,
        salt,
        boot_id,
        bool(flags & _SYNCED),
        bool(flags & _FOLLOWS_A_LOSS),
        bool(flags & _OVERWRITES),
    )


class FileJournal:
    """The end of the journal. `append` and `mark_complete` may be called from any thread."""

    def __init__(
        self,
        filesystem: Filesystem,
        directory: Path,
        *,
        number: int,
        last_lsn: int,
        previous_lsn: int,
        segment_bytes: int,
        durable: bool,
        older: Sequence[Segment] = (),
        follows_a_loss: bool = False,
    ) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._segment_bytes = min(segment_bytes, SEGMENT_MAX_BYTES)
        self._durable = durable
        self._encoder = BatchEncoder()
        self._lock = threading.Lock()
        self._is_marked = True
        # Read it now: later there may be no free descriptor.
        self._boot_id = filesystem.boot_id()
        self._next = NextSegment(
            filesystem, directory, segment_bytes=self._segment_bytes, fills=durable, header_bytes=HEADER_BYTES
        )
        self._filled_bytes = 0
        """How far the current segment was written before it was begun."""
        self._begins: bool | None = None
        """Whether the next batch begins a segment, once `takes_long` has decided it."""
        self.last_lsn = last_lsn
        self.failure: str | None = None
        self.replica: JournalReplica | None = None
        """Where each batch is made durable before it is written here, if durability does not depend on this disk."""
        self.segments: list[Segment] = list(older)
        remove_spares(filesystem, directory)
        file = filesystem.create(segment_path(directory, number))
        try:
            self._salt = self._begin(file, number, previous_lsn, follows_a_loss=follows_a_loss)
            self._file, self._size = file, HEADER_BYTES
            filesystem.sync_directory(directory)
        except BaseException:
            file.close()
            raise

    def takes_long(self) -> bool:
        """Whether the next append waits for more than its own sync. The result is binding for that append.

        That is so if it begins a segment, or if another thread is writing.
        """
        if self._begins is None:
            self._begins = self._can_begin()
        return self._begins or self.replica is not None or self._lock.locked()

    def append(self, batch: Sequence[Committed]) -> None:
        """Append a batch; when this returns it is as durable as the mode promises."""
        with self._lock:
            self._check()
            frame, rest = self._encoder.encode(batch, self.last_lsn + 1, self._salt)
            begins, self._begins = self._begins, None
            try:
                if self.replica is not None:
                    self.replica.append(self.last_lsn, self.last_lsn + len(batch), (frame, *rest))
                if self._can_begin() if begins is None else begins:
                    self._roll()
                    change_salt(frame, self._salt)
                self._append(frame, rest)
            except BaseException as error:
                raise self._fail(error) from error
            self.last_lsn += len(batch)
            self._is_marked = False

    def adopt(self, frame: bytearray, entries: int) -> None:
        """Write a sealed batch of the replica; `last_lsn` must be the record before it."""
        change_salt(frame, self._salt)
        self._append(frame)
        self.last_lsn += entries

    def mark_complete(self) -> None:
        """Mark everything so far as complete, so that later damage to the last batch does not look like a torn
        write."""
        with self._lock:
            if self._is_marked or self.failure is not None:
                return
            frame = bytearray(FRAME.size)
            seal(frame, self._salt, self.last_lsn + 1, 0)
            try:
                self._append(frame)
            except BaseException as error:
                raise self._fail(error) from error
            self._is_marked = True

    @property
    def wants_next(self) -> bool:
        """Whether `prepare` has work to do."""
        return not self._next.exists and self.failure is None

    def prepare(self) -> None:
        """Create the file of the next segment. Called by one thread only; no write waits for it.

        Raises OSError when that fails, and can then be called again.
        """
        if self.wants_next:
            self._next.prepare(segment_path(self._directory, self.segments[-1].number + 1))

    @property
    def wants_fill(self) -> bool:
        """Whether `fill` has work to do."""
        return (
            self._next.wants_fill
            and self.failure is None
            and self._size >= min(FILL_AFTER_BYTES, self._segment_bytes // 4)
        )

    def fill(self) -> Job:
        """Fill the file of the next segment. Called by one thread only; no write waits for it."""
        return self._next.fill()

    def trim(self, first_needed: int) -> None:
        """Remove the segments before this one. Called by one thread only."""
        while self.segments and self.segments[0].number < first_needed:
            path = segment_path(self._directory, self.segments[0].number)
            try:
                if not self._next.keep_spare(path):
                    self._filesystem.unlink(path)
            except OSError as error:
                log.warning("%s is no longer needed and will be removed at the next start: %s", path, error)
            del self.segments[0]

    @property
    def is_marked_complete(self) -> bool:
        return self._is_marked

    @property
    def size_bytes(self) -> int:
        """The size of the segment that is being written."""
        return self._size

    def fail(self, reason: str) -> None:
        """Refuse further writes, because something that the journal relies on has failed."""
        self.failure = self.failure or reason

    def close(self) -> None:
        """Close the files. Without an earlier error, files that were only prepared are removed."""
        with self._lock:
            had_no_error = self.failure is None
            self.fail("The store is closed.")
            self._file.close()
            try:
                self._next.close(remove=had_no_error)
                if had_no_error and self._size < self._filled_bytes:
                    self._filesystem.truncate(segment_path(self._directory, self.segments[-1].number), self._size)
            except OSError as error:
                log.warning("files that were prepared for the journal will be removed at the next start: %s", error)

    def _append(self, frame: bytearray, rest: Sequence[Bytes] = ()) -> None:
        if rest:
            write_all(self._file, (frame, *rest))
        else:
            write_whole(self._file, frame)
        if self._durable:
            self._file.sync()
        self._size += len(frame) + sum(map(len, rest))

    def _can_begin(self) -> bool:
        """Whether the next segment should be begun, and its file is ready."""
        return (
            self._size >= self._filled_bytes
            and (self._size >= self._segment_bytes or (self._next.is_filled and not self._filled_bytes))
            and self._next.is_ready
        )

    def _roll(self) -> None:
        """Begin the next segment, if its file is still free."""
        if (prepared := self._next.take()) is None:
            return
        full = self._file
        number = self.segments[-1].number + 1
        self._salt = self._begin(prepared.file, number, self.last_lsn, overwrites=prepared.filled_bytes > 0)
        self._file, self._size, self._filled_bytes = prepared.file, HEADER_BYTES, prepared.filled_bytes
        self._next.forget()
        full.close()

    def _begin(
        self,
        file: FileAppender,
        number: int,
        previous_lsn: int,
        *,
        follows_a_loss: bool = False,
        overwrites: bool = False,
    ) -> int:
        """Write the header of a segment; returns its salt."""
        salt = secrets.randbits(64)
        first_lsn = self.last_lsn + 1
        header = SegmentHeader(
            number, first_lsn, previous_lsn, salt, self._boot_id, self._durable, follows_a_loss, overwrites
        )
        write_whole(file, pack_header(header))
        file.sync()
        self.segments.append(Segment(number, first_lsn, salt))
        return salt

    def _check(self) -> None:
        if self.failure is not None:
            raise self._error()

    def _fail(self, error: BaseException) -> WriteFailedError:
        if isinstance(error, WriteFailedError):
            self.fail(str(error))
        else:
            self.fail(f"Writing {segment_path(self._directory, self.segments[-1].number)} failed: {error}")
        return self._error()

    def _error(self) -> WriteFailedError:
        return WriteFailedError(self.failure) if self.replica is None else ReplicaFailedError(self.failure)


def create_journal(filesystem: Filesystem, directory: Path, last_lsn: int = 0) -> Segment:
    """Create an empty journal that continues after record `last_lsn`. Existing segments were never used; remove
    them."""
    filesystem.make_directory(directory)
    filesystem.sync_directory(directory.parent)
    for number in segment_numbers(filesystem, directory):
        filesystem.unlink(segment_path(directory, number))
    journal = FileJournal(
        filesystem, directory, number=1, last_lsn=last_lsn, previous_lsn=last_lsn, segment_bytes=1, durable=True
    )
    journal.close()
    return journal.segments[0]


def remove_segments_before(filesystem: Filesystem, directory: Path, first_needed: int) -> None:
    """Remove segments that a checkpoint made unnecessary, but that a crash left."""
    for number in segment_numbers(filesystem, directory):
        if number < first_needed:
            filesystem.unlink(segment_path(directory, number))
