"""The location of a store's journal: in its directory, or in a separate directory, usually on another disk.

The file `JOURNAL` of a data directory contains the id of the journal and the directory that it was moved to. In that
directory it is `journal-{id}`, whose own `JOURNAL` repeats the id. Without the file, the journal is in `log` within the
data directory, as in every copy and backup.

Invariant: `JOURNAL` changes only when there is a complete and synced copy of the journal at the new location. So
exactly one journal is valid at any time, and files that are left elsewhere were copied before.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from headwater.storage.directory import (
    LOCK_NAME,
    Directory,
    lock_directory,
    make_directories,
    read_record,
    replace_file,
)
from headwater.storage.filesystem import Filesystem, Lock, RealFilesystem, write_whole
from headwater.storage.interface import StorageError
from headwater.storage.journal.segments import JOURNAL_NAME, segment_numbers, segment_path

log = logging.getLogger("headwater.storage")

RECORD_NAME: Final = "JOURNAL"
_VERSION: Final = 1
_COPY_BYTES: Final = 1024 * 1024


class JournalRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of the file `JOURNAL`, in the data directory and beside the journal itself."""

    version: int
    id: str
    directory: str | None = None
    """The directory that `journal-{id}` is in; None: the journal is within the data directory."""
    previous: str | None = None
    """The previous value of `directory`: files that are left there can be removed."""


_decoder: Final = msgspec.json.Decoder(JournalRecord)


def journal_directory(filesystem: Filesystem, store: Path) -> Path:
    """The directory of a store's journal. Raises `StorageError` if it was moved and is missing."""
    try:
        return _journal_directory(filesystem, store)
    except OSError as error:
        raise StorageError(f"The journal of {store} cannot be found: {error}") from error


def _journal_directory(filesystem: Filesystem, store: Path) -> Path:
    record = _read_record(filesystem, store)
    if record is None or record.directory is None:
        return store / JOURNAL_NAME
    place = _place(record.directory, record.id)
    if not filesystem.exists(place):
        raise StorageError(
            f"The journal of {store} is missing: {place} does not exist. Without it acknowledged data would be lost."
            " Mount its disk; if that is now mounted elsewhere, set storage.journal_dir to where."
        )
    found = _read_record(filesystem, place)
    if found is None or found.id != record.id:
        raise StorageError(
            f"{place} is not the journal of {store}: its id is {found.id if found is not None else 'missing'}, not"
            f" {record.id}."
        )
    return place


def lock_journal(filesystem: Filesystem, opened: Directory) -> None:
    """Lock a journal outside the data directory as well, because a copy of the data directory refers to it too."""
    place = journal_directory(filesystem, opened.path)
    if place != opened.path / JOURNAL_NAME:
        opened.hold(lock_directory(filesystem, place, create=False, what="Journal directory"))
        opened.journal = place


def place_journal(filesystem: Filesystem, opened: Directory, configured: Path | None) -> None:
    """Move the journal of a store to the configured directory, unless it is there; then lock it."""
    store = opened.path
    try:
        record = _read_record(filesystem, store)
        if configured is not None or record is not None:
            record = record if record is not None else JournalRecord(_VERSION, secrets.token_hex(8))
            if configured is not None and (configured == store or store in configured.parents):
                raise StorageError(
                    f"storage.journal_dir ({configured}) cannot be within the data directory {store}; set a"
                    " directory outside it."
                )
            target = str(configured) if configured is not None else None
            if target != record.directory:
                _move(filesystem, store, record, target)
            elif record.previous is not None or (target and filesystem.exists(store / JOURNAL_NAME)):
                _forget_previous(filesystem, store, record)
        lock_journal(filesystem, opened)
        if opened.journal is not None:
            filesystem.restrict(opened.journal)
    except OSError as error:
        raise StorageError(f"The journal of {store} cannot be opened: {error}") from error


