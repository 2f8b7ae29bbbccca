"""Find the offline tools for the storage family of a data directory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

from headwater.storage.acid.offline import AcidTools
from headwater.storage.directory import FAMILY_OF_MODE, Directory, open_directory, read_format
from headwater.storage.filesystem import Filesystem, RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal_location import lock_journal
from headwater.storage.offline.interface import OfflineTools
from headwater.storage.packs.offline import PackTools
from headwater.storage.worker_stores import store_directories

TOOLS: Final[Mapping[str, OfflineTools]] = {"log": PackTools(), "acid": AcidTools()}


def family_of(directory: Path, mode: str | None = None) -> str:
    """The family of a data directory. Raises `StorageError` if it is not a data directory, or not of this mode."""
    filesystem = RealFilesystem()
    directory = store_directories(directory)[0]
    found = read_format(filesystem, directory)
    if found.family not in TOOLS:
        raise StorageError(
            f"Data directory {directory} was written by an unknown storage mode ({found.family!r}). Use the"
            " version that wrote it."
        )
    if mode is not None and FAMILY_OF_MODE[mode] != found.family:
        # Raises the same error as a server start.
        open_directory(filesystem, directory, FAMILY_OF_MODE[mode], create=False).close()
    return found.family


def tools_of(directory: Path) -> OfflineTools:
    return TOOLS[family_of(directory)]


def tools_of_mode(mode: str) -> OfflineTools:
    return TOOLS[FAMILY_OF_MODE[mode]]


def locked(filesystem: Filesystem, directory: Path) -> closing[Directory]:
    """Lock a data directory of any family, with its journal; it must exist."""
    opened = open_directory(filesystem, directory, family_of(directory), create=False)
    try:
        lock_journal(filesystem, opened)
    except BaseException:
        opened.close()
        raise
    return closing(opened)
