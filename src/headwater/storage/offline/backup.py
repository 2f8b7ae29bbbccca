"""Backups: take a consistent copy of a data directory, with or without a running server, and restore it.

A backup is a data directory with one more file: `BACKUP` says when it was taken and lists every file with its size and
SHA-256. So the offline tools work on it as on any data directory, and a restore verifies every byte. The backup of a
cluster is a copy of it as a data directory, made into a backup by `complete_backup`.

A running server must hold its files (see `storage.deferred_unlink`) before and during `take_backup`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from headwater.storage.blobs import BLOBS_NAME, is_finished
from headwater.storage.directory import FORMAT_NAME, LOCK_NAME, write_file
from headwater.storage.filesystem import FILE_MODE, RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.offline.atomic_install import atomic_install
from headwater.storage.offline.families import family_of, tools_of
from headwater.storage.tiering.claimed_prefix import read_mark
from headwater.storage.worker_stores import WORKERS_NAME, store_directories

BACKUP_NAME: Final = "BACKUP"
BACKUP_VERSION: Final = 1

_READ_BYTES: Final = 1024 * 1024


class BackupFile(msgspec.Struct, frozen=True):
    path: str
    size: int
    sha256: str


class Backup(msgspec.Struct, frozen=True):
    """The content of the file `BACKUP`."""

    version: int
    family: str
    taken: str
    files: tuple[BackupFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


_decoder: Final = msgspec.json.Decoder(Backup)


def take_backup(source: Path, target: Path) -> Backup:
    """Copy the store in `source` into `target`, which must be new or empty."""
    family = family_of(source)
    _check_apart(source, target)
    filesystem = RealFilesystem()
    mark = read_mark(filesystem, source)
    if mark is not None:
        raise StorageError(
            f"The packs of {source} are in {mark.url}, so a copy of the directory is not a backup. Stop the server and"
            " copy the whole store with `headwater store copy`, and back that up."
        )
    with atomic_install(target) as unfinished:
        # The first store contains the references to streams of the others, so it must be copied first.
        for store in store_directories(source):
            copy = unfinished / store.relative_to(source)
            _make_directories(filesystem, unfinished, copy)
            _copy_file(store / FORMAT_NAME, copy / FORMAT_NAME)
            tools_of(store).copy(filesystem, store, copy, _copy_file)
            # After the records that refer to them: a blob exists before its record, and is not deleted during a hold.
            _copy_blobs(filesystem, store, copy)
        if (source / WORKERS_NAME).exists():
            _copy_file(source / WORKERS_NAME, unfinished / WORKERS_NAME)
        return complete_backup(unfinished, family, datetime.now(UTC))


def complete_backup(directory: Path, family: str, taken: datetime) -> Backup:
    """Add the list of its files to a complete copy of a store, which has everything of this time."""
    backup = Backup(BACKUP_VERSION, family, taken.isoformat(timespec="milliseconds"), tuple(_listed(directory)))
    data = msgspec.json.format(msgspec.json.encode(backup), indent=1) + b"\n"
    write_file(RealFilesystem(), directory / BACKUP_NAME, data)
    return backup


def read_backup(directory: Path) -> Backup:
    """The list of a backup. Raises `StorageError` if there is none, or this version cannot read it."""
    path = directory / BACKUP_NAME
    try:
        found = _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        what = "is not a backup: it has" if directory.exists() else "does not exist, so there is"
        raise StorageError(f"{directory} {what} no {BACKUP_NAME} file. Name the directory of a backup.") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}. It may be damaged.") from None
    if found.version != BACKUP_VERSION:
        raise StorageError(
            f"{directory} is a backup of version {found.version}; this Headwater reads {BACKUP_VERSION}."
        )
    return found


def restore_backup(source: Path, target: Path, *, replace: bool = False) -> Backup:
    """Restore a backup into `target`. Every file is verified before anything is replaced."""
    backup = read_backup(source)
    _check_apart(source, target)
    filesystem = RealFilesystem()
    with atomic_install(target, replace=replace) as unfinished:
        for file in backup.files:
            path = unfinished / _inside(file.path)
            _make_directories(filesystem, unfinished, path.parent)
            with _listed_file(source, file) as listed:
                digest = _copy_file(listed, path)
                _check_same(listed, file, path.stat().st_size, digest)
    return backup


def check_backup(source: Path) -> Backup:
    """Verify that a backup has every file that it lists, unchanged."""
    backup = read_backup(source)
    for file in backup.files:
        with _listed_file(source, file) as listed:
            _check_same(listed, file, listed.stat().st_size, _digest(listed))
    return backup


@contextmanager
def _listed_file(source: Path, file: BackupFile) -> Iterator[Path]:
    path = source / _inside(file.path)
    try:
        yield path
    except FileNotFoundError:
        raise StorageError(f"{path} is missing from the backup. Use another backup.") from None


def _check_same(path: Path, file: BackupFile, size: int, digest: str) -> None:
    if size != file.size or digest != file.sha256:
        raise StorageError(f"{path} differs from what was backed up: its checksum does not match. Use another backup.")


def _make_directories(filesystem: RealFilesystem, unfinished: Path, path: Path) -> None:
    for parent in (*reversed(path.relative_to(unfinished).parents), path.relative_to(unfinished)):
        filesystem.make_directory(unfinished / parent)


def _check_apart(source: Path, target: Path) -> None:
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise StorageError(f"{target} and {source} contain each other; give a separate directory.")


def _inside(text: str) -> Path:
    path = Path(text)
    if path.is_absolute() or ".." in path.parts:
        raise StorageError(f"The backup lists {text!r}, which is outside the backup. Use another backup.")
    return path


def _copy_blobs(filesystem: RealFilesystem, source: Path, unfinished: Path) -> None:
    if not (source / BLOBS_NAME).exists():
        return
    filesystem.make_directory(unfinished / BLOBS_NAME)
    for name in filesystem.names(source / BLOBS_NAME):
        if is_finished(name):
            _copy_file(source / BLOBS_NAME / name, unfinished / BLOBS_NAME / name)


def _listed(unfinished: Path) -> Iterator[BackupFile]:
    for path in sorted(unfinished.rglob("*")):
        # LMDB re-creates its lock file.
        if path.is_file() and path.name not in {LOCK_NAME, "lock.mdb"}:
            yield BackupFile(str(path.relative_to(unfinished)), path.stat().st_size, _digest(path))


def _copy_file(source: Path, target: Path) -> str:
    """Copy a file up to its current size and sync the copy, but not its directory; return the digest of the copy."""
    digest = hashlib.sha256()
    target.touch(FILE_MODE, exist_ok=False)
    with source.open("rb") as reader, target.open("wb") as writer:
        left = reader.seek(0, 2)
        reader.seek(0)
        while left:
            data = reader.read(min(left, _READ_BYTES))
            if not data:
                break
            digest.update(data)
            writer.write(data)
            left -= len(data)
        writer.flush()
        RealFilesystem().sync(target)
    return digest.hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
