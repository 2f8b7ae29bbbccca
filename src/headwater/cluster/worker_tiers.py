"""The object store of a server with several workers: each has a separate prefix below `storage.cold`.

The object `WORKERS` below `storage.cold` is a copy of the file `WORKERS` of the data directory, so that a server whose
disk was lost knows how its streams were divided. The number of workers stays as it is: another division would have to
be uploaded completely before the old one could be removed.

The client of the object store has threads, and the workers are forked, so the process that forks them must not use it:
`apart` runs a function in a separate process.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from headwater.storage.directory import FORMAT_NAME
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.tiering.claimed_prefix import HEAD_KEY, ClaimedPrefix, read_mark
from headwater.storage.tiering.objects import Objects, required_store
from headwater.storage.tiering.open import journal_missing, open_objects
from headwater.storage.worker_stores import (
    WORKERS_NAME,
    WorkerStores,
    decode_worker_stores,
    encode_worker_stores,
    read_worker_stores,
    write_worker_stores,
)

if TYPE_CHECKING:
    from headwater.config import StorageSettings

P = ParamSpec("P")
T = TypeVar("T")
SHARE_MIN_BYTES: Final = 16 * 2**20
"""The least that a worker or a shard gets of the cache, and of the backlog."""


def apart(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a process that is forked for it; its result and exceptions are copied."""
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def check_not_tiered(root: Path) -> None:
    """Refuse to open a divided directory without the object store that has its packs."""
    stores = read_worker_stores(root)
    if stores is None:
        return
    for number, directory in enumerate(stores.directories(root)):
        mark = read_mark(RealFilesystem(), directory) if directory.exists() else None
        if mark is not None:
            url = mark.url.removesuffix(f"/{stores.directory(Path(), number)}")
            raise StorageError(
                f"The packs of {root} are in {url}. Set storage.cold to it, or copy the store into a plain directory"
                " with `headwater store copy`."
            )


def check_worker_tiers(settings: StorageSettings, cold: str, workers: int) -> None:
    """Refuse a number of workers, a data directory and an object store that do not belong together.

    A directory that was lost gets its division from the object store, if the loss of data was accepted.
    """
    root, objects = settings.data_dir, open_objects(cold)
    stores = read_worker_stores(root)
    with required_store():
        recorded = _recorded(objects)
        if workers == 1 and stores is None:
            if recorded is not None:
                raise _other_number(f"The streams in {cold}", recorded.workers)
        elif stores is not None:
            _check_division(objects, stores, recorded, workers, root)
        elif (root / FORMAT_NAME).exists():
            raise _other_number(f"The streams in {root}", 1)
        elif recorded is not None:
            _restore_division(settings, cold, recorded, workers)
        elif objects.get(HEAD_KEY) is not None:
            raise _other_number(f"The streams in {cold}", 1)


def record_division(cold: str, stores: WorkerStores) -> None:
    """Store a copy of the file `WORKERS` below `storage.cold`, unless it is there."""
    objects = open_objects(cold)
    with required_store():
        if objects.get(WORKERS_NAME) is None:
            objects.create(WORKERS_NAME, encode_worker_stores(stores))


def tier_of_worker(settings: StorageSettings, stores: WorkerStores, worker: int) -> dict[str, object]:
    """The settings of one worker that differ from those of the server."""
    if settings.cold is None:
        return {}
    return {
        "cold": _prefix(settings.cold, stores, worker),
        "cold_cache_bytes": share(settings.cold_cache_bytes, stores.workers),
        "cold_backlog_bytes": share(settings.cold_backlog_bytes, stores.workers),
    }


def share(total_bytes: int, parts: int) -> int:
    return max(min(total_bytes, SHARE_MIN_BYTES), total_bytes // parts)


def _prefix(cold: str, stores: WorkerStores, worker: int) -> str:
    return f"{cold.rstrip('/')}/{stores.directory(Path(), worker)}"


def _recorded(objects: Objects) -> WorkerStores | None:
    found = objects.get(WORKERS_NAME)
    return None if found is None else decode_worker_stores(f"{objects.url}/{WORKERS_NAME}", found.data)


def _check_division(
    objects: Objects, stores: WorkerStores, recorded: WorkerStores | None, workers: int, root: Path
) -> None:
    if recorded not in (None, stores):
        raise StorageError(
            f"{objects.url} belongs to another data directory than {root}. Give each its own storage.cold."
        )
    if stores.workers != workers:
        raise _other_number(f"The streams in {root}", stores.workers)


def _restore_division(settings: StorageSettings, cold: str, recorded: WorkerStores, workers: int) -> None:
    root = settings.data_dir
    prefixes = [_prefix(cold, recorded, number) for number in range(recorded.workers)]
    if any(ClaimedPrefix(open_objects(prefix)).has_data for prefix in prefixes) and not settings.accept_data_loss:
        raise journal_missing(cold, root)
    if recorded.workers != workers:
        raise _other_number(f"The streams in {cold}", recorded.workers)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_worker_stores(root, recorded)


def _other_number(which: str, workers: int) -> StorageError:
    owner = "belong to one process" if workers == 1 else f"are divided between {workers} workers"
    return StorageError(
        f"{which} {owner}, and with storage.cold that cannot change. Use --workers {workers}; or copy the store into a"
        " plain directory (headwater store copy), and start with that and a new storage.cold."
    )
