"""Copy a data directory into a new cluster, and fetch a cluster as a data directory.

`fetched_cluster` makes a directory with one store for each shard, as several workers have it. A store has the manifest
and the journal of its shard; packs and snapshots stay in the object store and are read there. So everything that works
on a data directory works on it: checking, counting, copying. The nodes may run meanwhile. Each shard is fetched as it
was at one moment, but not all shards at the same one.

The way into a cluster is a division of the streams like that between workers, and then the upload of each part. While
the object `COPYING` exists, no node starts: it is removed when everything is there and was compared.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import psycopg
from psycopg import IsolationLevel

from headwater.cluster.nodes.keeper import COPYING_KEY, open_cluster
from headwater.cluster.nodes.open_shard import shard_objects
from headwater.cluster.nodes.postgres_journal import read_batches
from headwater.cluster.nodes.schema import FORMAT, Connection, connect, required_database
from headwater.cluster.shards import ShardMap
from headwater.cluster.start import plan_division
from headwater.config import Settings
from headwater.storage.blobs import BLOBS_NAME
from headwater.storage.directory import open_directory
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.journaled_store import StoreSettings
from headwater.storage.offline.check import check
from headwater.storage.offline.division import CopiedStore, divide
from headwater.storage.offline.families import family_of
from headwater.storage.packs.pack_store import FAMILY
from headwater.storage.tiering.claimed_prefix import VERSION, ClaimedPrefix, ColdMark, StoreHead, write_mark
from headwater.storage.tiering.objects import Objects, required_store
from headwater.storage.tiering.open import TierSettings, open_objects, open_tiered
from headwater.storage.tiering.restore import restore_replicated
from headwater.storage.worker_stores import WORKERS_VERSION, WorkerStores, store_directories, write_worker_stores

ATTEMPTS: Final = 10
"""How often a shard is fetched again because its owner trimmed the journal in the meantime."""
COPIED_EPOCH: Final = 1
"""The epoch of the objects that a copy writes. The first owner of a shard has the next one."""
_UPLOAD_CHECK_S: Final = 0.02


# -- out of a cluster --------------------------------------------------------------------------------------------------


@contextmanager
def fetched_cluster(settings: Settings) -> Iterator[Path]:
    """Fetch the stores of all shards into a directory, for reading. Raises `StorageError` if there is no cluster."""
    url, cold = settings.cluster.postgres_url, settings.storage.cold
    if not url or cold is None:
        raise StorageError("The mode cluster needs cluster.postgres_url and storage.cold.")
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-cluster-")))
        with required_store(), required_database(), connect(url, "copy") as connection:
            shards = _shards_of(connection)
            stores = WorkerStores(WORKERS_VERSION, FAMILY, shards, shards, 1)
            for shard in range(shards):
                _fetch(connection, shard, shard_objects(cold, shard), stores.directory(root, shard))
        write_worker_stores(root, stores)
        yield root


def _shards_of(connection: Connection) -> int:
    """The number of shards of the cluster."""
    with suppress(psycopg.errors.UndefinedTable):
        row = connection.execute("SELECT shards FROM headwater.cluster").fetchone()
        if row is not None:
            return int(str(row[0]))
    raise StorageError(
        "There is no cluster in the database of cluster.postgres_url; check the setting, or start a node first."
    )


class _JournalSnapshot:
    """The journal of a shard as it was when the transaction of this connection began.

    Raises `StorageError` if a later version wrote it: what this one cannot read would look damaged.
    """

    def __init__(self, connection: Connection, shard: int) -> None:
        self._connection = connection
        self._shard = shard
        row = connection.execute("SELECT seq, format FROM headwater.shard WHERE id = %s", [shard]).fetchone()
        assert row is not None
        self.last_lsn, found = int(str(row[0])), int(str(row[1]))
        if found > FORMAT:
            raise StorageError(
                f"Shard {shard} was written by a later version of Headwater: its format is {found}, and this version"
                f" reads formats up to {FORMAT}. Use the version of the nodes."
            )

    def batches(self, after_lsn: int) -> Iterator[bytearray]:
        return read_batches(self._connection, self._shard, after_lsn)


def _fetch(connection: Connection, shard: int, objects: Objects, directory: Path) -> None:
    """Fetch the store of a shard. Its owner may store a newer manifest and trim the journal at any time."""
    for _ in range(ATTEMPTS):
        head = ClaimedPrefix(objects).head
        problem: CorruptError | None = None
        filesystem = RealFilesystem()
        with suppress(FileNotFoundError):
            shutil.rmtree(directory)
        opened = open_directory(filesystem, directory, FAMILY)
        try:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            with connection.transaction():
                journal = _JournalSnapshot(connection, shard)
                found = head if head is not None else StoreHead(VERSION, "", 0)
                restore_replicated(filesystem, directory, objects, found, journal, StoreSettings().segment_bytes)
        except CorruptError as error:
            problem = error
        finally:
            connection.isolation_level = None
            opened.close()
        if head is not None:
            write_mark(filesystem, directory, ColdMark(VERSION, objects.url, head.store, head.epoch))
            filesystem.make_directory(directory / BLOBS_NAME)
        # What was trimmed since `head` was read is in the manifest of the next one.
        if ClaimedPrefix(objects).head == head:
            if problem is not None:
                raise problem
            return
    raise StorageError(f"Shard {shard} changed too often to be read. Try again.")


# -- into a cluster ----------------------------------------------------------------------------------------------------


@required_store()
def copy_into_cluster(source: Path, source_mode: str, settings: Settings) -> CopiedStore:
    """Copy the store in `source`, which no server has open, into a cluster that no node has served yet."""
    sources = store_directories(source)
    for directory in sources:
        family_of(directory, source_mode)
    shards = open_cluster(settings, is_copy=True).shards
    cold = settings.storage.cold
    assert cold is not None
    root = open_objects(cold)
    storage = settings.storage
    with required_database():
        with ExitStack() as stack:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-copy-")))
            connection = stack.enter_context(connect(settings.cluster.postgres_url, "copy"))
            # No other node can take a shard until the end of the copy.
            stack.enter_context(connection.transaction())
            _require_new(connection)
            _remove_interrupted_copy(root, cold, shards)
            root.put(COPYING_KEY, b"")
            targets = [place / f"{shard:03}" for shard in range(shards)]
            for target in targets:
                target.mkdir(0o700)
            copied = divide(
                sources,
                targets,
                "file-durable",
                lambda catalogs: plan_division(ShardMap(shards, shards), catalogs),
                shard_count=storage.acid_shard_count,
                map_bytes=storage.acid_map_bytes,
            )
            for shard, target in enumerate(targets):
                _upload(shard_objects(cold, shard), target)
            connection.execute("UPDATE headwater.shard SET epoch = %s", [COPIED_EPOCH])
        with fetched_cluster(settings) as fetched:
            for problem in check(fetched):
                raise StorageError(f"The copy is not sound: {problem}")
        root.delete(COPYING_KEY)
    return copied


def _require_new(connection: Connection) -> None:
    rows = connection.execute("SELECT id, seq, owner FROM headwater.shard ORDER BY id FOR UPDATE").fetchall()
    for shard, seq, owner in rows:
        if owner is not None or seq:
            raise StorageError(
                f"The cluster is not new: shard {shard} {'is owned by ' + str(owner) if owner else 'has data'}. Copy"
                " into a cluster that no node has served yet: another database and another prefix of the object store."
            )


def _remove_interrupted_copy(root: Objects, cold: str, shards: int) -> None:
    """Remove the objects of an interrupted copy. Raises `StorageError` if there are others."""
    is_left = root.get(COPYING_KEY) is not None
    for shard in range(shards):
        objects = shard_objects(cold, shard)
        found = objects.sizes("")
        if found and not is_left:
            raise StorageError(f"{objects.url} has objects. Copy into a prefix of the object store that has none.")
        for key in found:
            objects.delete(key)


def _upload(objects: Objects, directory: Path) -> None:
    tiered = open_tiered(objects, directory, TierSettings())
    storage, uploader = tiered.storage, tiered.files.uploader
    assert uploader is not None
    try:
        for _ in storage.recover():
            pass
        while not uploader.is_current:
            problem = uploader.failure or uploader.problem
            if problem is not None:
                raise StorageError(f"The object store of storage.cold cannot be used: {problem}")
            time.sleep(_UPLOAD_CHECK_S)
    finally:
        storage.close()
    head = ClaimedPrefix(objects).head
    assert head is not None
    assert (head.epoch, head.lsn) == (COPIED_EPOCH, 0), "everything of a new copy is in packs"
