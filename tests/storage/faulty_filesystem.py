"""A file system in memory that forgets what was not synced, fails where it is told to, and dies on demand.

It keeps what was written and what was synced apart. A power loss keeps what was synced; of the rest, each 512-byte
block may have been kept, dropped, zeroed or garbled, and each create, rename or removal whose directory was not synced
may or may not have happened. The death of a process alone loses nothing, but syncs nothing either.

A sync that fails has lost its pages: as on Linux, a second sync then succeeds without writing them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

from headwater.storage.filesystem import AlreadyLockedError, Bytes, FileAppender, Filesystem, Lock, MappedFile

BLOCK_BYTES = 512
FREE_BYTES = 2**40

_OPENING = frozenset({"create", "extend", "truncate", "sync_directory", "names", "open", "map", "lock"})
"""Calls that need a descriptor of their own."""


class Crashed(BaseException):
    """The process is gone at this point: nothing that it does from here on has any effect."""


class _File:
    """`data` is what a reader sees now; `synced` is what a power loss is sure to leave."""

    __slots__ = ("clean_size", "data", "synced")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytes(data)
        self.clean_size = 0
        """Up to here the system believes it has written everything, whether or not it has."""

    def sync(self) -> None:
        self.synced = self.synced[: self.clean_size] + bytes(self.data[self.clean_size :])
        self.clean_size = len(self.data)

    def lose_sync(self, random: Random) -> None:
        """A sync that fails: some pages are written, others not, and all count as written from now on."""
        self.synced = self.left_by_power_loss(random).ljust(len(self.data), b"\0")
        self.clean_size = len(self.data)

    def left_by_power_loss(self, random: Random) -> bytes:
        if len(self.data) < len(self.synced):
            return random.choice((self.synced, bytes(self.data)))
        left = bytearray(self.synced)
        size = random.randint(len(self.synced), len(self.data)) if random.random() < 0.5 else len(self.data)
        if random.random() < 0.3:
            size = size // BLOCK_BYTES * BLOCK_BYTES
        for start in range(len(self.synced) // BLOCK_BYTES * BLOCK_BYTES, size, BLOCK_BYTES):
            low, high = max(start, len(self.synced)), min(start + BLOCK_BYTES, size)
            fate = random.random()
            if fate < 0.6:
                left += self.data[low:high]
            elif fate < 0.8:
                left += bytes(high - low)
            else:
                left += random.randbytes(high - low)
        return bytes(left)


class _Folder:
    """`names` is what a reader sees now; `durable` and some of the `pending` changes are what a power loss leaves."""

    __slots__ = ("durable", "names", "pending")

    def __init__(self) -> None:
        self.names: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}
        self.pending: list[dict[str, _File | _Folder | None]] = []

    def change(self, changes: dict[str, _File | _Folder | None]) -> None:
        """Names that are set (or with None removed) together, or not at all."""
        _apply(self.names, changes)
        self.pending.append(changes)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending.clear()

    def lose_power(self, random: Random) -> None:
        for changes in self.pending:
            if random.random() < 0.5:
                _apply(self.durable, changes)
        self.pending.clear()
        self.names = dict(self.durable)
        for node in self.names.values():
            if isinstance(node, _Folder):
                node.lose_power(random)
            else:
                left = node.left_by_power_loss(random)
                node.__init__(left)  # type: ignore[misc]
                node.clean_size = len(left)


class FaultyFilesystem:
    """One machine's disk. It outlives the processes that use it: see `crash`."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._root = _Folder()
        self._locks: dict[_File, str] = {}
        self._life = 0
        self._boots = 1
        self.calls = 0
        self.traces = False
        self.log: list[str] = []
        self.dead = False
        self.crash_at: int | None = None
        """The process dies in this call, before or in the middle of what it asks for."""
        self.crash_in_sync: tuple[str, int] | None = None
        """After so many more syncs of files whose name holds this text, the process dies: written, but not synced."""
        self.faults: dict[int, int] = {}
        """Calls that fail, by number, with this errno."""
        self.short_writes: set[int] = set()
        """Calls that, if they are writes, take only half of what they are given."""
        self.full_from: int | None = None
        """From this call on the disk is full: a write takes some bytes once, then fails."""
        self.exhausted = False
        """While true, there is no descriptor for a file that is not open yet."""
        self.fails_on: dict[tuple[str, str], int] = {}
        """Kinds of calls that fail where the path holds a text, with this errno."""
        self.free = FREE_BYTES

    def mount(self) -> Filesystem:
        """The disk for one process: of no effect any more once that is gone, whatever it still tries."""
        return cast("Filesystem", _Mount(self, self._life))

    def is_alive(self, life: int) -> bool:
        return life == self._life

    # -- faults ----------------------------------------------------------------------------------------------------

    def crash(self, *, power: bool) -> None:
        """End the process, with or without the machine. The disk can be used again after it."""
        self._life += 1
        self._locks.clear()
        self.dead = False
        self.crash_at = None
        self.crash_in_sync = None
        self.faults.clear()
        self.short_writes.clear()
        self.full_from = None
        self.exhausted = False
        self.fails_on.clear()
        if power:
            self._boots += 1
            self._root.lose_power(self._random)

    def snapshot(self) -> dict[str, bytes]:
        """Every file with its content, as a reader sees it now."""
        found: dict[str, bytes] = {}

        def visit(folder: _Folder, prefix: str) -> None:
            for name, node in sorted(folder.names.items()):
                if isinstance(node, _Folder):
                    visit(node, f"{prefix}{name}/")
                else:
                    found[prefix + name] = bytes(node.data)

        visit(self._root, "/")
        return found

    def restore(self, snapshot: dict[str, bytes]) -> None:
        """Make the disk hold just this, all of it synced."""
        self.crash(power=False)
        self._root = _Folder()
        for name, data in snapshot.items():
            folder = self._root
            *parents, last = name.strip("/").split("/")
            for parent in parents:
                folder = folder.names.setdefault(parent, _Folder())  # type: ignore[assignment]
                assert isinstance(folder, _Folder)
            file = _File(data)
            file.clean_size = len(data)
            folder.names[last] = file
        self._sync_all(self._root)

    def _sync_all(self, folder: _Folder) -> None:
        folder.sync()
        for node in folder.names.values():
            if isinstance(node, _Folder):
                self._sync_all(node)

    def call(self, what: str, path: object, life: int | None = None) -> int:
        """Count a call, and let it fail or be the last if so told. Returns its number."""
        if self.dead or (life is not None and life != self._life):
            raise Crashed
        self.calls += 1
        if self.traces:
            self.log.append(f"{self.calls} {what} {path}")
        if self.calls == self.crash_at and self._random.random() < 0.5:
            self._die()
        code = self.faults.get(self.calls)
        for (kind, text), errno_ in self.fails_on.items():
            if kind == what and text in str(path):
                code = errno_
        if self.exhausted and what in _OPENING:
            code = errno.EMFILE
        if code is not None:
            raise OSError(code, os.strerror(code), str(path))
        return self.calls

    def after(self) -> None:
        """The other half of the crashes: those that come when the call has done its work."""
        if self.calls == self.crash_at:
            self._die()

    def _die(self) -> None:
        self.dead = True
        raise Crashed

    # -- the seam --------------------------------------------------------------------------------------------------

    def create(self, path: Path) -> FileAppender:
        self.call("create", path)
        folder = self._folder(path.parent)
        if path.name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        file = _File()
        folder.change({path.name: file})
        self.after()
        return _FaultyAppender(self, file, path, self._life)

    def extend(self, path: Path) -> FileAppender:
        self.call("extend", path)
        return _FaultyAppender(self, self._file(path), path, self._life)

    def truncate(self, path: Path, size: int) -> None:
        self.call("truncate", path)
        file = self._file(path)
        del file.data[size:]
        self.after()
        self.call("sync", path)
        file.synced = bytes(file.data)
        file.clean_size = len(file.data)
        self.after()

    def sync(self, path: Path) -> None:
        self.call("open", path)
        self.sync_file(self._file(path), path, self._life)

    def sync_file(self, file: _File, path: Path, life: int) -> None:
        if self.crash_in_sync is not None and self.crash_in_sync[0] in path.name:
            name, left = self.crash_in_sync
            self.crash_in_sync = (name, left - 1)
            if not left:
                self._die()
        try:
            self.call("sync", path, life)
        except OSError:
            file.lose_sync(self._random)
            raise
        file.sync()
        self.after()

    def sync_directory(self, path: Path) -> None:
        self.call("sync_directory", path)
        self._folder(path).sync()
        self.after()

    def replace(self, source: Path, target: Path) -> None:
        self.call("replace", target)
        assert source.parent == target.parent
        folder = self._folder(source.parent)
        folder.change({target.name: self._file(source), source.name: None})
        self.after()

    def link(self, source: Path, target: Path) -> None:
        self.call("link", target)
        self._folder(target.parent).change({target.name: self._file(source)})
        self.after()

    def unlink(self, path: Path) -> None:
        self.call("unlink", path)
        self._file(path)
        self._folder(path.parent).change({path.name: None})
        self.after()

    def make_directory(self, path: Path) -> None:
        self.call("make_directory", path)
        folder = self._folder(path.parent)
        if path.name not in folder.names:
            folder.change({path.name: _Folder()})
        self.after()

    make_parent = make_directory

    def restrict(self, path: Path) -> int:
        """Nothing here has permissions; a failure does not stop the start."""
        return 0

    def names(self, path: Path) -> list[str]:
        self.call("names", path)
        return sorted(self._folder(path).names)

    def exists(self, path: Path) -> bool:
        self.call("exists", path)
        return self._find(path) is not None

    def size(self, path: Path) -> int:
        self.call("size", path)
        return len(self._file(path).data)

    def read(self, path: Path) -> bytes:
        self.call("open", path)
        self.call("read", path)
        return bytes(self._file(path).data)

    def map(self, path: Path) -> MappedFile:
        self.call("map", path)
        return _FaultyMapped(bytes(self._file(path).data), lambda: self.call("read", path))

    def free_bytes(self, path: Path) -> int:
        return self.free

    def lock(self, path: Path, note: str) -> Lock:
        self.call("lock", path)
        folder = self._folder(path.parent)
        if path.name not in folder.names:
            folder.change({path.name: _File()})
        file = self._file(path)
        if file in self._locks:
            raise AlreadyLockedError(self._locks[file].strip())
        self._locks[file] = note
        return _FaultyLock(self._locks, file)

    def boot_id(self) -> bytes:
        return self._boots.to_bytes(16, "little")

    # -- inside ----------------------------------------------------------------------------------------------------

    def write(self, file: _File, path: Path, data: Bytes, life: int) -> int:
        number = self.call("write", path, life)
        taken = len(data)
        if number in self.short_writes and taken > 1:
            taken //= 2
        if self.full_from is not None and number >= self.full_from:
            if number > self.full_from or taken < 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            taken = self._random.randint(1, taken - 1)
        if number == self.crash_at:
            file.data += data[: self._random.randint(0, len(data))]
            self._die()
        file.data += data[:taken]
        return taken

    def _find(self, path: Path) -> _File | _Folder | None:
        node: _File | _Folder | None = self._root
        for part in path.parts[1:]:
            node = node.names.get(part) if isinstance(node, _Folder) else None
        return node

    def _file(self, path: Path) -> _File:
        node = self._find(path)
        if not isinstance(node, _File):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node

    def _folder(self, path: Path) -> _Folder:
        node = self._find(path)
        if not isinstance(node, _Folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return node


class _Mount:
    def __init__(self, filesystem: FaultyFilesystem, life: int) -> None:
        self._filesystem = filesystem
        self._life = life

    def __getattr__(self, name: str) -> Any:
        if not self._filesystem.is_alive(self._life):
            raise Crashed
        return getattr(self._filesystem, name)


class _FaultyAppender:
    def __init__(self, filesystem: FaultyFilesystem, file: _File, path: Path, life: int) -> None:
        self._filesystem = filesystem
        self._file = file
        self._path = path
        self._life = life
        self._closed = False

    def write(self, data: Bytes) -> int:
        assert not self._closed
        return self._filesystem.write(self._file, self._path, data, self._life)

    def sync(self) -> None:
        assert not self._closed
        self._filesystem.sync_file(self._file, self._path, self._life)

    def close(self) -> None:
        self._closed = True


class _FaultyMapped:
    def __init__(self, data: bytes, call: Callable[[], int]) -> None:
        self._data = data
        self._call = call
        self.view = memoryview(data)

    def read(self, offset: int, length: int) -> bytes:
        self._call()
        data = self._data[offset : offset + length]
        if len(data) < length:
            raise OSError(errno.EIO, f"the file ends at byte {offset + len(data)}")
        return data

    def will_need(self, offset: int, length: int) -> None:
        """Everything is in memory."""

    def relax(self) -> None:
        """There is nothing that could leave memory."""

    def close(self) -> None:
        self.view = memoryview(b"")


class _FaultyLock:
    def __init__(self, locks: dict[_File, str], file: _File) -> None:
        self._locks = locks
        self._file = file

    def release(self) -> None:
        self._locks.pop(self._file, None)


def _apply(names: dict[str, _File | _Folder], changes: dict[str, _File | _Folder | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node
