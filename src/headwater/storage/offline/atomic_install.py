"""Install a store in a directory atomically: an interrupted installation is never mistaken for a store.

It is built in a hidden directory within the target, so that the target may be a mount point. At the end its parts are
moved up, `FORMAT` last: every start refuses a directory without that file, so an installation that was interrupted at
any point is never served as if it were complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headwater.storage import control_socket
from headwater.storage.directory import (
    FOREIGN_NAMES,
    FORMAT_NAME,
    LOCK_NAME,
    NEW_SUFFIX,
    lock_directory,
    new_directory_advice,
    restrict_access,
)
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal_location import RECORD_NAME, moved_journals, remove_journals
from headwater.storage.worker_stores import GENERATION_PREFIX, WORKERS_NAME

UNFINISHED: Final = ".unfinished"


_MARKERS: Final = frozenset({FORMAT_NAME, WORKERS_NAME})
"""The files that make a directory a store, or several stores of workers. A directory has one of them."""


class StoreExistsError(StorageError):
    """The target has a store, and replacing it was not requested."""


_STORE_NAMES: Final = frozenset(
    {
        FORMAT_NAME,
        LOCK_NAME,
        UNFINISHED,
        control_socket.NAME,
        "BACKUP",
        "COLD",
        "COLD" + NEW_SUFFIX,
        FORMAT_NAME + NEW_SUFFIX,
        RECORD_NAME,
        RECORD_NAME + NEW_SUFFIX,
        "MANIFEST",
        "MANIFEST.new",
        "acid",
        "acid.new",
        "blobs",
        "cache",
        "log",
        "packs",
        WORKERS_NAME,
        WORKERS_NAME + NEW_SUFFIX,
    }
)
"""The names of the files of a data directory, which are removed when it is replaced. No other files are removed."""


PLAIN_STORE_NAMES: Final = _STORE_NAMES - {LOCK_NAME, control_socket.NAME, WORKERS_NAME, "BACKUP"}
"""The names of the files of an undivided store, without those that every data directory has."""


def check_is_new(root: Path) -> None:
    """Refuse a directory with files that a data directory does not have before its first start."""
    unknown_names = sorted(
        entry.name
        for entry in root.iterdir()
        if entry.name not in {LOCK_NAME, WORKERS_NAME + NEW_SUFFIX} | FOREIGN_NAMES and not entry.name.startswith(".")
    )
    if unknown_names:
        raise StorageError(
            f"Directory {root} is not a Headwater data directory and is not empty: it contains"
            f" {', '.join(unknown_names[:3])}{', …' if len(unknown_names) > 3 else ''}."
            f" {new_directory_advice(unknown_names)}"
        )


@contextmanager
def atomic_install(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a directory in which to build a store, then install it in `target`; `replace` allows to replace a store.

    Raises `StorageError` if the target is in use or contains files that must not be removed.
    """
    filesystem = RealFilesystem()
    existed = target.exists()
    lock = lock_directory(filesystem, target)
    unfinished = target / UNFINISHED
    try:
        _check_target(target, replace=replace)
        restrict_access(filesystem, target)
        if unfinished.exists():
            shutil.rmtree(unfinished)
        filesystem.make_directory(unfinished)
        try:
            yield unfinished
            _move_in(filesystem, unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{target} cannot be filled: {error}") from error
    finally:
        lock.release()
        if not existed and not any((target / marker).exists() for marker in _MARKERS):
            with suppress(OSError):
                (target / LOCK_NAME).unlink()
                target.rmdir()


def _check_target(target: Path, *, replace: bool) -> None:
    names = {entry.name for entry in target.iterdir()}
    present = sorted(names - {LOCK_NAME, UNFINISHED} - FOREIGN_NAMES)
    if not present:
        return
    unknown_names = sorted(
        name for name in names - _STORE_NAMES - FOREIGN_NAMES if not name.startswith(GENERATION_PREFIX)
    )
    is_store = not _MARKERS.isdisjoint(names)
    if not unknown_names and not is_store and UNFINISHED in names:
        # An interrupted installation: its files were never a store, or were to be replaced.
        return
    if unknown_names or not is_store:
        listed = ", ".join((unknown_names or present)[:3])
        raise StorageError(
            f"{target} is not empty and not a Headwater data directory: it contains {listed}. Choose an empty"
            " directory."
        )
    if not replace:
        raise StoreExistsError(f"{target} already has a store. Choose another directory.")


def _move_in(filesystem: RealFilesystem, unfinished: Path, target: Path) -> None:
    for directory in (unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())):
        filesystem.sync_directory(directory)
    journals = moved_journals((target, *target.glob(f"{GENERATION_PREFIX}*/*")))
    if any((target / marker).exists() for marker in _MARKERS):
        for marker in _MARKERS:
            (target / marker).unlink(missing_ok=True)
        filesystem.sync_directory(target)
    for name in sorted(_STORE_NAMES - {LOCK_NAME, UNFINISHED}):
        _remove(target / name)
    for path in target.glob(f"{GENERATION_PREFIX}*"):
        _remove(path)
    remove_journals(journals)
    for path in sorted(unfinished.iterdir()):
        if path.name not in {*_MARKERS, LOCK_NAME}:
            filesystem.replace(path, target / path.name)
    filesystem.sync_directory(target)
    for marker in _MARKERS:
        if (unfinished / marker).exists():
            filesystem.replace(unfinished / marker, target / marker)
    filesystem.sync_directory(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
