"""Blobs: large immutable values beside the streams, written once and read many times. Snapshots are kept as blobs.

A blob is written in pieces and exists only when it is finished; a record that refers to it is committed after that, so
a crash leaves at most a blob without a reference, which the next start removes. An open blob can be read to its end
even if it is deleted in the meantime.

A blob on disk is one file: its bytes, a checksum for each page of them, and a footer. Every page is checked when it is
read, and is never served when it does not match.
"""

from __future__ import annotations

import logging
import re
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from headwater.core.checksum import crc32
from headwater.storage.descriptor_reserve import EXHAUSTED
from headwater.storage.filesystem import FileAppender, Filesystem, MappedFile, write_whole
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.tiering.objects import ObjectStoreError

log = logging.getLogger("headwater.storage")

BLOBS_NAME: Final = "blobs"
"""The directory of blobs, within a data directory."""
PAGE_BYTES: Final = 256 * 1024
SYNC_EVERY_BYTES: Final = 8 * 1024 * 1024
"""A long write is synced in steps: a single sync would delay the journal's syncs on the same disk."""

AHEAD_BYTES: Final = 4 * PAGE_BYTES
"""How far reads are prefetched."""

_FOOTER: Final = struct.Struct("<8sQQII")
_MAGIC: Final = b"HWBLOB1\n"
_FINISHED: Final = re.compile(r"[0-9a-f]{16}")
_UNFINISHED: Final = ".part"


