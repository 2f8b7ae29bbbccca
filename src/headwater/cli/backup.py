"""`headwater backup` and `headwater restore`: take a consistent copy of the data directory or of a cluster, and restore
it.

The backup of a cluster is a data directory too, so it can be restored into one, or into a new cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.data_directory import (
    StoreLocation,
    copying,
    locate_store,
    readable,
    running_server,
    storage_errors,
)
from headwater.cli.errors import RUNTIME, USAGE, CommandError
from headwater.cli.options import ConfigFile, DataDirectory, Mode, Profile
from headwater.core.plurals import counted
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.config import Settings
    from headwater.storage.offline.backup import Backup

BackupDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the backup.")]


def backup(
    target: BackupDirectory,
    profile: Profile = None,
    config_file: ConfigFile = None,
    mode: Mode = None,
    directory: DataDirectory = None,
) -> None:
    """Copy the data directory, or the cluster, into DIR as a consistent backup, then check it. The server may be
    running."""
    store = locate_store(profile, config_file, mode, directory, takes_cluster=True)

    from headwater.storage.offline.backup import take_backup
    from headwater.storage.offline.families import family_of

    with storage_errors():
        if store.cluster is not None:
            taken = _back_up_cluster(store, target)
        else:
            family_of(store.directory, store.mode)
            with _held(store):
                taken = take_backup(store.directory, target)
    typer.echo(f"{target}: {counted(len(taken.files), 'file')}, {taken.size} bytes, as of {taken.taken}")
    _check(target, "the backup is complete, but the store that it was taken from is damaged")


def restore(
    source: BackupDirectory,
    profile: Profile = None,
    config_file: ConfigFile = None,
    mode: Mode = None,
    directory: DataDirectory = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the existing store in the data directory.")] = False,
) -> None:
    """Restore the backup in DIR into the data directory, or into a new cluster; every file is verified against its
    checksum."""
    store = locate_store(profile, config_file, mode, directory, takes_cluster=True)
    if store.cluster is not None:
        _restore_into_cluster(store.cluster, source, replace=force)
        return

    from headwater.storage.directory import FAMILY_OF_MODE
    from headwater.storage.interface import StorageError
    from headwater.storage.offline.atomic_install import StoreExistsError
    from headwater.storage.offline.backup import read_backup, restore_backup

    with storage_errors():
        found = read_backup(source)
        if store.mode is not None and FAMILY_OF_MODE[store.mode] != found.family:
            raise CommandError(
                f"{source} is a backup of a store of the family {found.family}, but storage.mode is {store.mode};"
                " restore it with --mode, or convert it to another mode with `headwater store copy`"
            )
        try:
            restore_backup(source, store.directory, replace=force)
        except StoreExistsError as error:
            raise StorageError(f"{error} Or replace it with --force.") from None
    files = counted(len(found.files), "file")
    typer.echo(f"{store.directory}: restored {files}, {found.size} bytes, as of {found.taken}")
    _check(store.directory, "the backup is restored as it was taken, but its store is damaged")


def _back_up_cluster(store: StoreLocation, target: Path) -> Backup:
    from headwater.storage.offline.backup import complete_backup
    from headwater.storage.offline.families import family_of
    from headwater.storage.offline.store_copy import copy_between

    taken = datetime.now(UTC)
    with readable(store) as found:
        assert found.mode is not None
        copy_between(
            found.directory,
            found.mode,
            target,
            found.mode,
            shard_count=store.settings.acid_shard_count,
            map_bytes=store.settings.acid_map_bytes,
        )
    return complete_backup(target, family_of(target), taken)


def _restore_into_cluster(settings: Settings, source: Path, *, replace: bool) -> None:
    from headwater.storage.directory import FAMILY_OF_MODE
    from headwater.storage.offline.backup import check_backup

    if replace:
        raise CommandError("a cluster cannot be replaced; restore into a new database and a new prefix", USAGE)
    with storage_errors():
        found = check_backup(source)
        mode = {family: mode for mode, family in FAMILY_OF_MODE.items()}[found.family]
        copied = copying().copy_into_cluster(source, mode, settings)
    typer.echo(
        f"cluster {settings.cluster.name}: restored and compared {counted(copied.streams, 'stream')}"
        f" ({copied.payload_bytes} bytes), as of {found.taken}"
    )


@contextmanager
def _held(store: StoreLocation) -> Iterator[None]:
    """Keep the files of the store unchanged: the running server defers deletions, or the directory is locked."""
    from headwater.storage.directory import LOCK_NAME
    from headwater.storage.filesystem import AlreadyLockedError, RealFilesystem
    from headwater.storage.offline.families import locked
    from headwater.storage.worker_stores import read_worker_stores, store_directories

    filesystem = RealFilesystem()
    with ExitStack() as held:
        are_served = False
        if read_worker_stores(store.directory) is not None:
            try:
                lock = filesystem.lock(store.directory / LOCK_NAME, f"{os.getpid()}\n")
            except AlreadyLockedError:
                are_served = True
            else:
                held.callback(lock.release)
        for directory in store_directories(store.directory):
            # The store of a worker that is being restarted must not be locked: the worker could not open it.
            server = held.enter_context(running_server(directory, wait=are_served))
            if server is not None:
                server.request("hold")
            else:
                held.enter_context(locked(filesystem, directory))
        yield


def _check(directory: Path, verdict: str) -> None:
    from headwater.storage.offline.check import check

    count = 0
    with storage_errors():
        for problem in check(directory):
            count += 1
            typer.echo(printable(str(problem)))
    if count:
        raise CommandError(f"{verdict}: {count} finding{'s' if count > 1 else ''}", RUNTIME)
