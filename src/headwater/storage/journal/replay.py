"""Read the journal: find the valid batches, detect a torn tail, and distinguish it from damage.

Reading does not change anything on the disk. Cuts and removals are collected, and made by `repair` when the whole
journal has been read and found valid. The rules:

- An invalid frame with no valid frame after it is a torn tail: its write was never acknowledged. It is cut.
- An invalid frame with a valid frame or another segment after it was acknowledged. That is damage, and an error.
- The file of the next segment is prepared in advance, empty, filled with zeros or with the content of a former segment.
  Such a file has no header, and no valid frame with a later record number than the journal before it: those of a
  former segment are older. A begun segment may have such content after its last batch, if it is
  the last one: that is cut like a torn tail.
- In segments that were never synced (`file-fast`) a restart of the machine may have kept any part of what was
  written. If the machine has been restarted since, the journal ends at the first invalid frame; the rest is dropped.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from headwater.storage.directory import write_file
from headwater.storage.filesystem import Filesystem, MappedFile
from headwater.storage.interface import CorruptError
from headwater.storage.journal.frames import FRAME, Frame, find_frame, read_frame, suspects
from headwater.storage.journal.segments import (
    HEADER_BYTES,
    Segment,
    segment_numbers,
    segment_path,
    unpack_header,
)

log = logging.getLogger("headwater.storage")

READ_BYTES: Final = 1024 * 1024
"""Bytes that are read from the journal at a time."""
SKIP_BYTES: Final = 64 * 1024
"""The same while batches are skipped: many small ones, or the header of a large one."""


class Cut(NamedTuple):
    path: Path
    size: int
    lost_bytes: int
    """0 if only old content of the file is cut."""


class Replay:
    """One pass over the journal from segment `first_number`. Iterate over `batches` to the end, then call `repair`."""

    def __init__(
        self, filesystem: Filesystem, directory: Path, first_number: int, name_of: Callable[[int], str | None]
    ) -> None:
        self._filesystem = filesystem
        self.directory: Final = directory
        self._name_of = name_of
        self._losable: dict[int, bool] = {}
        self._follows_a_loss = False
        self._boot_id = filesystem.boot_id()
        self.numbers = [n for n in segment_numbers(filesystem, directory) if n >= first_number]
        self.first_number = first_number
        self.segments: list[Segment] = []
        self.last_lsn = 0
        self.cut: Cut | None = None
        self.dropped: list[int] = []
        self._prepared: list[int] = []

    @property
    def next_number(self) -> int:
        return self.segments[-1].number + 1 if self.segments else self.first_number

    @property
    def has_losses(self) -> bool:
        """Whether a restart of the machine may have lost the end of the journal, now or earlier (`file-fast` only)."""
        return self._follows_a_loss or (bool(self.segments) and self._may_end_at(self.segments[-1].number))

    def batches(self) -> Iterator[Frame]:
        for expected, number in enumerate(self.numbers, self.first_number):
            if number != expected:
                raise CorruptError(f"{segment_path(self.directory, expected)} is missing, but later segments exist.")
        if not self.numbers:
            raise CorruptError(f"{segment_path(self.directory, self.first_number)} is missing.")
        for number in self.numbers:
            yield from self._segment(number)
            if self.dropped or self.cut is not None:
                break

    def repair(self) -> None:
        """Make the collected cuts and removals, and rewrite what may only be in the page cache.

        A killed process may have left a batch or a header that was written but not synced; a process that had an error
        may have left a batch that cannot be synced any more. What later segments rely on must be durable, in every
        mode. Only the last segment can end like that, so it is rewritten; the others are complete.
        """
        for number in sorted(self.dropped + self._prepared, reverse=True):
            # The last one first, so that after a crash during this loop the next start decides the same.
            self._filesystem.unlink(segment_path(self.directory, number))
            self._filesystem.sync_directory(self.directory)
        if self.cut is not None and self.cut.lost_bytes:
            log.warning("cut %d bytes of an unfinished write from %s", self.cut.lost_bytes, self.cut.path)
        for segment in self.segments[:-1]:
            self._filesystem.sync(segment_path(self.directory, segment.number))
        if self.segments:
            path = segment_path(self.directory, self.segments[-1].number)
            renew(self._filesystem, path, self.cut.size if self.cut is not None else self._filesystem.size(path))
        else:
            self._filesystem.sync_directory(self.directory)

    def _exclude_prepared(self) -> None:
        """Exclude the last file if it was prepared but never begun."""
        number = self.numbers[-1]
        path = segment_path(self.directory, number)
        if is_blank(self._filesystem, path) or self._is_unbegun(number, self._filesystem.read(path)):
            self.numbers.pop()
            self._prepared = [number]

    def _segment(self, number: int) -> Iterator[Frame]:
        path = segment_path(self.directory, number)
        data = self._filesystem.read(path)
        header = unpack_header(data)
        if header is None:
            raise CorruptError(f"{path} has a damaged header: it is damaged, or from an older copy.")
        if header.number != number:
            raise CorruptError(f"{path} has the content of segment {header.number}.")
        if self.segments and header.previous_lsn != self.last_lsn:
            if self._may_end_at(self.segments[-1].number):
                self._drop_from(number)
                return
            raise CorruptError(
                f"{path} continues from record {header.previous_lsn}, but the journal before ends at {self.last_lsn}."
            )
        self.segments.append(Segment(number, header.first_lsn, header.salt))
        self._follows_a_loss |= header.follows_a_loss
        self.last_lsn = header.first_lsn - 1
        at = HEADER_BYTES
        view = memoryview(data)
        while (frame := read_frame(view, at, header.salt)) is not None:
            if frame.number != self.last_lsn + 1:
                raise CorruptError(f"{path} at byte {at}: record {frame.number} follows {self.last_lsn}.")
            self.last_lsn += frame.entries
            at = frame.end
            yield frame
        if number + 1 == self.numbers[-1]:
            self._exclude_prepared()
        is_last = number == self.numbers[-1]
        if at < len(data):
            if (not is_last or find_frame(data, at, header.salt) is not None) and not self._may_end_at(number):
                raise self._damage(path, view, at)
            is_torn = not header.overwrites or data.startswith(header.salt.to_bytes(8, "little"), at)
            self.cut = Cut(path, at, len(data) - at if is_torn else 0)
            self._drop_from(number + 1)

    def _may_end_at(self, number: int) -> bool:
        """Whether a power loss, rather than damage, may have lost the rest of this segment."""
        return all(self._may_be_lost(later) for later in self.numbers if later >= number)

    def _may_be_lost(self, number: int) -> bool:
        if number not in self._losable:
            data = self._filesystem.read(segment_path(self.directory, number))
            header = unpack_header(data)
            self._losable[number] = (
                self._is_unbegun(number, data)
                if header is None
                else not header.synced
                and header.boot_id != self._boot_id
                and any(header.boot_id)
                and any(self._boot_id)
            )
        return self._losable[number]

    def _is_unbegun(self, number: int, data: bytes) -> bool:
        """Whether this segment was prepared but not begun: a header is synced before anything follows it.

        The first one was begun, because a checkpoint names only a segment that has its header.
        """
        if unpack_header(data) is not None or number != self.numbers[-1] or number == self.first_number:
            return False
        salt = int.from_bytes(data[HEADER_BYTES : HEADER_BYTES + 8], "little")
        frame = read_frame(memoryview(data), HEADER_BYTES, salt)
        return frame is None or frame.number <= self.last_lsn

    def _drop_from(self, number: int) -> None:
        self.dropped = [later for later in self.numbers if later >= number]
        if self.dropped:
            log.warning("the machine was restarted: journal segments from %d on are lost", number)

    def _damage(self, path: Path, view: memoryview, at: int) -> CorruptError:
        names = ", ".join(filter(None, map(self._name_of, suspects(view, at))))
        return CorruptError(
            f"{path} is damaged at byte {at}: record {self.last_lsn + 1} and what follows it in that batch"
            f" (probably of {names or 'an unknown stream'}). The journal continues after it, so it was"
            " acknowledged. Restore a backup of the directory."
        )


class JournalReader:
    """Reads batches from a journal that is being written, beginning with a segment, and keeps its position."""

    def __init__(self, filesystem: Filesystem, directory: Path, number: int) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._number = number
        self._offset = 0
        self._salt = 0
        self._lsn = -1

    def batches(self, last_lsn: int, after_lsn: int = -1) -> Iterator[Frame]:
        """The batches up to record `last_lsn`, which must be in the journal. Those that end with record `after_lsn` or
        earlier are skipped: only their headers are read."""
        while self._lsn < last_lsn:
            mapped = self._filesystem.map(segment_path(self._directory, self._number))
            try:
                for frame in self._frames(mapped, after_lsn):
                    yield frame
                    if self._lsn >= last_lsn:
                        return
            finally:
                mapped.close()
            if self._lsn < last_lsn:
                self._next_segment()

    def _frames(self, mapped: MappedFile, after_lsn: int) -> Iterator[Frame]:
        size = len(mapped.view)
        if not self._offset:
            header = unpack_header(mapped.read(0, min(size, HEADER_BYTES)))
            if header is None:
                raise CorruptError(f"{segment_path(self._directory, self._number)} has a damaged header.")
            if self._lsn >= 0 and header.previous_lsn != self._lsn:
                raise CorruptError(
                    f"{segment_path(self._directory, self._number - 1)} ends or is damaged after record {self._lsn},"
                    f" and the journal continues after record {header.previous_lsn}."
                )
            self._offset, self._salt, self._lsn = HEADER_BYTES, header.salt, header.first_lsn - 1
        if self._lsn < after_lsn:
            self._skip(mapped, after_lsn)
        data, start = memoryview(b""), self._offset
        while True:
            frame = read_frame(data, self._offset - start, self._salt)
            if frame is not None:
                self._offset += frame.end - frame.start
                self._lsn += frame.entries
                yield frame
                continue
            left = size - self._offset
            if left < FRAME.size:
                return
            needed = FRAME.size + FRAME.unpack_from(mapped.read(self._offset, FRAME.size))[2]
            if needed > left or needed <= start + len(data) - self._offset:
                return
            start = self._offset
            data = memoryview(mapped.read(start, min(left, max(needed, READ_BYTES))))

    def _skip(self, mapped: MappedFile, after_lsn: int) -> None:
        """Continue after the batches that end with record `after_lsn` or earlier, as far as their headers agree."""
        size = len(mapped.view)
        data, start = b"", self._offset
        while self._offset + FRAME.size <= size:
            if self._offset + FRAME.size > start + len(data):
                start = self._offset
                data = mapped.read(start, min(size - start, SKIP_BYTES))
            salt, _, length, number, entries = FRAME.unpack_from(data, self._offset - start)
            end = self._offset + FRAME.size + length
            if salt != self._salt or number != self._lsn + 1 or number + entries > after_lsn + 1 or end > size:
                return
            self._offset = end
            self._lsn += entries

    def skip_to(self, number: int) -> None:
        """Continue with this segment or a later one. The files of earlier segments may be removed."""
        if self._number < number:
            self._number = number
            self._offset = 0

    def _next_segment(self) -> None:
        following = segment_path(self._directory, self._number + 1)
        if not self._filesystem.exists(following):
            path = segment_path(self._directory, self._number)
            raise CorruptError(f"{path} ends or is damaged after record {self._lsn}, before the end of the journal.")
        self._number += 1
        self._offset = 0


def copy_journal(
    filesystem: Filesystem, source: Path, target: Path, first_number: int, copy_file: Callable[[Path, Path], object]
) -> Replay:
    """Copy the segments from `first_number`, up to the last complete batch. FileNotFoundError if one was trimmed.

    A batch that was being written is copied in part: it was not acknowledged when the copy reached it, and is cut.
    """
    numbers = _consecutive(segment_numbers(filesystem, source), first_number)
    # The last one first: if it has been begun, the previous one is complete.
    for number in reversed(numbers):
        path, copy = segment_path(source, number), segment_path(target, number)
        end = _end_of_batches(filesystem.read(path))
        if end is None and number == numbers[-1] > first_number:
            continue
        copy_file(path, copy)
        if end is not None and filesystem.size(copy) > end:
            filesystem.truncate(copy, end)
    # Segments are trimmed in order, and may then be overwritten: while the first one exists, all are unchanged.
    if not numbers or not filesystem.exists(segment_path(source, first_number)):
        raise FileNotFoundError(segment_path(source, first_number))
    replay = Replay(filesystem, target, first_number, lambda _: None)
    for _ in replay.batches():
        pass
    replay.repair()
    return replay


def _consecutive(numbers: list[int], first_number: int) -> list[int]:
    """The segments from `first_number` up to the first that is not in the list.

    A directory is not read atomically: of the files that are created in the meantime, a later one may be listed and an
    earlier one not. All that existed before are listed, and contain what was acknowledged by then.
    """
    later = [number for number in numbers if number >= first_number]
    return [number for expected, number in enumerate(later, first_number) if number == expected]


def _end_of_batches(data: bytes) -> int | None:
    """Where the complete batches of a segment end now; None without a valid header.

    In a file that is overwritten, only: what is written to it later must not follow older content in a copy.
    """
    header = unpack_header(data)
    if header is None or not header.overwrites:
        return None if header is None else len(data)
    at, view = HEADER_BYTES, memoryview(data)
    while (frame := read_frame(view, at, header.salt)) is not None:
        at = frame.end
    return at


def is_blank(filesystem: Filesystem, path: Path) -> bool:
    """Whether a segment's file is empty or begins with zeros, as a prepared one does."""
    mapped = filesystem.map(path)
    try:
        start = mapped.read(0, min(len(mapped.view), HEADER_BYTES + FRAME.size))
    finally:
        mapped.close()
    return not any(start)


SUFFIX: Final = ".new"
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def renew(filesystem: Filesystem, path: Path, size: int) -> None:
    """Replace a file by a copy of its first `size` bytes; the copy and its name are durable when this returns.

    When a sync fails, Linux marks the pages as clean: a later read returns them, a later sync succeeds without writing
    them, and a power cut loses them. So what a start has read from the end of a file may not be on the disk, however
    often the file is synced. Writing it to a new file and syncing that makes it durable. A crash at any point leaves
    the old file or the new one, which have the same content.

    On a full disk the file is truncated and synced in place instead: the server must be able to start, to free space.
    """
    fresh = path.with_name(path.name + SUFFIX)
    if filesystem.exists(fresh):
        filesystem.unlink(fresh)
    try:
        write_file(filesystem, fresh, filesystem.read(path)[:size])
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        log.warning("%s is not rewritten, because the disk is full", path)
        with suppress(OSError):
            filesystem.unlink(fresh)
        filesystem.truncate(path, size)
        filesystem.sync_directory(path.parent)
        return
    filesystem.replace(fresh, path)
    filesystem.sync_directory(path.parent)