class BlobWriter(Protocol):
    """A blob being written. All calls may block, and are made one at a time from any thread."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """Complete the blob: make it durable (as far as the mode promises that) and visible."""

    def abort(self) -> None:
        """Remove the unfinished blob. Does nothing after `finish`."""


class Blob(Protocol):
    """An open blob."""

    size: int

    def read(self, byte_position: int, end_position: int) -> bytes:
        """Return exactly these bytes; raises `CorruptError` if they are damaged, or another `StorageError`."""

    def close(self) -> None: ...


class BlobStore(Protocol):
    @property
    def blocks(self) -> bool:
        """Whether a write may take so long that it must run on a thread."""

    def create(self, blob_id: int) -> BlobWriter: ...

    def open(self, blob_id: int) -> Blob:
        """Open a blob; raises `CorruptError` if it is missing or damaged, or another `StorageError`."""

    def delete(self, blob_id: int) -> None: ...

    def ids(self) -> set[int]:
        """Return all finished blobs, and remove the unfinished ones of an earlier run."""


class MemoryBlobs:
    """Blobs in memory, for mode `memory`."""

    blocks = False

    def __init__(self) -> None:
        self._blobs: dict[int, list[bytes]] = {}

    def create(self, blob_id: int) -> BlobWriter:
        return _MemoryWriter(self._blobs, blob_id)

    def open(self, blob_id: int) -> Blob:
        try:
            return _MemoryBlob(self._blobs[blob_id])
        except KeyError:
            raise CorruptError(f"Blob {blob_id:016x} is missing.") from None

    def delete(self, blob_id: int) -> None:
        self._blobs.pop(blob_id, None)

    def ids(self) -> set[int]:
        return set(self._blobs)


class _MemoryWriter:
    def __init__(self, blobs: dict[int, list[bytes]], blob_id: int) -> None:
        self._blobs = blobs
        self._id = blob_id
        self._pages: list[bytes] = []
        self._rest = b""

    def write(self, data: bytes) -> None:
        data = self._rest + data
        whole = len(data) - len(data) % PAGE_BYTES
        self._pages.extend(data[at : at + PAGE_BYTES] for at in range(0, whole, PAGE_BYTES))
        self._rest = data[whole:]

    def finish(self) -> None:
        self._blobs[self._id] = [*self._pages, self._rest]

    def abort(self) -> None:
        self._pages.clear()
        self._rest = b""


class _MemoryBlob:
    def __init__(self, pages: list[bytes]) -> None:
        self._pages = pages
        self.size = (len(pages) - 1) * PAGE_BYTES + len(pages[-1])

    def read(self, byte_position: int, end_position: int) -> bytes:
        first, last = byte_position // PAGE_BYTES, max(byte_position, end_position - 1) // PAGE_BYTES
        start = byte_position - first * PAGE_BYTES
        if first == last:
            return self._pages[first][start : start + end_position - byte_position]
        data = b"".join(self._pages[first : last + 1])
        return data[start : start + end_position - byte_position]

    def close(self) -> None:
        """Nothing to close."""


class FileBlobs:
    """Blobs as files of one directory."""

    blocks = True

    def __init__(self, filesystem: Filesystem, directory: Path, *, durable: bool) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._durable = durable
        try:
            if not filesystem.exists(directory):
                filesystem.make_directory(directory)
                filesystem.sync_directory(directory.parent)
            filesystem.names(directory)
        except OSError as error:
            raise StorageError(f"{directory} cannot be used as the directory of blobs: {error}") from error

    def create(self, blob_id: int) -> BlobWriter:
        return _FileWriter(self._filesystem, self._path(blob_id), blob_id, durable=self._durable)

    def open(self, blob_id: int) -> Blob:
        path = self._path(blob_id)
        with _reading(path):
            return _FileBlob(self._filesystem.map(path), path, blob_id)

    def delete(self, blob_id: int) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.unlink(self._path(blob_id))

    def ids(self) -> set[int]:
        found = set()
        for name in self._filesystem.names(self._directory):
            if is_finished(name):
                found.add(int(name, 16))
            elif name.endswith(_UNFINISHED):
                self._filesystem.unlink(self._directory / name)
            else:
                log.warning("%s is not a blob and is left alone", self._directory / name)
        return found

    def _path(self, blob_id: int) -> Path:
        return self._directory / f"{blob_id:016x}"


class _FileWriter:
    def __init__(self, filesystem: Filesystem, path: Path, blob_id: int, *, durable: bool) -> None:
        self._filesystem = filesystem
        self._path = path
        self._unfinished = path.with_name(path.name + _UNFINISHED)
        self._id = blob_id
        self._durable = durable
        self._file: FileAppender | None = filesystem.create(self._unfinished)
        self._size = 0
        self._synced = 0
        self._crcs = array("I")
        self._page_crc = 0

    def write(self, data: bytes) -> None:
        assert self._file is not None, "write after finish"
        view = memoryview(data)
        while view:
            left_in_page = PAGE_BYTES - self._size % PAGE_BYTES
            piece = view[:left_in_page]
            write_whole(self._file, piece)
            self._page_crc = crc32(piece, self._page_crc)
            self._size += len(piece)
            if len(piece) == left_in_page:
                self._crcs.append(self._page_crc)
                self._page_crc = 0
            view = view[len(piece) :]
        if self._durable and self._size - self._synced >= SYNC_EVERY_BYTES:
            self._file.sync()
            self._synced = self._size

    def finish(self) -> None:
        assert self._file is not None, "finish was called twice"
        if self._size % PAGE_BYTES:
            self._crcs.append(self._page_crc)
        write_whole(self._file, _trailer(self._crcs, self._id, self._size))
        if self._durable:
            self._file.sync()
        self._file.close()
        self._file = None
        self._filesystem.replace(self._unfinished, self._path)
        if self._durable:
            self._filesystem.sync_directory(self._path.parent)

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(FileNotFoundError):
                self._filesystem.unlink(self._unfinished)


class _FileBlob:
    def __init__(self, mapped: MappedFile, path: Path, blob_id: int) -> None:
        self._mapped = mapped
        self._path = path
        try:
            self.size, self._crcs = self._read_trailer(blob_id)
        except BaseException:
            mapped.close()
            raise

    def read(self, byte_position: int, end_position: int) -> bytes:
        first = byte_position // PAGE_BYTES
        start = first * PAGE_BYTES
        pages = []
        with _reading(self._path):
            for number in range(first, (end_position + PAGE_BYTES - 1) // PAGE_BYTES):
                at = number * PAGE_BYTES
                page = self._mapped.read(at, min(PAGE_BYTES, self.size - at))
                if crc32(page) != self._crcs[number]:
                    raise CorruptError(f"{self._path} is damaged within {PAGE_BYTES} bytes from byte {at}.")
                pages.append(page)
            # The disk can fetch what is likely to be read next while this is sent.
            self._mapped.will_need(end_position, AHEAD_BYTES)
        data = pages[0] if len(pages) == 1 else b"".join(pages)
        if byte_position == start and end_position - start == len(data):
            return data
        return data[byte_position - start : end_position - start]

    def close(self) -> None:
        self._mapped.close()

    def _read_trailer(self, blob_id: int) -> tuple[int, array[int]]:
        file_size = len(self._mapped.view)
        if file_size < _FOOTER.size:
            raise CorruptError(f"{self._path} is truncated.")
        footer = self._mapped.read(file_size - _FOOTER.size, _FOOTER.size)
        magic, found_id, size, page_bytes, crc = _FOOTER.unpack(footer)
        pages = (size + PAGE_BYTES - 1) // PAGE_BYTES
        if (
            magic != _MAGIC
            or found_id != blob_id
            or page_bytes != PAGE_BYTES
            or size + 4 * pages + _FOOTER.size != file_size
        ):
            raise CorruptError(f"{self._path} does not have the footer of this blob.")
        checksums = self._mapped.read(size, 4 * pages)
        if crc32(footer[:-4], crc32(checksums)) != crc:
            raise CorruptError(f"{self._path}: its checksums are damaged.")
        return size, _from_little_endian(checksums)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Translate the errors of the file system: to `CorruptError`, unless a retry may succeed."""
    try:
        yield
    except OSError as error:
        if error.errno in EXHAUSTED or isinstance(error, ObjectStoreError):
            raise StorageError(f"{path} cannot be read at the moment: {error}") from error
        raise CorruptError(f"{path} cannot be read: {error}") from error


def is_finished(name: str) -> bool:
    """Whether a file of this name in the directory of blobs is a finished blob."""
    return _FINISHED.fullmatch(name) is not None


def _trailer(crcs: array[int], blob_id: int, size: int) -> bytes:
    checksums = struct.pack(f"<{len(crcs)}I", *crcs)
    footer = _FOOTER.pack(_MAGIC, blob_id, size, PAGE_BYTES, 0)[:-4]
    return checksums + footer + struct.pack("<I", crc32(footer, crc32(checksums)))


def _from_little_endian(checksums: bytes) -> array[int]:
    return array("I", struct.unpack(f"<{len(checksums) // 4}I", checksums))
