"""`headwater backup` and `headwater restore`: a consistent copy of the data directory, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.failure import RUNTIME, Failure
from headwater.cli.options import ConfigFile, DataDirectory, Mode, Profile
from headwater.cli.place import Place, failures, place_from, server_of
from headwater.printable import printable

BackupDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the backup.")]


def backup(
    target: BackupDirectory,
    profile: Profile = None,
    config_file: ConfigFile = None,
    mode: Mode = None,
    directory: DataDirectory = None,
) -> None:
    """Copy the data directory into DIR, as of one moment, while the server runs or at rest; then check the copy."""
    place = place_from(profile, config_file, mode, directory)

    from headwater.storage.backup import take_backup
    from headwater.storage.inspection import family_of

    with failures():
        family_of(place.directory, place.mode)
        with _held(place):
            taken = take_backup(place.directory, target)
    typer.echo(f"{target}: {len(taken.files)} files, {taken.size} bytes, as of {taken.taken}")
    _check(target, "the backup is complete, but what it was taken from is damaged")


def restore(
    source: BackupDirectory,
    profile: Profile = None,
    config_file: ConfigFile = None,
    mode: Mode = None,
    directory: DataDirectory = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the store that is in the data directory.")] = False,
) -> None:
    """Bring the backup in DIR back into the data directory, every file held against its checksum."""
    place = place_from(profile, config_file, mode, directory)

    from headwater.storage.backup import read_backup, restore_backup
    from headwater.storage.inspection import FAMILY_OF_MODE
    from headwater.storage.interface import StorageError

    with failures():
        found = read_backup(source)
        if place.mode is not None and FAMILY_OF_MODE[place.mode] != found.family:
            raise Failure(
                f"{source} is a backup of a store of the family {found.family}, and storage.mode is {place.mode};"
                " restore it with --mode, or bring it into another mode with `headwater store copy`"
            )
        try:
            restore_backup(source, place.directory, replace=force)
        except StorageError as error:
            hint = " Give --force to replace it." if "holds a store already" in str(error) else ""
            raise StorageError(f"{error}{hint}") from None
    typer.echo(f"{place.directory}: restored {len(found.files)} files, {found.size} bytes, as of {found.taken}")
    _check(place.directory, "the backup is restored as it was taken, but the store in it is damaged")


@contextmanager
def _held(place: Place) -> Iterator[None]:
    """Nothing is removed from the directory meanwhile: the server sees to it, or there is none."""
    from headwater.storage.directory import open_directory
    from headwater.storage.filesystem import RealFilesystem
    from headwater.storage.inspection import family_of

    with server_of(place.directory) as server:
        if server is not None:
            server.ask("hold")
            yield
            return
    family = family_of(place.directory)
    with closing(open_directory(RealFilesystem(), place.directory, family, create=False)):
        yield


def _check(directory: Path, verdict: str) -> None:
    from headwater.storage.inspection import check

    count = 0
    with failures():
        for problem in check(directory):
            count += 1
            typer.echo(printable(str(problem)))
    if count:
        raise Failure(f"{verdict}: {count} finding{'s' if count > 1 else ''}", RUNTIME)
