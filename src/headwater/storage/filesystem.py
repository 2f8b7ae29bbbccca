"""The file-system interface: all calls that storage makes to the file system.

Storage uses only the `Filesystem` protocol, so a test can replace it by one that loses unsynced data and fails at any
call. Errors are plain `OSError`s; the caller decides what they mean.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar

from headwater.operating_system import SYSTEM
from headwater.storage.descriptor_reserve import DescriptorReserve

T = TypeVar("T")
FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""Only the user that runs the server may read streams and keys, regardless of the umask."""
_OTHERS: Final = 0o077
PARTS_MAX: Final = 1024
"""Parts that one system call can write (IOV_MAX of Linux and macOS)."""

Bytes: TypeAlias = bytes | bytearray | memoryview


class AlreadyLockedError(Exception):
    """Another process holds the lock; `holder` is its process id, or empty."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class FileAppender(Protocol):
    """A file open for sequential writes."""

    def write(self, data: Bytes) -> int:
        """Write once; returns the number of bytes written, which may be fewer than given."""

    def write_parts(self, parts: Sequence[Bytes]) -> int:
        """The same for parts that follow each other, at most `PARTS_MAX`."""

    def allocate(self, offset: int, length: int) -> None:
        """Reserve space for a range that will be written. Only a hint: the content and the size do not change."""

    def sync(self) -> None:
        """Make everything written so far survive a power loss (not the file's name: see `sync_directory`)."""

    def close(self) -> None:
        """Close it; a second call does nothing."""


class MappedFile(Protocol):
    """A file whose existing bytes no longer change, open for reading."""

    view: memoryview

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly these bytes, with a call that can report an I/O error (reading `view` would crash)."""

    def will_need(self, offset: int, length: int) -> None:
        """Load these bytes into the page cache in the background, because they are likely to be read next."""

    def relax(self) -> None:
        """Release the memory of the parts of `view` that were read; they are loaded again when they are read again."""

    def close(self) -> None:
        """Close it. Slices of `view` stay valid as long as they are referenced."""


class Lock(Protocol):
    def release(self) -> None: ...


class Filesystem(Protocol):
    def create(self, path: Path) -> FileAppender:
        """Create a file, which must not exist."""

    def extend(self, path: Path) -> FileAppender:
        """Open an existing file to append to it."""

    def overwrite(self, path: Path) -> FileAppender:
        """Open an existing file to overwrite it from its beginning."""

    def recycle(self, path: Path, target: Path) -> bool:
        """Rename a file that is no longer needed, to overwrite it later; False if it may still be read."""

    def truncate(self, path: Path, size: int) -> None:
        """Truncate a file to `size` and sync it."""

    def sync(self, path: Path) -> None:
        """Sync a file that is not open, with its size."""

    def sync_directory(self, path: Path) -> None:
        """Make creates, renames and removals in a directory survive a power loss."""

    def replace(self, source: Path, target: Path) -> None: ...

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link to a file that no longer changes."""

    def unlink(self, path: Path) -> None: ...

    def make_directory(self, path: Path) -> None:
        """Create a directory that only its owner may enter. Its parent must exist; no error if it exists itself."""

    def make_parent(self, path: Path) -> None:
        """Create a directory above a data directory, with the usual mode: other users may need to pass through it."""

    def restrict(self, path: Path) -> int:
        """Restrict a directory and everything in it to its owner; returns how many entries changed."""

    def names(self, path: Path) -> list[str]: ...

    def exists(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int: ...

    def read(self, path: Path) -> bytes: ...

    def map(self, path: Path) -> MappedFile: ...

    def free_bytes(self, path: Path) -> int:
        """Free space for this process on the file system of `path`."""

    def lock(self, path: Path, note: str) -> Lock:
        """Take an exclusive lock on a file and write `note` to it, or raise `AlreadyLockedError`."""

    def boot_id(self) -> bytes:
        """16 bytes that change when the machine restarts; all zero if the system has no boot id."""


class RealFilesystem:
    """The file system of the machine. With a reserve, it can open files when all other descriptors are in use."""

    def __init__(self, reserve: DescriptorReserve | None = None) -> None:
        self._reserve = reserve

    def create(self, path: Path) -> FileAppender:
        return _RealAppender(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE))

    def extend(self, path: Path) -> FileAppender:
        return _RealAppender(self._open(path, os.O_WRONLY | os.O_APPEND))

    def overwrite(self, path: Path) -> FileAppender:
        return _RealAppender(self._open(path, os.O_WRONLY))

    def recycle(self, path: Path, target: Path) -> bool:
        path.replace(target)
        return True

    def truncate(self, path: Path, size: int) -> None:
        descriptor = self._open(path, os.O_WRONLY)
        try:
            os.ftruncate(descriptor, size)
            SYSTEM.sync_file(descriptor)
        finally:
            os.close(descriptor)

    def sync(self, path: Path) -> None:
        self._sync(path, os.O_RDONLY)

    def sync_directory(self, path: Path) -> None:
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        target.hardlink_to(source)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)

    def make_parent(self, path: Path) -> None:
        path.mkdir(mode=0o755, exist_ok=True)

    def restrict(self, path: Path) -> int:
        changed = 0
        root = path.resolve()
        for each in (root, *(Path(above) / name for above, *names in os.walk(root) for name in chain(*names))):
            with suppress(FileNotFoundError):
                mode = each.lstat().st_mode
                if mode & _OTHERS and not stat.S_ISLNK(mode):
                    each.chmod(stat.S_IMODE(mode) & ~_OTHERS)
                    changed += 1
        return changed

    def names(self, path: Path) -> list[str]:
        return self._with_reserve(lambda: sorted(entry.name for entry in path.iterdir()))

    def exists(self, path: Path) -> bool:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def read(self, path: Path) -> bytes:
        descriptor = self._open(path, os.O_RDONLY)
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()
        except OSError as error:
            # The original error names only the descriptor.
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)

    def map(self, path: Path) -> MappedFile:
        return self._with_reserve(lambda: _RealMapped(path))

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def lock(self, path: Path, note: str) -> Lock:
        return _RealLock(path, note)

    def boot_id(self) -> bytes:
        return SYSTEM.boot_id()

    def _open(self, path: Path, flags: int, mode: int = FILE_MODE) -> int:
        return self._with_reserve(lambda: os.open(path, flags | os.O_CLOEXEC, mode))

    def _with_reserve(self, opener: Callable[[], T]) -> T:
        return opener() if self._reserve is None else self._reserve.open(opener)

    def _sync(self, path: Path, flags: int) -> None:
        descriptor = self._open(path, flags)
        try:
            SYSTEM.sync_file(descriptor)
        finally:
            os.close(descriptor)


