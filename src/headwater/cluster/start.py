"""Start a server of one or several workers: find the stores of the data directory, divide them again if the number of
workers changed, and serve."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cluster.placements import PREFIX
from headwater.cluster.shards import COORDINATOR, ShardMap
from headwater.cluster.supervisor import WorkerSupervisor
from headwater.cluster.worker_tiers import apart, check_not_tiered, check_worker_tiers, record_division, tier_of_worker
from headwater.core.buckets import bucket_of_document
from headwater.core.catalog import Catalog, StreamState
from headwater.engine.clock_guard import DOCUMENT_KEY
from headwater.engine.fences import FENCE_PREFIX
from headwater.engine.leases import LEASE_PREFIX
from headwater.engine.open_storage import check_tier
from headwater.http.server import run
from headwater.operating_system import SYSTEM
from headwater.storage.directory import (
    FAMILY_OF_MODE,
    FORMAT_NAME,
    LOCK_NAME,
    SHARDS_DEFAULT,
    lock_directory,
    restrict_access,
)
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.offline.atomic_install import PLAIN_STORE_NAMES, check_is_new
from headwater.storage.offline.division import DivisionPlan, divide
from headwater.storage.offline.families import family_of
from headwater.storage.worker_stores import (
    WORKERS_VERSION,
    WorkerStores,
    read_worker_stores,
    remove_leftovers,
    shards_of,
    store_directories,
    write_worker_stores,
)

if TYPE_CHECKING:
    from headwater.config import Settings

log = logging.getLogger("headwater.cluster")

LOCK_WAIT_S = 5.0
"""How long to wait for the workers of a killed supervisor to exit."""


def start_server(settings: Settings, load: Callable[[], Settings]) -> None:
    """Serve until SIGTERM or SIGINT, in one process or with several workers."""
    workers, root = settings.server.worker_count, settings.storage.data_dir
    if settings.storage.mode == "cluster":
        with closing(_RootLock(root)):
            _run_node(settings, load)
        return
    check_tier(settings.storage)
    if workers > 1 and not SYSTEM.has_workers:
        raise StorageError(f"server.workers is {workers}: this system can run one worker only (macOS). Set it to 1.")
    if not settings.server.workers:
        workers = _auto(settings, workers)
    if settings.storage.cold is None:
        check_not_tiered(root)
    else:
        apart(check_worker_tiers, settings.storage, settings.storage.cold, workers)
    if settings.storage.mode == "memory":
        if workers == 1:
            run(settings, load)
        else:
            _check_count(workers, SHARDS_DEFAULT, "a server in memory", settings.storage.mode)
            WorkerSupervisor(settings, load, ShardMap(SHARDS_DEFAULT, workers), lambda _: settings).run()
        return
    if workers == 1 and read_worker_stores(root) is None:
        run(settings, load)
        return
    _check_count(workers, shards_of(root) or SHARDS_DEFAULT, str(root), settings.storage.mode)
    if read_worker_stores(root) is None and (root / FORMAT_NAME).exists():
        _divide(settings, root, workers)
    # Held as long as any worker lives, because they inherit it.
    with closing(_RootLock(root)):
        stores = read_worker_stores(root)
        if stores is not None and stores.family != FAMILY_OF_MODE[settings.storage.mode]:
            family_of(stores.directory(root, 0), settings.storage.mode)  # Raises, and says what to do.
        if stores is None:
            stores = _create(settings, root, workers)
        elif stores.workers != workers:
            stores = _divide(settings, root, workers)
        restrict_access(RealFilesystem(), root)
        remove_leftovers(root, stores, PLAIN_STORE_NAMES)
        if settings.storage.cold is not None:
            apart(record_division, settings.storage.cold, stores)

        def of_worker(number: int) -> Settings:
            tier = tier_of_worker(settings.storage, stores, number)
            storage = settings.storage.model_copy(update={"data_dir": stores.directory(root, number), **tier})
            return settings.model_copy(update={"storage": storage})

        if workers == 1:
            run(of_worker(0), load, can_pause=False)
        else:
            WorkerSupervisor(settings, load, ShardMap(stores.shards, workers), of_worker).run()


def _run_node(settings: Settings, load: Callable[[], Settings]) -> None:
    try:
        from headwater.cluster.nodes.node import run_node  # noqa: PLC0415 - optional
    except ImportError as error:
        raise StorageError(
            f"The mode cluster needs a package that is missing: {error}. pip install 'headwater[cluster]'"
        ) from None
    run_node(settings, load)


class _RootLock:
    """The lock of the data directory itself; each worker has that of its store as well."""

    def __init__(self, root: Path) -> None:
        until_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                self._lock = lock_directory(RealFilesystem(), root)
                return
            except StorageError:
                # The workers of a supervisor that was just killed inherited its lock, and are being killed too.
                if _is_running(_holder(root)) or time.monotonic() > until_s:
                    raise
                time.sleep(0.02)

    def close(self) -> None:
        self._lock.release()


def _holder(root: Path) -> int:
    """The process that holds the lock of a directory; 0 if unknown."""
    try:
        return int((root / LOCK_NAME).read_text())
    except (OSError, ValueError):
        return 0


def _is_running(pid: int) -> bool:
    if not pid:
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _auto(settings: Settings, processors: int) -> int:
    """The number of workers for `auto`: each needs a shard."""
    root = settings.storage.data_dir
    shards = (None if settings.storage.mode == "memory" else shards_of(root)) or SHARDS_DEFAULT
    if processors > shards:
        log.info("--workers auto runs %d of %d workers, because the data has %d shards", shards, processors, shards)
    return min(processors, shards)


def _check_count(workers: int, shards: int, where: str, mode: str) -> None:
    if workers > shards:
        raise StorageError(
            f"{workers} workers are more than the {shards} shard{'s' if shards > 1 else ''} of {where}: each worker"
            f" needs one. Use --workers {shards}"
            + (
                " or fewer."
                if shards > 1
                else f", or copy the store into one with more: headwater store copy --from-mode {mode} --from-dir"
                f" {where} --to-mode {mode} --to-dir NEW --worker-shards 16."
            )
        )


def _create(settings: Settings, root: Path, workers: int) -> WorkerStores:
    """Divide a new directory. The stores themselves are created by their workers."""
    check_is_new(root)
    stores = WorkerStores(WORKERS_VERSION, FAMILY_OF_MODE[settings.storage.mode], SHARDS_DEFAULT, workers, 1)
    write_worker_stores(root, stores)
    RealFilesystem().make_directory(stores.directory(root, 0).parent)
    return stores


def _divide(settings: Settings, root: Path, workers: int) -> WorkerStores:
    """Copy all streams into the stores of the next generation, one for each worker, and make that the division."""
    old = read_worker_stores(root)
    family = old.family if old is not None else family_of(root, settings.storage.mode)
    shards = shards_of(root)
    assert shards is not None, "there is a store"
    generation = old.generation + 1 if old is not None else 1
    stores = WorkerStores(WORKERS_VERSION, family, shards, workers, generation)
    log.info("dividing the streams in %s for --workers %d; they are copied", root, workers)
    shard_map = ShardMap(shards, workers)
    storage = settings.storage
    # Stores that no worker has opened yet have nothing to copy.
    sources = [directory for directory in store_directories(root) if (directory / FORMAT_NAME).exists()]
    copied = divide(
        sources,
        stores.directories(root),
        storage.mode,
        lambda catalogs: plan_division(shard_map, catalogs),
        shard_count=storage.acid_shard_count,
        map_bytes=storage.acid_map_bytes,
        within=_replacing(root, old, stores),
    )
    log.info("divided %d streams with %d bytes", copied.streams, copied.payload_bytes)
    return stores


@contextmanager
def _replacing(root: Path, old: WorkerStores | None, stores: WorkerStores) -> Iterator[None]:
    """Create the directories of new stores, and make these the division at the end.

    The sources are locked, so what an interrupted division has left does not belong to one that is running.
    """
    if read_worker_stores(root) != old:
        raise StorageError(f"The streams in {root} were divided by another process. Start again.")
    remove_leftovers(root, old, frozenset())
    targets = stores.directories(root)
    generation, filesystem = targets[0].parent, RealFilesystem()
    try:
        for directory in (generation, *targets):
            directory.mkdir(mode=0o700)
        yield
        for directory in (*targets, generation, root):
            filesystem.sync_directory(directory)
        write_worker_stores(root, stores)
    except BaseException:
        if read_worker_stores(root) == old:
            shutil.rmtree(generation, ignore_errors=True)
        raise


def plan_division(shard_map: ShardMap, catalogs: Sequence[Catalog[StreamState]]) -> DivisionPlan:
    """Assign every stream to the owner of its shard, a fork to the owner of its source, and each document to the
    workers that use it."""
    by_id = {stream.id: stream for catalog in catalogs for stream in catalog}
    owners: dict[int, int] = {}
    for stream in by_id.values():
        lineage = [stream]
        while lineage[-1].id not in owners:
            fork = lineage[-1].fork
            source = by_id.get(fork.source_id) if fork is not None else None
            if source is None:
                owners[lineage[-1].id] = shard_map.owner_of(lineage[-1].name)
            else:
                lineage.append(source)
        owner = owners[lineage[-1].id]
        for member in lineage:
            owners[member.id] = owner
    documents: list[dict[str, bytes]] = [{} for _ in range(shard_map.workers)]
    for catalog in reversed(catalogs):
        for key, value in catalog.documents.items():
            for worker in _workers_of_document(shard_map, owners, key):
                documents[worker][key] = value
        for stream in catalog.by_name.values():
            home = shard_map.owner_of(stream.name)
            if home != owners[stream.id]:
                documents[home][PREFIX + stream.name] = str(owners[stream.id]).encode()
    return DivisionPlan(owners, documents)


def _workers_of_document(shard_map: ShardMap, owners: Mapping[int, int], key: str) -> Sequence[int]:
    bucket_id = bucket_of_document(key)
    if bucket_id is not None:
        return (shard_map.owner_of_bucket(bucket_id),)
    if key.startswith(PREFIX):
        return ()  # They are computed again from the new locations of the forks.
    if key.startswith((LEASE_PREFIX, FENCE_PREFIX)):
        owner = owners.get(int(key.partition("/")[2], 16))
        return () if owner is None else (owner,)
    if key == DOCUMENT_KEY:
        return range(shard_map.workers)
    return (COORDINATOR,)