def moved_journals(stores: Iterable[Path]) -> list[Path]:
    """The journals of these stores that are outside their directories."""
    filesystem = RealFilesystem()
    records = (_read_record(filesystem, store) for store in stores)
    return [_place(record.directory, record.id) for record in records if record is not None and record.directory]


def remove_journals(places: Iterable[Path]) -> None:
    """Remove the journals of stores that were removed."""
    for place in places:
        try:
            if place.exists():
                shutil.rmtree(place)
        except OSError as error:
            log.warning("%s is no longer needed and cannot be removed: %s", place, error)


def _place(directory: str, journal_id: str) -> Path:
    return Path(directory) / f"journal-{journal_id}"


def _read_record(filesystem: Filesystem, directory: Path) -> JournalRecord | None:
    return read_record(filesystem, directory / RECORD_NAME, _decoder, _VERSION)


def _write_record(filesystem: Filesystem, directory: Path, record: JournalRecord) -> None:
    replace_file(filesystem, directory / RECORD_NAME, msgspec.json.encode(record) + b"\n")


def _move(filesystem: Filesystem, store: Path, record: JournalRecord, target: str | None) -> None:
    if (
        target is not None
        and record.directory is not None
        and not filesystem.exists(_place(record.directory, record.id))
    ):
        place = _place(target, record.id)
        found = _read_record(filesystem, place) if filesystem.exists(place) else None
        if found is not None and found.id == record.id:
            # Its disk is now mounted elsewhere.
            _write_record(filesystem, store, msgspec.structs.replace(record, directory=target, previous=None))
            return
    source = journal_directory(filesystem, store)
    # The id is durable before it is used, so an unfinished copy is found, and is not mistaken for the journal.
    _write_record(filesystem, store, record)
    place = store / JOURNAL_NAME if target is None else _place(target, record.id)
    locks = [lock_directory(filesystem, source, create=False)] if record.directory is not None else []
    try:
        if target is not None:
            make_directories(filesystem, place)
            # The same directory under another name would already be locked.
            locks.append(lock_directory(filesystem, place, what="Journal directory"))
        _copy(filesystem, source, place, record)
        _write_record(filesystem, store, JournalRecord(_VERSION, record.id, target, record.directory))
    finally:
        _release(locks)
    log.info("the journal of %s was moved from %s to %s", store, source, place)
    _forget_previous(filesystem, store, JournalRecord(_VERSION, record.id, target, record.directory))


def _copy(filesystem: Filesystem, source: Path, place: Path, record: JournalRecord) -> None:
    """Copy all segments, replacing the files of an interrupted move."""
    filesystem.make_directory(place)
    _remove_files(filesystem, place)
    for number in segment_numbers(filesystem, source) if filesystem.exists(source) else ():
        mapped = filesystem.map(segment_path(source, number))
        file = filesystem.create(segment_path(place, number))
        try:
            size = len(mapped.view)
            for start in range(0, size, _COPY_BYTES):
                write_whole(file, mapped.read(start, min(_COPY_BYTES, size - start)))
            file.sync()
        finally:
            file.close()
            mapped.close()
    _write_record(filesystem, place, JournalRecord(_VERSION, record.id))
    filesystem.sync_directory(place.parent)


def _forget_previous(filesystem: Filesystem, store: Path, record: JournalRecord) -> None:
    """Remove the files at the previous location, unless it is not mounted."""
    if record.directory is not None and filesystem.exists(store / JOURNAL_NAME):
        _remove_files(filesystem, store / JOURNAL_NAME)
    if record.previous is not None:
        place = _place(record.previous, record.id)
        if filesystem.exists(place):
            _remove_files(filesystem, place)
    _write_record(filesystem, store, msgspec.structs.replace(record, previous=None))


def _remove_files(filesystem: Filesystem, directory: Path) -> None:
    for name in filesystem.names(directory):
        if name != LOCK_NAME:
            filesystem.unlink(directory / name)
    filesystem.sync_directory(directory)


def _release(locks: list[Lock]) -> None:
    for lock in reversed(locks):
        lock.release()