class _RealAppender:
    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: Bytes) -> int:
        return os.write(self._descriptor, data)

    def write_parts(self, parts: Sequence[Bytes]) -> int:
        return os.writev(self._descriptor, parts)

    def allocate(self, offset: int, length: int) -> None:
        SYSTEM.allocate(self._descriptor, offset, length)

    def sync(self) -> None:
        SYSTEM.sync_data(self._descriptor)

    def close(self) -> None:
        # If a descriptor is closed twice, its number may already belong to another file.
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def write_whole(file: FileAppender, data: Bytes) -> None:
    """Write all of the data, in as many calls as the system needs."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_all(file: FileAppender, parts: Sequence[Bytes]) -> None:
    """Write all of the parts, in as few calls as possible: after each one, a thread may wait for the interpreter."""
    rest = [memoryview(part) for part in parts if len(part)]
    while rest:
        written = file.write_parts(rest[:PARTS_MAX])
        complete = 0
        while complete < len(rest) and written >= len(rest[complete]):
            written -= len(rest[complete])
            complete += 1
        del rest[:complete]
        if written:
            rest[0] = rest[0][written:]


class _RealMapped:
    __slots__ = ("_descriptor", "_map", "view")

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(self._descriptor).st_size
            # `mmap` refuses a length of zero.
            self._map = mmap.mmap(self._descriptor, size, access=mmap.ACCESS_READ) if size else None
            self.view = memoryview(self._map) if self._map is not None else memoryview(b"")
        except BaseException:
            os.close(self._descriptor)
            raise

    def read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        while len(data) < length:
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                raise OSError(errno.EIO, f"the file ends at byte {offset + len(data)}")
            data += more
        return data

    def will_need(self, offset: int, length: int) -> None:
        SYSTEM.read_ahead(self._descriptor, offset, length)

    def relax(self) -> None:
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            # For a read-only file this drops the mapping of its pages, not the pages in the cache.
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self.view = memoryview(b"")
        self._map = None


class _RealLock:
    """An advisory lock that the kernel releases when the process ends, even if it is killed."""

    __slots__ = ("_descriptor",)

    def __init__(self, path: Path, note: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, note.encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 256, 0).decode("utf-8", "replace").strip()
            os.close(self._descriptor)
            raise AlreadyLockedError(holder) from None
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
