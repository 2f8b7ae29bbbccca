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

UNFINISHED: Final = ".unfinished"


class StoreExistsError(StorageError):
    """The target has a store, and it was not said that it may be replaced."""


_OURS: Final = frozenset(
    {
        FORMAT_NAME,
        LOCK_NAME,
        UNFINISHED,
        control_socket.NAME,
        "BACKUP",
        "FORMAT.new",
        "MANIFEST",
        "MANIFEST.new",
        "acid",
        "acid.new",
        "blobs",
        "log",
        "packs",
    }
)
"""The names that a data directory can have, which are removed when it is replaced. Anything else is not ours."""


@contextmanager
def atomic_install(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Where to build the store that is installed in `target`. With `replace` it replaces the one that is there.

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
        if not was_there and not (target / FORMAT_NAME).exists():
            with suppress(OSError):
                (target / LOCK_NAME).unlink()
                target.rmdir()


def _check_room_for(target: Path, *, replace: bool) -> None:
    names = {entry.name for entry in target.iterdir()}
    present = sorted(names - {LOCK_NAME, UNFINISHED} - FOREIGN_NAMES)
    if not present:
        return
    strangers = sorted(names - _OURS - FOREIGN_NAMES)
    if not strangers and FORMAT_NAME not in names and UNFINISHED in names:
        # An installation that was interrupted: what is there was never a store, or was to be replaced.
        return
    if strangers or FORMAT_NAME not in names:
        listed = ", ".join((strangers or present)[:3])
        raise StorageError(f"{target} is not empty and not a Headwater data directory: it has {listed}.")
    if not replace:
        raise StoreExistsError(f"{target} already has a store.")


def _move_in(filesystem: RealFilesystem, place: Path, target: Path) -> None:
    for directory in (place, *(path for path in place.rglob("*") if path.is_dir())):
        filesystem.sync_directory(directory)
    if (target / FORMAT_NAME).exists():
        (target / FORMAT_NAME).unlink()
        filesystem.sync_directory(target)
    for name in sorted(_OURS - {LOCK_NAME, UNFINISHED}):
        _remove(target / name)
    for path in sorted(place.iterdir()):
        if path.name not in {FORMAT_NAME, LOCK_NAME}:
            filesystem.replace(path, target / path.name)
    filesystem.sync_directory(target)
    filesystem.replace(place / FORMAT_NAME, target / FORMAT_NAME)
    filesystem.sync_directory(target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
