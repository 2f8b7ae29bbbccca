"""Packs: immutable files with the saved bytes of many streams.

A checkpoint writes the new bytes of all streams into one or two packs, so the number of syncs and of files does not
grow with the number of streams. A pack is

    header | extents: wire bytes, the end of each message, arrival times | checksum of each page | directory | trailer

The checksums cover everything before them in pages of 16 KiB; the trailer has the checksums of their table and of the
directory. A page is checked when it is first read, so that a flipped byte is found without reading a whole pack, and
affects only the streams in its page. No byte is returned unchecked.

Packs of version 1 have no arrival times. They can be read, but are never written.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, overload

import msgspec

from headwater.core.checksum import crc32
from headwater.storage.arrival_times import COUNT, StoredTimes, TimeRun, TimeTable, unknown_times
from headwater.storage.extents import Extent
from headwater.storage.filesystem import Bytes, Filesystem, write_whole
from headwater.storage.interface import CorruptError
from headwater.storage.stream_data import DamagedRangeError

PAGE_BYTES: Final = 16 * 1024
EXTENT_MAX_BYTES: Final = 2**30
"""Ends are stored as 32-bit distances from the start of their extent."""

MAPPED_READ_MAX_BYTES: Final = 16 * 1024 * 1024
"""After this much was read in place, the mapping of a pack is released, so that it does not accumulate."""

AHEAD_BYTES: Final = 1024 * 1024
"""How far reads are prefetched: four slices, so that the event loop does not wait for the disk in between."""

_FLUSH_BYTES: Final = 1024 * 1024
_DIRECT_BYTES: Final = 128 * 1024
"""Data of at least this size is written without a copy in the buffer."""
_ALLOCATED_BYTES: Final = 1024 * 1024
"""Blocks for data of at least this size are reserved in one call: writing then takes a third less CPU time than if it
reserves them one by one."""
_PADDING: Final = tuple(map(bytes, range(4)))
_HEADER: Final = struct.Struct("<8sQ")
_ENTRY: Final = struct.Struct("<6Q")
"""An entry of the directory: stream, offset, message index, byte position, count, length."""
_TRAILER: Final = struct.Struct("<8sQIQQII")
"""Magic, number, page size, offset of the checksums, offset of the directory, and the checksums of these two."""
_CHECKSUM: Final = struct.Struct("<I")
_TRAILER_BYTES: Final = _TRAILER.size + _CHECKSUM.size
_MAGIC: Final = b"HWPACK\x00\x02"
_FIRST_MAGIC: Final = b"HWPACK\x00\x01"
_SUFFIX: Final = ".pack"

assert sys.byteorder == "little", "packs are read in place, in the byte order of the machine"


class PackInfo(msgspec.Struct, frozen=True, array_like=True):
    """The entry of a pack in the manifest."""

    number: int
    tier: int
    """How often its contents were merged; `BIG` for large extents, which are never merged again."""
    born: int
    """The lowest number among the packs that it was merged from, which orders packs by age."""
    size: int
    data_bytes: int
    checksum: int


class Located(NamedTuple):
    stream_id: int
    extent: Extent


class DamagedPageError(CorruptError):
    """A page of a pack does not match its checksum."""

    def __init__(self, path: Path, offset: int) -> None:
        super().__init__(f"{path} is damaged within {PAGE_BYTES} bytes from byte {offset}: its checksum does not match")
        self.offset = offset


def pack_path(directory: Path, number: int) -> Path:
    return directory / f"{number:016d}{_SUFFIX}"


def pack_numbers(filesystem: Filesystem, directory: Path) -> list[int]:
    return sorted(filter(None, map(pack_number, filesystem.names(directory))))


def pack_number(name: str) -> int | None:
    """The number of a pack from its file name; None if it is not a pack."""
    number = name.removesuffix(_SUFFIX)
    return int(number) if name.endswith(_SUFFIX) and number.isdecimal() and len(number) == 16 else None


class PackWriter:
    """Writes one pack. Extents are added in order of stream id, and of byte position within a stream."""

    def __init__(self, filesystem: Filesystem, directory: Path, number: int, tier: int, born: int) -> None:
        self._filesystem = filesystem
        self._path = pack_path(directory, number)
        self._file = filesystem.create(self._path)
        self._buffer = bytearray(_HEADER.pack(_MAGIC, number))
        self._flushed = 0
        self._checksums = array("I")
        self._directory = bytearray()
        self._data_bytes = 0
        self.number: Final = number
        self.tier: Final = tier
        self.born: Final = born

    def add(
        self,
        stream_id: int,
        message_index: int,
        byte_position: int,
        pieces: Iterable[Bytes],
        ends: array[int],
        times: TimeTable,
    ) -> Extent:
        """Add an extent; `ends` are distances from its start, one for each message, and `times` covers all of them."""
        buffer = self._buffer
        offset = self._flushed + len(buffer)
        if ends[-1] >= _ALLOCATED_BYTES:
            self._file.allocate(offset, ends[-1])
        for piece in pieces:
            self._put(piece)
        length = self._flushed + len(buffer) - offset
        assert ends[-1] == length
        assert times.ends[-1] == len(ends)
        buffer += _PADDING[-len(buffer) % 4]
        self._put(memoryview(ends).cast("B"))
        self._put(times.encoded())
        self._flush()
        self._directory += _ENTRY.pack(stream_id, offset, message_index, byte_position, len(ends), length)
        self._data_bytes += length
        return Extent(self.number, offset, message_index, byte_position, len(ends), length)

    @property
    def data_bytes(self) -> int:
        return self._data_bytes

    def finish(self) -> PackInfo:
        """Write checksums, directory and trailer, and sync. The name is durable once the caller has synced the
        directory."""
        self._flush(everything=True)
        checksums = self._checksums.tobytes()
        directory_at = self._flushed + len(checksums)
        trailer = _TRAILER.pack(
            _MAGIC,
            self.number,
            PAGE_BYTES,
            self._flushed,
            directory_at,
            crc32(checksums),
            crc32(self._directory),
        )
        checksum = crc32(trailer)
        for part in (checksums, self._directory, trailer + _CHECKSUM.pack(checksum)):
            write_whole(self._file, part)
        self._file.sync()
        self._file.close()
        size = directory_at + len(self._directory) + _TRAILER_BYTES
        return PackInfo(self.number, self.tier, self.born, size, self._data_bytes, checksum)

    def abandon(self) -> None:
        """Remove the unfinished pack; if that fails, the next start removes it."""
        with suppress(OSError):
            self._file.close()
            self._filesystem.unlink(self._path)

    def _put(self, data: Bytes) -> None:
        """Add data to the buffer. The whole pages of large data are written from where they are."""
        buffer = self._buffer
        if len(data) < _DIRECT_BYTES:
            buffer += data
            self._flush()
            return
        with memoryview(data) as view:
            at = -len(buffer) % PAGE_BYTES
            buffer += view[:at]
            self._flush(everything=True)
            end = at + (len(view) - at) // PAGE_BYTES * PAGE_BYTES
            # In steps, because a checksum of many megabytes would hold the interpreter for long.
            for start in range(at, end, _FLUSH_BYTES):
                self._write_pages(view[start : min(start + _FLUSH_BYTES, end)])
            buffer += view[end:]

    def _flush(self, *, everything: bool = False) -> None:
        buffer = self._buffer
        if len(buffer) < _FLUSH_BYTES and not everything:
            return
        size = len(buffer) if everything else len(buffer) // PAGE_BYTES * PAGE_BYTES
        with memoryview(buffer) as view:
            self._write_pages(view[:size])
        del buffer[:size]

    def _write_pages(self, pages: memoryview) -> None:
        """Write pages with their checksums; only the last one of a pack may be incomplete."""
        with pages:
            for start in range(0, len(pages), PAGE_BYTES):
                self._checksums.append(crc32(pages[start : start + PAGE_BYTES]))
            write_whole(self._file, pages)
            self._flushed += len(pages)


class Pack:
    """One pack, open for reading."""

    __slots__ = (
        "_checked",
        "_checksums",
        "_directory_at",
        "_directory_sum",
        "_mapped",
        "_mapped_read",
        "_pages_end",
        "has_times",
        "info",
        "path",
    )

    def __init__(self, filesystem: Filesystem, directory: Path, info: PackInfo) -> None:
        self.info: Final = info
        self.path: Final = pack_path(directory, info.number)
        self._mapped = filesystem.map(self.path)
        self._mapped_read = 0
        try:
            self._open()
        except BaseException:
            self._mapped.close()
            raise

    def _open(self) -> None:
        size = len(self._mapped.view)
        if size != self.info.size or size < _TRAILER_BYTES:
            raise CorruptError(f"{self.path} has {size} bytes and should have {self.info.size}.")
        packed = self._mapped.read(size - _TRAILER_BYTES, _TRAILER_BYTES)
        magic, number, page, *offsets, table_sum, self._directory_sum = _TRAILER.unpack_from(packed)
        self._pages_end, self._directory_at = offsets
        (checksum,) = _CHECKSUM.unpack_from(packed, _TRAILER.size)
        if crc32(packed[: _TRAILER.size]) != checksum or checksum != self.info.checksum:
            raise CorruptError(
                f"{self.path} is damaged at byte {size - _TRAILER_BYTES}: its trailer fails its checksum."
            )
        if magic not in (_FIRST_MAGIC, _MAGIC):
            raise CorruptError(
                f"{self.path} has version {magic[-1]}, and this Headwater reads 1 and 2. Open it with the newer one."
            )
        self.has_times = magic == _MAGIC
        assert (number, page) == (self.info.number, PAGE_BYTES)
        table = self._mapped.read(self._pages_end, self._directory_at - self._pages_end)
        if crc32(table) != table_sum:
            raise CorruptError(f"{self.path} is damaged at byte {self._pages_end}: its table of checksums is wrong.")
        self._checksums = array("I", table)
        self._checked = bytearray(len(self._checksums))

    def check(self, start: int, end: int) -> None:
        """Check the bytes from `start` to `end` of the file."""
        page, end_page = start // PAGE_BYTES, -(-end // PAGE_BYTES)
        while (page := self._checked.find(0, page, end_page)) >= 0:
            self._check_from(page, end_page)

    def data(self, start: int, end: int) -> memoryview:
        """Checked bytes of the file, in place."""
        self.check(start, end)
        if end - start >= PAGE_BYTES:
            # Probably part of a longer read. The disk can fetch the rest while this part is sent.
            self._mapped.will_need(end, AHEAD_BYTES)
        self._mapped_read += end - start
        if self._mapped_read >= MAPPED_READ_MAX_BYTES:
            self._mapped_read = 0
            self._mapped.relax()
        return self._mapped.view[start:end]

    def ends(self, extent: Extent) -> PackColumn:
        return PackColumn(self, ends_offset(extent), extent.messages, "I")

    def times(self, extent: Extent) -> StoredTimes:
        """The arrival times of the messages of an extent."""
        if not self.has_times:
            return unknown_times(extent.messages)
        start = ends_offset(extent) + 4 * extent.messages
        runs: int = COUNT.unpack(self.data(start, start + COUNT.size))[0]
        start += COUNT.size
        return StoredTimes(PackColumn(self, start, runs, "I"), PackColumn(self, start + 4 * runs, runs, "Q"))

    def extents(self) -> Iterator[Located]:
        """The extents of the pack, in order of stream id and byte position."""
        number = self.info.number
        for stream_id, offset, message_index, byte_position, count, length in self.directory():
            yield Located(stream_id, Extent(number, offset, message_index, byte_position, count, length))

    def directory(self) -> Iterator[tuple[int, ...]]:
        """Stream id, offset, message index, byte position, messages and length of each extent, in order."""
        directory = self._mapped.read(self._directory_at, self.info.size - _TRAILER_BYTES - self._directory_at)
        if crc32(directory) != self._directory_sum:
            raise CorruptError(
                f"{self.path} is damaged at byte {self._directory_at}: its directory fails its checksum."
            )
        return _ENTRY.iter_unpack(directory)

    def check_everything(self) -> Iterator[None]:
        """Check all bytes, in steps; raises at the first damaged page."""
        for start in range(0, self._pages_end, _FLUSH_BYTES):
            self.check(start, min(start + _FLUSH_BYTES, self._pages_end))
            yield

    @property
    def checked_view(self) -> memoryview:
        """All bytes in place, after `check_everything`."""
        assert 0 not in self._checked
        return self._mapped.view

    def check_all(self) -> Iterator[DamagedPageError]:
        """Yield each damaged page."""
        for page in range(len(self._checksums)):
            try:
                self._check_from(page, page + 1)
            except DamagedPageError as damage:
                yield damage

    def relax(self) -> None:
        """Release the memory of pages that were read in place; they are loaded again when needed."""
        self._mapped.relax()

    def close(self) -> None:
        self._mapped.close()

    def _check_from(self, page: int, end_page: int) -> None:
        # By a read, not through the mapping, where an I/O error would end the process.
        end_page = min(end_page, page + _FLUSH_BYTES // PAGE_BYTES)
        start = page * PAGE_BYTES
        end = min(end_page * PAGE_BYTES, self._pages_end)
        data = memoryview(self._mapped.read(start, end - start))
        for at in range(0, end - start, PAGE_BYTES):
            if crc32(data[at : at + PAGE_BYTES]) != self._checksums[page]:
                raise DamagedPageError(self.path, page * PAGE_BYTES)
            self._checked[page] = 1
            page += 1


def ends_offset(extent: Extent) -> int:
    """The offset in the pack of the ends of an extent's messages."""
    start = extent.offset + extent.length
    return start + -start % 4


