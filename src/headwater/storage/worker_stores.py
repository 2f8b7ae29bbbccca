"""A data directory of several workers: a complete store for each, and the file `WORKERS` with their number.

The stores are in `workers-{generation}/{number}`. When the number of workers changes, the streams are copied into the
stores of the next generation, and `WORKERS` is replaced at the end, so after a crash there is either the old division
or the new one. A directory without `WORKERS` is the store of a single process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import msgspec

from headwater.storage.directory import FORMAT_NAME, decode_record, read_format, replace_file
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.journal_location import moved_journals, remove_journals

WORKERS_NAME: Final = "WORKERS"
WORKERS_VERSION: Final = 1
GENERATION_PREFIX: Final = "workers-"


class WorkerStores(msgspec.Struct, frozen=True):
    """The content of the file `WORKERS`."""

    version: int
    family: str
    shards: int
    workers: int
    generation: int

    def directory(self, root: Path, worker: int) -> Path:
        return root / f"{GENERATION_PREFIX}{self.generation}" / f"{worker:02}"

    def directories(self, root: Path) -> list[Path]:
        return [self.directory(root, worker) for worker in range(self.workers)]


_decoder: Final = msgspec.json.Decoder(WorkerStores)


def read_worker_stores(root: Path) -> WorkerStores | None:
    """Read the division of a directory; None if it is not divided, or does not exist."""
    path = root / WORKERS_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    return decode_worker_stores(str(path), data)


def decode_worker_stores(where: str, data: bytes) -> WorkerStores:
    return decode_record(where, data, _decoder, WORKERS_VERSION)


def encode_worker_stores(stores: WorkerStores) -> bytes:
    return msgspec.json.encode(stores) + b"\n"


def write_worker_stores(root: Path, stores: WorkerStores) -> None:
    """Replace the division of the directory atomically. The stores must be durable."""
    replace_file(RealFilesystem(), root / WORKERS_NAME, encode_worker_stores(stores))


def store_directories(root: Path) -> list[Path]:
    """The directories of the stores that a data directory consists of."""
    stores = read_worker_stores(root)
    return [root] if stores is None else stores.directories(root)


def shards_of(root: Path) -> int | None:
    """The number of shards of a data directory; None if it has no data yet."""
    stores = read_worker_stores(root)
    if stores is not None:
        return stores.shards
    if not (root / FORMAT_NAME).exists():
        return None
    return read_format(RealFilesystem(), root).shards


def remove_leftovers(root: Path, stores: WorkerStores | None, plain_names: frozenset[str]) -> None:
    """Remove the files of an earlier division, or of an interrupted one: stores of other generations, and the files of
    an undivided store."""
    current = "" if stores is None else f"{GENERATION_PREFIX}{stores.generation}"
    generations = [path for path in root.glob(f"{GENERATION_PREFIX}*") if path.name != current]
    old_stores = [store for generation in generations for store in generation.iterdir()] + (
        [root] if plain_names else []
    )
    remove_journals(moved_journals(old_stores))
    plain = (path for path in root.iterdir() if path.name in plain_names)
    for path in (*sorted(plain, key=lambda path: path.name != FORMAT_NAME), *generations):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
