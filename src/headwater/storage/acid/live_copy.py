"""A copy of an `acid` store at one moment, taken while a server goes on writing to it.

Each database can be copied as a transaction sees it, whatever is written meanwhile; the point is to see all of them at
the same moment. The transactions on the shards are begun first, the one on the journal last. If the journal was not
trimmed from before the first to after the last, then it holds every entry that some shard does not have, and no shard
has an entry that it does not hold: together they are the store exactly as of the journal's last entry. Trimming
happens now and then and all transactions are begun within a few milliseconds, so a few tries are enough.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import lmdb

from headwater.storage.acid.check import open_journal, open_shard
from headwater.storage.acid.environment import reading
from headwater.storage.acid.journal import Journal
from headwater.storage.acid.layout import (
    DIRECTORY,
    journal_path,
    making,
    read_manifest,
    shard_path,
    write_manifest,
)
from headwater.storage.acid.shard import Shard
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import DIRECTORY_MODE, FILE_MODE, RealFilesystem
from headwater.storage.interface import StorageError

TRIES: Final = 100


def copy_store(source: Path, target: Path) -> None:
    """Copy the store in data directory `source` into `target`, which must be new or empty. Free pages stay behind.

    The server may be running, in another process: LMDB does not let one process open a database twice.
    """
    filesystem = RealFilesystem()
    root = source / DIRECTORY
    manifest = read_manifest(root)
    with ExitStack() as opened:
        opened.enter_context(closing(open_directory(filesystem, target, "acid")))
        if (target / DIRECTORY).exists():
            raise StorageError(f"{target} holds a store already; a copy needs a new or an empty directory.")
        shards = [opened.enter_context(closing(open_shard(root, n, manifest))) for n in range(manifest.shard_count)]
        journal = opened.enter_context(closing(open_journal(root, manifest)))
        transactions = opened.enter_context(ExitStack())
        views = _same_moment(transactions, shards, journal)
        with making(filesystem, target / DIRECTORY) as unfinished:
            for shard, view in zip(shards, views, strict=False):
                _copy(shard.environment, view, shard.path, shard_path(unfinished, shard.number))
            _copy(journal.environment, views[-1], journal.path, journal_path(unfinished))
            write_manifest(filesystem, unfinished, manifest)


def _same_moment(transactions: ExitStack, shards: list[Shard], journal: Journal) -> list[lmdb.Transaction[bytes]]:
    """A transaction on each shard and on the journal, that together see the store at one moment."""
    for _ in range(TRIES):
        with reading(journal.path), journal.environment.begin() as txn:
            before = journal.read_mark(txn)
        environments = [*(shard.environment for shard in shards), journal.environment]
        views = [transactions.enter_context(environment.begin()) for environment in environments]
        if journal.read_mark(views[-1]) == before:
            return views
        transactions.close()
    raise StorageError("The store is too busy to be seen at one moment; try again.")


def _copy(environment: lmdb.Environment, view: lmdb.Transaction[bytes], source: Path, target: Path) -> None:
    target.mkdir(mode=DIRECTORY_MODE)
    try:
        environment.copy(str(target), compact=True, txn=view)
        # LMDB gives a copy the mode that the umask allows.
        (target / "data.mdb").chmod(FILE_MODE)
        RealFilesystem().sync(target / "data.mdb")
    except lmdb.Error as error:
        raise StorageError(f"Copying {source} to {target} failed: {error}") from error