class PackColumn(Sequence[int]):
    """Numbers of an extent's index, read in place; pages are checked when they are read."""

    __slots__ = ("_count", "_pack", "_start", "_type", "_width")

    def __init__(self, pack: Pack, start: int, count: int, type_: Literal["I", "Q"]) -> None:
        self._pack = pack
        self._start = start
        self._count = count
        self._type: Literal["I", "Q"] = type_
        self._width = 4 if type_ == "I" else 8

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> memoryview[int]: ...

    def __getitem__(self, at: int | slice) -> int | memoryview[int]:
        if isinstance(at, slice):
            low, high, step = at.indices(self._count)
            assert step == 1
            return self._pack.data(self._start + self._width * low, self._start + self._width * high).cast(self._type)
        if not -self._count <= at < self._count:
            raise IndexError(at)
        start = self._start + self._width * (at % self._count)
        return int.from_bytes(self._pack.data(start, start + self._width), "little")


class PackRun:
    __slots__ = ("_extent", "_pack", "byte_position", "end_index", "end_position", "message_index")

    def __init__(self, pack: Pack, extent: Extent) -> None:
        self._pack = pack
        self._extent = extent
        self.message_index = extent.first_index
        self.byte_position = extent.byte_position
        self.end_index = extent.end_index
        self.end_position = extent.end_position

    def boundary(self, message_index: int) -> int | None:
        at = message_index - self.message_index
        if at == 0:
            return self.byte_position
        if not 0 < at <= self._extent.messages:
            return None
        with self._locating(self.byte_position):
            return self.byte_position + self._pack.ends(self._extent)[at - 1]

    def cut(self, message_index: int, byte_position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        low = message_index - self.message_index
        ends = self._pack.ends(self._extent)
        with self._locating(byte_position):
            at = bisect_right(ends, byte_position + max_bytes - self.byte_position, low, end_index - self.message_index)
            at = max(at, low + 1)
            return self.message_index + at, self.byte_position + ends[at - 1]

    def lengths(self, message_index: int, end_index: int) -> list[int]:
        low = message_index - self.message_index
        with self._locating(self.byte_position):
            ends = self._pack.ends(self._extent)[max(low - 1, 0) : end_index - self.message_index].tolist()
        starts = ends[:-1] if low else [0, *ends[:-1]]
        return [end - start for start, end in zip(starts, ends[1:] if low else ends, strict=True)]

    def arrivals(self, message_index: int, end_index: int) -> list[TimeRun]:
        with self._locating(self.byte_position):
            return self._pack.times(self._extent).between(
                message_index - self.message_index, end_index - self.message_index
            )

    def first_since(self, at_ms: int) -> int:
        with self._locating(self.byte_position):
            return self.message_index + self._pack.times(self._extent).first_since(at_ms)

    def read(self, byte_position: int, end_position: int) -> tuple[memoryview]:
        start = self._extent.offset + byte_position - self.byte_position
        try:
            return (self._pack.data(start, start + end_position - byte_position),)
        except DamagedPageError as damage:
            raise DamagedRangeError(byte_position + max(damage.offset - start, 0), str(damage)) from damage
        except OSError as error:
            raise DamagedRangeError(byte_position, f"{self._pack.path} cannot be read: {error}") from error

    @contextmanager
    def _locating(self, byte_position: int) -> Iterator[None]:
        """Report damage to the index with the byte position in the stream."""
        try:
            yield
        except DamagedPageError as damage:
            raise DamagedRangeError(byte_position, f"{damage} (its index)") from damage
        except OSError as error:
            raise DamagedRangeError(byte_position, f"{self._pack.path} cannot be read: {error}") from error
