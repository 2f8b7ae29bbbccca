"""A cache of objects on the local disk, in blocks: a sparse file for each object that was partly read.

The event loop must not wait for an object store. While it is `deferring`, a read of a block that is not cached raises
`NotLocalError` and the block is fetched in the background; the reader is run again when that is done. Other reads, and
other threads, wait.

The cache is emptied at a restart, so a crash cannot leave invalid content in it. Readers verify checksums
as for files on the disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headwater.storage.filesystem import DIRECTORY_MODE, FILE_MODE
from headwater.storage.interface import StorageError
from headwater.storage.tiering.objects import Objects

BLOCK_BYTES: Final = 1024 * 1024
FETCH_BLOCKS: Final = 4
"""Adjacent blocks that are fetched with one request: most reads continue with the next block."""
FETCHES_MAX: Final = 4
OPEN_MAX: Final = 256
"""Objects that are partly cached; each is an open file. Beyond this number, unused ones are dropped."""
WAIT_S: Final = 120.0
"""The timeout of a waiting reader: longer than a request to the store with its retries."""


class NotLocalError(StorageError):
    """Bytes are being fetched from the object store: retry when `fetched` is done."""

    def __init__(self, key: str, fetched: Future[None]) -> None:
        super().__init__(f"{key} is being fetched from the object store")
        self.fetched: Final = fetched


class BlockCache:
    """All objects that are partly cached. Can be used from any thread.

    Unless it `keeps`, an object is only cached while it is open.
    """

    def __init__(self, objects: Objects, directory: Path, *, keeps: bool = True) -> None:
        self.keeps: Final = keeps
        self._objects = objects
        self._directory = directory
        self._lock = threading.Lock()
        self._entries: dict[str, CachedObject] = {}
        self._executor = ThreadPoolExecutor(FETCHES_MAX, "headwater-fetch")
        self._deferring: int | None = None
        self.fetched_bytes = 0
        """Bytes fetched since the start."""
        self._is_ready = False

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """In this context, reads of this thread raise `NotLocalError` instead of waiting."""
        before, self._deferring = self._deferring, threading.get_ident()
        try:
            yield
        finally:
            self._deferring = before

    @property
    def is_deferring(self) -> bool:
        return self._deferring == threading.get_ident()

    def open(self, key: str, size: int) -> CachedFile:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                self._prepare()
                self._drop_unused()
                path = self._directory / key.replace("/", "-")
                entry = CachedObject(self, self._lock, key, path, size)
            # At the end, so that the least recently opened ones are first.
            self._entries[key] = entry
            entry.users += 1
        return CachedFile(entry)

    def sizes(self) -> dict[str, int]:
        """The disk space of each object."""
        with self._lock:
            return {key: entry.held_bytes for key, entry in self._entries.items()}

    def drop(self, key: str) -> None:
        """Drop an object. Open readers can still use it; its space is freed when the last one closes it."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is not None:
                entry.forget()

    def fetch(self, entry: CachedObject, first: int, blocks: int) -> Future[None]:
        return self._executor.submit(self._fetch, entry, first, blocks)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for entry in self._entries.values():
                entry.forget()
            self._entries.clear()

    def _prepare(self) -> None:
        """Before the first use, create the directory or remove the files that another process left in it."""
        if not self._is_ready:
            self._directory.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            for path in self._directory.iterdir():
                path.unlink()
            self._is_ready = True

    def _drop_unused(self) -> None:
        if len(self._entries) >= OPEN_MAX:
            unused = next((key for key, entry in self._entries.items() if not entry.users), None)
            if unused is not None:
                self._entries.pop(unused).forget()

    def _fetch(self, entry: CachedObject, first: int, blocks: int) -> None:
        start = first * BLOCK_BYTES
        length = min(blocks * BLOCK_BYTES, entry.size - start)
        try:
            data = self._objects.read(entry.key, start, length)
            self.fetched_bytes += length
            with self._lock:
                entry.fill(first, data)
        finally:
            with self._lock:
                entry.end_fetch(first, blocks)


class CachedObject:
    """One object, of which some blocks are cached. The lock of the cache protects its state."""

    def __init__(self, cache: BlockCache, lock: threading.Lock, key: str, path: Path, size: int) -> None:
        self._cache = cache
        self._lock = lock
        self._path = path
        self.key: Final = key
        self.size: Final = size
        self.users = 0
        self.held_bytes = 0
        self._present = bytearray(-(-size // BLOCK_BYTES))
        self._fetches: dict[int, Future[None]] = {}
        self._is_forgotten = False
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        os.ftruncate(self._descriptor, size)
        self.map = mmap.mmap(self._descriptor, size, access=mmap.ACCESS_READ)

    def request(self, offset: int, length: int) -> Future[None] | None:
        """Start fetching the missing ones of these bytes; returns the first fetch to wait for, or None if there is
        none."""
        first, end = offset // BLOCK_BYTES, -(-min(offset + length, self.size) // BLOCK_BYTES)
        wait_for = None
        with self._lock:
            block = first
            while (block := self._present.find(0, block, end)) >= 0:
                fetch = self._fetches.get(block)
                if fetch is None:
                    blocks = self._run_from(block)
                    fetch = self._cache.fetch(self, block, blocks)
                    self._fetches.update(dict.fromkeys(range(block, block + blocks), fetch))
                wait_for = wait_for or fetch
                block += 1
        return wait_for

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)

    def fill(self, first: int, data: bytes) -> None:
        if self._descriptor < 0:
            return  # It is no longer open.
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], first * BLOCK_BYTES + written)
        for block in range(first, first - (-len(data) // BLOCK_BYTES)):
            self._present[block] = 1
        self.held_bytes += len(data)

    def end_fetch(self, first: int, blocks: int) -> None:
        for block in range(first, first + blocks):
            self._fetches.pop(block, None)

    def forget(self) -> None:
        self._is_forgotten = True
        self._path.unlink(missing_ok=True)
        self._close_if_unused()

    def release(self) -> None:
        with self._lock:
            self.users -= 1
            self._close_if_unused()
            unused = not self.users
        if unused and not self._cache.keeps:
            self._cache.drop(self.key)

    def _run_from(self, block: int) -> int:
        """The number of consecutive missing blocks from this one, up to the size of one request."""
        end = min(block + FETCH_BLOCKS, len(self._present))
        run = block
        while run < end and not self._present[run] and run not in self._fetches:
            run += 1
        return run - block

    def _close_if_unused(self) -> None:
        if self._is_forgotten and not self.users and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class CachedFile:
    """A `MappedFile` whose bytes are fetched as they are read."""

    def __init__(self, entry: CachedObject) -> None:
        self._entry = entry
        self._is_open = True
        self.view = memoryview(entry.map)

    def read(self, offset: int, length: int) -> bytes:
        entry = self._entry
        while (fetch := entry.request(offset, length)) is not None:
            if entry._cache.is_deferring:
                raise NotLocalError(entry.key, fetch)
            try:
                fetch.result(WAIT_S)
            except TimeoutError:
                raise OSError(errno.EIO, f"{entry.key} was not fetched within {WAIT_S:g} s") from None
        data = entry.read(offset, length)
        if len(data) != length:
            raise OSError(errno.EIO, f"the object ends at byte {offset + len(data)}")
        return data

    def will_need(self, offset: int, length: int) -> None:
        if offset < self._entry.size:
            self._entry.request(offset, length)

    def relax(self) -> None:
        self._entry.map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.view = memoryview(b"")
            self._entry.release()
