"""Install a whole store in a directory atomically: all of it appears, or nothing that could be taken for a store.

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
from headwater.storage.directory import FOREIGN_NAMES, FORMAT_NAME, LOCK_NAME, lock_directory
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal_place import NEW_RECORD_NAME, RECORD_NAME, moved_journals, remove_journals
from headwater.storage.worker_stores import GENERATION_PREFIX, WORKERS_NAME

UNFINISHED: Final = ".unfinished"


_MARKERS: Final = frozenset({FORMAT_NAME, WORKERS_NAME})
"""The files that make a directory a store, or several stores of workers. A directory has one of them."""


class StoreExistsError(StorageError):
    """The target has a store, and replacing it was not requested."""


_OURS: Final = frozenset(
    {
        FORMAT_NAME,
        LOCK_NAME,
        UNFINISHED,
        control_socket.NAME,
        "BACKUP",
        "COLD",
        "COLD.new",
        "FORMAT.new",
        RECORD_NAME,
        NEW_RECORD_NAME,
        "MANIFEST",
        "MANIFEST.new",
        "acid",
        "acid.new",
        "blobs",
        "cache",
        "log",
        "packs",
        WORKERS_NAME,
        "WORKERS.new",
    }
)
"""The names that a data directory can have, which are removed when it is replaced. No other files are."""


PLAIN_STORE_NAMES: Final = _OURS - {LOCK_NAME, control_socket.NAME, WORKERS_NAME, "BACKUP"}
"""The names that an undivided store can have, without those of every data directory."""


def check_is_new(root: Path) -> None:
    """Refuse a directory with files that a data directory does not have before its first start."""
    strangers = sorted(
        entry.name
        for entry in root.iterdir()
        if entry.name not in {LOCK_NAME, "WORKERS.new"} | FOREIGN_NAMES and not entry.name.startswith(".")
    )
    if strangers:
        raise StorageError(
            f"Directory {root} is not a Headwater data directory and is not empty: it has"
            f" {', '.join(strangers[:3])}{', …' if len(strangers) > 3 else ''}."
            " Give an empty or a new directory as data_dir."
        )


@contextmanager
def atomic_install(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Where to build the store that is installed in `target`. With `replace` it replaces an existing store.

    Raises `StorageError` when the target is in use or has something that must not be removed.
    """
    filesystem = RealFilesystem()
    was_there = target.exists()
    lock = lock_directory(filesystem, target)
    place = target / UNFINISHED
    try:
        _check_room_for(target, replace=replace)
        if place.exists():
            shutil.rmtree(place)
        filesystem.make_directory(place)
        try:
            yield place
            _move_in(filesystem, place, target)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{target} cannot be filled: {error}") from error
    finally:
        lock.release()
        if not was_there and not any((target / marker).exists() for marker in _MARKERS):
            with suppress(OSError):
                (target / LOCK_NAME).unlink()
                target.rmdir()


def _check_room_for(target: Path, *, replace: bool) -> None:
    names = {entry.name for entry in target.iterdir()}
    present = sorted(names - {LOCK_NAME, UNFINISHED} - FOREIGN_NAMES)
    if not present:
        return
    strangers = sorted(name for name in names - _OURS - FOREIGN_NAMES if not name.startswith(GENERATION_PREFIX))
    is_store = not _MARKERS.isdisjoint(names)
    if not strangers and not is_store and UNFINISHED in names:
        # An installation that was interrupted: what is there was never a store, or was to be replaced.
        return
    if strangers or not is_store:
        listed = ", ".join((strangers or present)[:3])
        raise StorageError(f"{target} is not empty and not a Headwater data directory: it has {listed}.")
    if not replace:
        raise StoreExistsError(f"{target} already has a store.")


def _move_in(filesystem: RealFilesystem, place: Path, target: Path) -> None:
    for directory in (place, *(path for path in place.rglob("*") if path.is_dir())):
        filesystem.sync_directory(directory)
    journals = moved_journals((target, *target.glob(f"{GENERATION_PREFIX}*/*")))
    if any((target / marker).exists() for marker in _MARKERS):
        for marker in _MARKERS:
            (target / marker).unlink(missing_ok=True)
        filesystem.sync_directory(target)
    for name in sorted(_OURS - {LOCK_NAME, UNFINISHED}):
        _remove(target / name)
    for path in target.glob(f"{GENERATION_PREFIX}*"):
        _remove(path)
    remove_journals(journals)
    for path in sorted(place.iterdir()):
        if path.name not in {*_MARKERS, LOCK_NAME}:
            filesystem.replace(path, target / path.name)
    filesystem.sync_directory(target)
    for marker in _MARKERS:
        if (place / marker).exists():
            filesystem.replace(place / marker, target / marker)
    filesystem.sync_directory(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
