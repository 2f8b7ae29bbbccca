"""The write-ahead journal: all streams in one file at a time, one write (and where it is synced, one sync) per batch.

Invariants: a segment's header and name are durable before its first batch; a segment is begun only when every batch
before it is as durable as the mode promises; no segment with content is ever written by a second process, re-created
or filled ahead. The file of the next segment is created in advance (`prepare`) and stays empty until the current one
is full, so that a write needs no new descriptor and does not wait for a directory to be synced; while the next file is
missing, the current segment grows beyond its size. After the first error nothing more is written: the result of a
failed write or sync is unknown, and a second sync can report success for pages that the first one lost.
"""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from headwater.storage.filesystem import Bytes, FileAppender, Filesystem
from headwater.storage.interface import Committed, WriteFailedError
from headwater.storage.journal.frames import FRAME, BatchEncoder, seal

log = logging.getLogger("headwater.storage")

JOURNAL_NAME: Final = "log"
"""The directory of the journal, within a data directory."""
SEGMENT_MAX_BYTES: Final = 2**30
"""A segment is read whole at startup; a larger setting is taken as this."""

_HEADER: Final = struct.Struct("<8sQQQQ16sI")
_CHECKSUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CHECKSUM.size
_MAGIC: Final = b"HWLOG\x00\x00\x01"
_SYNCED: Final = 1
_FOLLOWS_A_LOSS: Final = 2
_SUFFIX: Final = ".log"


class SegmentHeader(NamedTuple):
    number: int
    first_lsn: int
    previous_lsn: int
    """The last record before this segment: a gap before it would show."""
    salt: int
    boot_id: bytes
    synced: bool
    """Whether each batch was synced before it was acknowledged."""
    follows_a_loss: bool = False
    """Whether the journal before it lost its end in a restart of the machine."""


class Segment(NamedTuple):
    """A segment that exists. Its salt is random, so segments of another journal are recognised."""

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
    flags = (_SYNCED if header.synced else 0) | (_FOLLOWS_A_LOSS if header.follows_a_loss else 0)
    packed = _HEADER.pack(
        _MAGIC, header.number, header.first_lsn, header.previous_lsn, header.salt, header.boot_id, flags
    )
    return packed + _CHECKSUM.pack(zlib.crc32(packed))


def unpack_header(data: Bytes) -> SegmentHeader | None:
    """The header at the start of a segment, or None when it is not whole and sound."""
    if len(data) < HEADER_BYTES:
        return None
    magic, number, first_lsn, previous_lsn, salt, boot_id, flags = _HEADER.unpack_from(data)
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if magic != _MAGIC or zlib.crc32(data[: _HEADER.size]) != checksum:
        return None
    return SegmentHeader(
        number, first_lsn, previous_lsn, salt, boot_id, bool(flags & _SYNCED), bool(flags & _FOLLOWS_A_LOSS)
    )


class FileJournal:
    """The end of the journal. `append` and `mark_whole` may be called from any thread."""

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
        # Read now: when a segment is full there may be no descriptor to read it with.
        self._boot_id = filesystem.boot_id()
        self._next: FileAppender | None = None
        self._next_is_named = False
        self.last_lsn = last_lsn
        self.failure: str | None = None
        self.segments: list[Segment] = list(older)
        file = filesystem.create(segment_path(directory, number))
        try:
            self._file, self._size, self._salt = self._begin(file, number, previous_lsn, follows_a_loss=follows_a_loss)
            filesystem.sync_directory(directory)
        except BaseException:
            file.close()
            raise

    def append(self, batch: Sequence[Committed]) -> None:
        """Append a batch; when this returns it is as durable as the mode promises."""
        with self._lock:
            self._check()
            frame = self._encoder.encode(batch, self.last_lsn + 1, self._salt)
            try:
                self._append(frame)
            except BaseException as error:
                raise self._fail(error) from error
            self.last_lsn += len(batch)
            self._is_marked = False

    def mark_whole(self) -> None:
        """Mark that everything before is whole, so that later damage to the last batch cannot pass for a torn write."""
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
        """Whether `prepare` has something to do."""
        return not self._next_is_named and self.failure is None

    def prepare(self) -> None:
        """Create the file of the next segment. Called by one thread only; no write waits for it.

        Raises OSError when that fails, and can then be called again.
        """
        if not self.wants_next:
            return
        if self._next is None:
            self._next = self._filesystem.create(segment_path(self._directory, self.segments[-1].number + 1))
        self._filesystem.sync_directory(self._directory)
        self._next_is_named = True

    def trim(self, first_needed: int) -> None:
        """Remove the segments before this one. Called by one thread only."""
        while self.segments and self.segments[0].number < first_needed:
            path = segment_path(self._directory, self.segments[0].number)
            try:
                self._filesystem.unlink(path)
            except OSError as error:
                log.warning("%s is no longer needed and will be removed at the next start: %s", path, error)
            del self.segments[0]

    @property
    def is_marked_whole(self) -> bool:
        return self._is_marked

    @property
    def size_bytes(self) -> int:
        """The size of the segment that is being written."""
        return self._size

    def fail(self, reason: str) -> None:
        """Refuse further writes, because something that the journal relies on has failed."""
        self.failure = self.failure or reason

    def close(self) -> None:
        with self._lock:
            self.fail("The store is closed.")
            self._file.close()
            if self._next is not None:
                self._next.close()

    def _append(self, frame: bytearray) -> None:
        if self._size >= self._segment_bytes and self._next_is_named:
            assert self._next is not None
            full = self._file
            self._file, self._size, self._salt = self._begin(self._next, self.segments[-1].number + 1, self.last_lsn)
            self._next = None
            self._next_is_named = False
            full.close()
            # The frame carries the salt of the segment before.
            _, _, _, number, count = FRAME.unpack_from(frame)
            seal(frame, self._salt, number, count)
        write_whole(self._file, frame)
        if self._durable:
            self._file.sync()
        self._size += len(frame)

    def _begin(
        self, file: FileAppender, number: int, previous_lsn: int, *, follows_a_loss: bool = False
    ) -> tuple[FileAppender, int, int]:
        salt = secrets.randbits(64)
        header = SegmentHeader(
            number, self.last_lsn + 1, previous_lsn, salt, self._boot_id, self._durable, follows_a_loss
        )
        write_whole(file, pack_header(header))
        file.sync()
        self.segments.append(Segment(number, self.last_lsn + 1, salt))
        return file, HEADER_BYTES, salt

    def _check(self) -> None:
        if self.failure is not None:
            raise WriteFailedError(self.failure)

    def _fail(self, error: BaseException) -> WriteFailedError:
        path = segment_path(self._directory, self.segments[-1].number)
        self.fail(f"Writing {path} failed: {error}")
        return WriteFailedError(self.failure)


def create_journal(filesystem: Filesystem, directory: Path, last_lsn: int = 0) -> Segment:
    """An empty journal that continues after record `last_lsn`. Segments that exist were never used, and are removed."""
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
    """Remove segments that a crash left after the checkpoint that made them unnecessary."""
    for number in segment_numbers(filesystem, directory):
        if number < first_needed:
            filesystem.unlink(segment_path(directory, number))


def write_whole(file: FileAppender, data: Bytes) -> None:
    """Write all of the data, in as many calls as the system needs."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
