"""An in-memory file system that can lose unsynced data, fail calls and crash at a call that the test selects.

It tracks written and synced data separately. A power loss keeps synced data; of the rest, each 512-byte block may be
kept, dropped, zeroed or garbled, and each create, rename or removal whose directory was not synced may or may not have
happened. The death of a process alone loses nothing, but syncs nothing either.

A sync that fails has lost its pages: as on Linux, a second sync then succeeds without writing them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

from headwater.storage.filesystem import (
    PARTS_MAX,
    AlreadyLockedError,
    Bytes,
    FileAppender,
    Filesystem,
    Lock,
    MappedFile,
)

BLOCK_BYTES = 512
FREE_BYTES = 2**40

_OPENING = frozenset({"create", "extend", "overwrite", "truncate", "sync_directory", "names", "open", "map", "lock"})
"""Calls that need a new descriptor."""


class Crashed(BaseException):
    """The process ends at this point: no later call has any effect."""


class _File:
    """`data` is what a reader sees now; `synced` is what a power loss always keeps."""

    __slots__ = ("data", "dirty", "synced")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.synced = bytes(data)
        self.dirty: list[tuple[int, int]] = []
        """Ranges written since the last sync. The kernel considers the rest written, even after a failed sync."""

    def write(self, at: int, data: Bytes) -> None:
        self.data[at : at + len(data)] = data
        if self.dirty and self.dirty[-1][1] == at:
            self.dirty[-1] = (self.dirty[-1][0], at + len(data))
        elif data:
            self.dirty.append((at, at + len(data)))

    def cut(self, size: int) -> None:
        """Truncate and sync the file."""
        del self.data[size:]
        self.synced = bytes(self.data)
        self.dirty.clear()

    def sync(self) -> None:
        self.synced = self._with(lambda low, high: bytes(self.data[low:high]))
        self.dirty.clear()

    def lose_sync(self, random: Random) -> None:
        """Fail a sync: some pages are written and others are not, and all count as written from now on."""
        self.synced = self.left_by_power_loss(random).ljust(len(self.data), b"\0")
        self.dirty.clear()

    def left_by_power_loss(self, random: Random) -> bytes:
        """The content after a power loss: each dirty block may be new, old, zeros or garbage.

        Clean bytes of a block stay, because a disk that rewrites the block writes the same bytes there.
        """
        if len(self.data) < len(self.synced):
            return random.choice((self.synced, bytes(self.data)))

        def fate(low: int, high: int) -> bytes:
            chance = random.random()
            if chance < 0.6:
                return bytes(self.data[low:high])
            if chance < 0.7 and high <= len(self.synced):
                return self.synced[low:high]
            return bytes(high - low) if chance < 0.8 else random.randbytes(high - low)

        left = self._with(fate)
        size = random.randint(len(self.synced), len(left)) if random.random() < 0.5 else len(left)
        if random.random() < 0.3:
            size = max(len(self.synced), size // BLOCK_BYTES * BLOCK_BYTES)
        return left[:size]

    def _with(self, content: Callable[[int, int], bytes]) -> bytes:
        """Return the synced content with each dirty part of a block replaced."""
        left = bytearray(self.synced)
        for start, end in self.dirty:
            left += bytes(max(0, start - len(left)))
            low = start
            while low < end:
                high = min(end, (low // BLOCK_BYTES + 1) * BLOCK_BYTES)
                left[low:high] = content(low, high)
                low = high
        return bytes(left)


class _Folder:
    """`names` is what a reader sees now; `durable` and some of the `pending` changes are what a power loss leaves."""

    __slots__ = ("durable", "names", "pending")

    def __init__(self) -> None:
        self.names: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}
        self.pending: list[dict[str, _File | _Folder | None]] = []

    def change(self, changes: dict[str, _File | _Folder | None]) -> None:
        """Set names (or remove them, with None) atomically."""
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
                node.__init__(node.left_by_power_loss(random))  # type: ignore[misc]


class FaultyFilesystem:
    """The disk of one machine, which survives the processes that use it; see `crash`."""

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
        """The process dies in this call, before its effect or in the middle of it."""
        self.crash_in_sync: tuple[str, int] | None = None
        """The process dies at the nth sync of a file whose name contains a text: written, but not synced."""
        self.faults: dict[int, int] = {}
        """Call numbers that fail, with their errno."""
        self.short_writes: set[int] = set()
        """Call numbers at which a write accepts only half of its bytes."""
        self.full_from: int | None = None
        """From this call on the disk is full: one write accepts some bytes, later ones fail."""
        self.exhausted = False
        """While true, no further file can be opened."""
        self.fails_on: dict[tuple[str, str], int] = {}
        """Kinds of calls that fail with an errno if the path contains a text."""
        self.free = FREE_BYTES

    def mount(self) -> Filesystem:
        """Return the disk for one process; its calls have no effect after the process has ended."""
        return cast("Filesystem", _Mount(self, self._life))

    def is_alive(self, life: int) -> bool:
        return life == self._life

    # -- faults ----------------------------------------------------------------------------------------------------

    def crash(self, *, power: bool) -> None:
        """End the process, with or without a power loss. The disk can be used again afterwards."""
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
        """Return every file with the content that a reader sees now."""
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
        """Replace the content of the disk, all of it synced."""
        self.crash(power=False)
        self._root = _Folder()
        for name, data in snapshot.items():
            folder = self._root
            *parents, last = name.strip("/").split("/")
            for parent in parents:
                folder = folder.names.setdefault(parent, _Folder())  # type: ignore[assignment]
                assert isinstance(folder, _Folder)
            folder.names[last] = _File(data)
        self._sync_all(self._root)

    def _sync_all(self, folder: _Folder) -> None:
        folder.sync()
        for node in folder.names.values():
            if isinstance(node, _Folder):
                self._sync_all(node)

    def call(self, what: str, path: object, life: int | None = None) -> int:
        """Count a call, and make it fail or crash if that was requested. Return its number."""
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
        """Crash after the effect of a call, which is the other half of the crashes."""
        if self.calls == self.crash_at:
            self._die()

    def _die(self) -> None:
        self.dead = True
        raise Crashed

    # -- the interface -------------------------------------------------------------------------------------------------

    def create(self, path: Path) -> FileAppender:
        self.call("create", path)
        folder = self._folder(path.parent)
        if path.name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        file = _File()
        folder.change({path.name: file})
        self.after()
        return _FaultyAppender(self, file, path, self._life, at=0)

    def extend(self, path: Path) -> FileAppender:
        self.call("extend", path)
        file = self._file(path)
        return _FaultyAppender(self, file, path, self._life, at=len(file.data))

    def overwrite(self, path: Path) -> FileAppender:
        self.call("overwrite", path)
        return _FaultyAppender(self, self._file(path), path, self._life, at=0)

    def recycle(self, path: Path, target: Path) -> bool:
        self.replace(path, target)
        return True

    def truncate(self, path: Path, size: int) -> None:
        self.call("truncate", path)
        file = self._file(path)
        del file.data[size:]
        self.after()
        self.call("sync", path)
        file.cut(size)
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
        """Do nothing: there are no permissions here."""
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

    # -- implementation ------------------------------------------------------------------------------------------------

    def write(self, file: _File, path: Path, at: int, data: Bytes, life: int) -> int:
        number = self.call("write", path, life)
        taken = len(data)
        if number in self.short_writes and taken > 1:
            taken //= 2
        if self.full_from is not None and number >= self.full_from:
            if number > self.full_from or taken < 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            taken = self._random.randint(1, taken - 1)
        if number == self.crash_at:
            file.write(at, data[: self._random.randint(0, len(data))])
            self._die()
        file.write(at, data[:taken])
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
    def __init__(self, filesystem: FaultyFilesystem, file: _File, path: Path, life: int, *, at: int) -> None:
        self._filesystem = filesystem
        self._file = file
        self._path = path
        self._life = life
        self._at = at
        self._closed = False

    def write(self, data: Bytes) -> int:
        assert not self._closed
        taken = self._filesystem.write(self._file, self._path, self._at, data, self._life)
        self._at += taken
        return taken

    def write_parts(self, parts: Sequence[Bytes]) -> int:
        assert len(parts) <= PARTS_MAX
        return self.write(b"".join(parts))

    def allocate(self, offset: int, length: int) -> None:
        """Do nothing: neither the content nor the size changes."""
        assert not self._closed

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
        """Do nothing: everything is in memory."""

    def relax(self) -> None:
        """Do nothing: nothing can be evicted."""

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
