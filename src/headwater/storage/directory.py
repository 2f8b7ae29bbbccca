"""A data directory: open in one process at a time, with a version, for one family of storage modes.

Two files protect it. `LOCK` is held as long as the directory is open. `FORMAT` says what the rest is, and is durable
before anything else is written, so a directory without it has no Headwater data.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol, TypeVar

import msgspec

from headwater.storage.filesystem import AlreadyLockedError, Filesystem, Lock, write_whole
from headwater.storage.interface import StorageError

log = logging.getLogger("headwater.storage")

FORMAT_VERSION: Final = 1
SHARDS_DEFAULT: Final = 16
"""The shards of a new directory."""

LOCK_NAME: Final = "LOCK"
FORMAT_NAME: Final = "FORMAT"
NEW_SUFFIX: Final = ".new"
"""Suffix of a file that is being written and then renamed."""
FAMILY_OF_MODE: Final[Mapping[str, str]] = {"file-fast": "log", "file-durable": "log", "acid": "acid"}
_MODES_OF_FAMILY: Final = {"log": "file-fast or file-durable", "acid": "acid"}
FOREIGN_NAMES: Final = frozenset({"lost+found"})
"""Entries that a new file system may have."""


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


Record = TypeVar("Record", bound=Versioned)


class Format(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """The content of the file `FORMAT`."""

    version: int
    family: str
    created: str
    shards: int = 1
    """The number of shards into which its streams can be divided between workers. Older directories have one."""


_STACK_SHARD: Final = re.compile(r"shard-\d+")
_formats: Final = msgspec.json.Decoder(Format)


class Directory:
    """An open data directory. It stays locked until `close`."""

    __slots__ = ("_locks", "format", "journal", "path")

    def __init__(self, path: Path, format_: Format, lock: Lock) -> None:
        self.path: Final = path
        self.format: Final = format_
        self.journal: Path | None = None
        """The directory of the journal, if it is outside."""
        self._locks = [lock]

    def hold(self, lock: Lock) -> None:
        """Keep another lock as long as the directory is open."""
        self._locks.append(lock)

    def close(self) -> None:
        while self._locks:
            self._locks.pop().release()


def open_directory(filesystem: Filesystem, path: Path, family: str, *, create: bool = True) -> Directory:
    """Lock a data directory of this family; create it if it is missing or empty and `create` is set.

    Raises `StorageError` with the reason: in use by another process, another version, another mode, not a data
    directory.
    """
    assert family in _MODES_OF_FAMILY
    lock = lock_directory(filesystem, path, create=create)
    try:
        found = _format_of(filesystem, path, family, create)
        if create:
            restrict_access(filesystem, path)
        return Directory(path, found, lock)
    except OSError as error:
        lock.release()
        raise StorageError(f"Data directory {path} cannot be opened: {error}") from error
    except BaseException:
        lock.release()
        raise


def lock_directory(filesystem: Filesystem, path: Path, *, create: bool = True, what: str = "Data directory") -> Lock:
    """Lock a directory with any content for this process; create it if it is missing and `create` is set."""
    try:
        if not filesystem.exists(path):
            if not create:
                raise StorageError(f"There is no {what.lower()} {path}; check the path.")
            make_directories(filesystem, path)
        lock = filesystem.lock(path / LOCK_NAME, f"{os.getpid()}\n")
    except AlreadyLockedError as locked:
        by = f"process {locked.holder}" if locked.holder else "another process"
        raise StorageError(
            f"{what} {path} is in use by {by}. Stop it first, or give this one its own data_dir."
        ) from None
    except OSError as error:
        raise StorageError(f"{what} {path} cannot be opened: {error}") from error
    return lock


def restrict_access(filesystem: Filesystem, path: Path) -> None:
    """Restrict everything in a directory to this user. Only for a data directory that was checked to be one."""
    try:
        changed = filesystem.restrict(path)
    except OSError as error:
        # Often a mounted volume that belongs to another user. Files that are created in it are still private.
        log.warning("access to data directory %s cannot be restricted to this user: %s", path, error)
        return
    if changed:
        log.warning("access to %s is now restricted to this user (files and directories changed: %d)", path, changed)


def read_format(filesystem: Filesystem, path: Path) -> Format:
    """The `FORMAT` of a data directory of any family. Raises `StorageError` if it is not a data directory."""
    try:
        if not filesystem.exists(path):
            raise StorageError(
                f"There is no data directory {path}. Name it with --data-dir or storage.data_dir, or with a profile."
            )
        if FORMAT_NAME not in filesystem.names(path):
            raise StorageError(
                f"Directory {path} is not a Headwater data directory: it has no {FORMAT_NAME} file. Name another"
                " directory."
            )
        return _read_format(filesystem, path)
    except OSError as error:
        raise StorageError(f"Data directory {path} cannot be opened: {error}") from error


def _format_of(filesystem: Filesystem, path: Path, family: str, create: bool) -> Format:
    names = set(filesystem.names(path))
    if FORMAT_NAME not in names:
        unknown_names = sorted(
            name for name in names - {LOCK_NAME, FORMAT_NAME + NEW_SUFFIX} - FOREIGN_NAMES if not name.startswith(".")
        )
        if unknown_names:
            raise StorageError(
                f"Directory {path} is not a Headwater data directory (it has no {FORMAT_NAME} file) and is not empty:"
                f" it contains {', '.join(unknown_names[:3])}{', …' if len(unknown_names) > 3 else ''}."
                f" {new_directory_advice(names)}"
            )
        if not create:
            raise StorageError(
                f"Directory {path} is not a Headwater data directory: it has no {FORMAT_NAME} file. Name another"
                " directory."
            )
        return _write_format(filesystem, path, family)
    found = _read_format(filesystem, path)
    if found.family != family:
        modes = _MODES_OF_FAMILY.get(found.family, repr(found.family))
        raise StorageError(
            f"Data directory {path} was written by storage mode {modes}, not {_MODES_OF_FAMILY[family]}."
            " Set storage.mode to match, give another data_dir, or convert it with `headwater store copy`."
        )
    # The process that wrote the file may have been killed before it could sync its name.
    filesystem.sync_directory(path)
    return found


def new_directory_advice(names: Iterable[str]) -> str:
    """What to do about a directory that has these names, and is not a data directory."""
    if any(_STACK_SHARD.fullmatch(name) for name in names):
        return (
            "Its shard directories belong to a stack of an earlier release: join them with"
            " `headwater store join-shards`, and give the result as data_dir."
        )
    return "Give an empty or a new directory as data_dir."


def _read_format(filesystem: Filesystem, path: Path) -> Format:
    try:
        found = _formats.decode(filesystem.read(path / FORMAT_NAME))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(f"{path / FORMAT_NAME} cannot be read: {error}. It may be damaged.") from None
    if found.version != FORMAT_VERSION:
        raise StorageError(
            f"Data directory {path} has format version {found.version}; this Headwater reads version"
            f" {FORMAT_VERSION} only. Open it with the Headwater that wrote it."
        )
    return found


def _write_format(filesystem: Filesystem, path: Path, family: str) -> Format:
    format_ = Format(FORMAT_VERSION, family, datetime.now(UTC).isoformat(timespec="seconds"), SHARDS_DEFAULT)
    _replace_format(filesystem, path, format_)
    with suppress(PermissionError):
        # The process that created the directory may not have synced it; a parent that cannot be read was created by
        # others.
        filesystem.sync_directory(path.absolute().parent)
    return format_


def set_shards(filesystem: Filesystem, path: Path, shards: int) -> None:
    """Record the number of shards of a store that is being built."""
    found = _read_format(filesystem, path)
    _replace_format(filesystem, path, msgspec.structs.replace(found, shards=shards))


def _replace_format(filesystem: Filesystem, path: Path, format_: Format) -> None:
    replace_file(filesystem, path / FORMAT_NAME, msgspec.json.encode(format_) + b"\n")


def write_file(filesystem: Filesystem, path: Path, data: bytes) -> None:
    """Create a file with this content and sync it. Its name is durable once its directory is synced."""
    appender = filesystem.create(path)
    try:
        write_whole(appender, data)
        appender.sync()
    finally:
        appender.close()


def read_record(
    filesystem: Filesystem, path: Path, decoder: msgspec.json.Decoder[Record], version: int
) -> Record | None:
    """Read a small JSON file with a version; None if there is no such file."""
    return decode_record(str(path), filesystem.read(path), decoder, version) if filesystem.exists(path) else None


def decode_record(where: str, data: bytes, decoder: msgspec.json.Decoder[Record], version: int) -> Record:
    """Decode a small JSON document with a version. Raises `StorageError`."""
    try:
        found = decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{where} cannot be read: {error}. It may be damaged.") from None
    if found.version != version:
        raise StorageError(f"{where} has version {found.version}; this Headwater reads version {version} only.")
    return found


def replace_file(filesystem: Filesystem, path: Path, data: bytes) -> None:
    """Replace the content of a file atomically; it is durable when this returns."""
    fresh = path.with_name(path.name + NEW_SUFFIX)
    if filesystem.exists(fresh):
        # Left by a process that was killed.
        filesystem.unlink(fresh)
    write_file(filesystem, fresh, data)
    filesystem.replace(fresh, path)
    filesystem.sync_directory(path.parent)


def make_directories(filesystem: Filesystem, path: Path) -> None:
    """Create the directory and its missing parents, each durable before the next."""
    missing = [path.absolute()]
    while not filesystem.exists(missing[-1].parent):
        missing.append(missing[-1].parent)
    for parent in reversed(missing[1:]):
        filesystem.make_parent(parent)
        filesystem.sync_directory(parent.parent)
    filesystem.make_directory(path)
    filesystem.sync_directory(path.absolute().parent)
