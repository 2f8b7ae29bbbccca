"""Open LMDB environments, and translate LMDB's errors to those of the storage interface.

LMDB does not use the file-system interface that tests replace: it writes through its own memory map and descriptors. It
never overwrites a page that the last commit uses; a commit writes new pages, syncs them, then writes and syncs the page
that points to them, so a crash leaves either the complete old state or the complete new one. For that `sync` and
`metasync` must be on and `writemap` off, which is set only here. Instead of a simulated disk, the tests use the
sequence of writes and syncs that reaches the kernel, cut at every point (tests/storage/acid/test_power_cut.py), and
processes that are killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from headwater.storage.filesystem import FILE_MODE
from headwater.storage.interface import CorruptError, StorageError, WriteFailedError

ADDRESS_SPACE_BYTES: Final = 64 * 2**40
"""Address space for all maps of a store: half of that of a 64-bit process."""

_DAMAGED: Final = (
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.BadValsizeError,
)


class Databases(NamedTuple):
    """The databases of a shard; see `shard` for what is in them."""

    streams: lmdb._Database
    producers: lmdb._Database
    data: lmdb._Database
    documents: lmdb._Database
    graves: lmdb._Database


def map_bytes_each(map_bytes: int, databases: int) -> int:
    """The size of each map: the configured one, or an equal share of the address space if that is less."""
    return min(map_bytes, ADDRESS_SPACE_BYTES // databases)


def open_environment(
    path: Path, map_bytes: int, databases: int, *, readonly: bool = False, new: bool = False
) -> lmdb.Environment:
    """Open the environment in an existing directory; an error names it and says what to do."""
    if not new:
        _check_present(path / "data.mdb")
    try:
        environment = lmdb.open(
            str(path),
            map_size=map_bytes,
            mode=FILE_MODE,
            max_dbs=databases,
            max_spare_txns=4,
            readonly=readonly,
            create=not readonly,
            sync=True,
            metasync=True,
            writemap=False,
        )
        if not readonly:
            environment.reader_check()
    except lmdb.MemoryError as error:
        raise StorageError(
            f"The operating system does not grant {map_bytes} bytes of address space to map {path}; lower"
            f" storage.acid_map_bytes or raise the process's limit (ulimit -v). ({error})"
        ) from error
    except _DAMAGED as error:
        raise CorruptError(f"{path} is damaged or not an LMDB database: {error}") from error
    except (lmdb.Error, OSError) as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error
    return environment


def _check_present(path: Path) -> None:
    """Refuse a missing or empty database file, in place of which LMDB would create a new one."""
    try:
        if path.stat().st_size:
            return
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StorageError(f"{path} cannot be opened: {error}") from error
    raise CorruptError(f"{path} is missing or empty. Restore the store from a backup.")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Translate LMDB's errors during a write transaction to `WriteFailedError`."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise WriteFailedError(
            f"{path} has reached the largest size that storage.acid_map_bytes allows; raise it and start again."
            f" ({error})"
        ) from error
    except (lmdb.Error, OSError) as error:
        raise WriteFailedError(f"Writing to {path} failed: {error}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Translate LMDB's errors during a read: damage to `CorruptError`, others to `StorageError`."""
    try:
        yield
    except _DAMAGED as error:
        raise CorruptError(f"{path} is damaged: {error}. `headwater store check` shows where.") from error
    except lmdb.Error as error:
        raise StorageError(f"Reading {path} failed: {error}") from error


def used_bytes(txn: lmdb.Transaction, databases: Iterable[lmdb._Database]) -> int:
    """The size of the pages in use; the rest of the file is free for reuse."""
    main = txn.stat()
    return (_pages(main) + sum(_pages(txn.stat(database)) for database in databases)) * main["psize"]


def room_bytes(environment: lmdb.Environment, databases: Iterable[lmdb._Database]) -> int:
    """Free space of the map: beyond the highest page ever used, and in freed pages."""
    with environment.begin() as txn:
        return environment.info()["map_size"] - used_bytes(txn, databases)


def unused_bytes(environment: lmdb.Environment) -> int:
    """The part of the map beyond the highest page ever used: not all of the free space, but fast to read."""
    info = environment.info()
    return info["map_size"] - (info["last_pgno"] + 1) * environment.stat()["psize"]


def _pages(stat: lmdb._StatDict) -> int:
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
