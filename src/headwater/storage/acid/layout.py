"""Where an `acid` store keeps what: its directories, its manifest, and which shard a stream belongs to.

    acid/manifest.json   format, shard count, routing, and the store's own id
    acid/journal/        LMDB: the batches that are committed and not yet in every shard
    acid/shard-00/ …     LMDB: the streams whose name routes there

A stream's shard is `crc32(name as UTF-8) & (shard_count - 1)`: the same in every run and easy to redo in any language.
A store is made under another name and renamed when all of it is durable, so `acid/` is whole whenever it exists.
Invariant: a store is never opened with another shard count, routing or format than it was made with, and never with
a shard of another store (each database carries the store's id).
"""

from __future__ import annotations

import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from headwater.storage.directory import write_file
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import StorageError

DIRECTORY: Final = "acid"
UNFINISHED: Final = "acid.new"
MANIFEST: Final = "manifest.json"
JOURNAL: Final = "journal"
FORMAT: Final = 1
ROUTING: Final = "crc32"
SHARD_COUNT_MAX: Final = 256


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a store was made with."""

    format: int
    shard_count: int
    routing: str
    store_id: str

    @property
    def id_bytes(self) -> bytes:
        return uuid.UUID(hex=self.store_id).bytes


def shard_of(name: str, shard_count: int) -> int:
    """The shard that holds a stream."""
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) & (shard_count - 1)


def shard_path(root: Path, shard: int) -> Path:
    return root / f"shard-{shard:02x}"


def journal_path(root: Path) -> Path:
    return root / JOURNAL


def check_shard_count(count: int) -> None:
    if not 1 <= count <= SHARD_COUNT_MAX or count & (count - 1):
        raise StorageError(f"storage.acid_shard_count must be a power of two from 1 to {SHARD_COUNT_MAX}, not {count}.")


def new_manifest(shard_count: int) -> Manifest:
    return Manifest(FORMAT, shard_count, ROUTING, uuid.uuid4().hex)


def read_manifest(root: Path) -> Manifest:
    path = root / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise StorageError(
            f"{path} is missing, and without it no stream can be found. Restore it from a backup of this store."
        ) from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error
    try:
        fields = msgspec.json.decode(text)
        if isinstance(fields, dict) and fields.get("format") != FORMAT:
            raise StorageError(f"{path} is of format {fields.get('format')}; this version reads format {FORMAT}.")
        manifest = msgspec.convert(fields, Manifest)
        uuid.UUID(hex=manifest.store_id)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StorageError(f"{path} is not a manifest of an acid store: {error}.") from error
    if manifest.routing != ROUTING:
        raise StorageError(f"{path} routes streams by {manifest.routing!r}; this version only knows {ROUTING!r}.")
    check_shard_count(manifest.shard_count)
    return manifest


def check_manifest(root: Path, manifest: Manifest, shard_count: int) -> None:
    """Refuse a store that was made with another shard count, and say the way out."""
    if manifest.shard_count != shard_count:
        raise StorageError(
            f"{root} was made with {manifest.shard_count} shards, and storage.acid_shard_count asks for"
            f" {shard_count}. A stream's shard follows from the count, so it cannot change in place: set it back"
            f" to {manifest.shard_count}, or move the streams to a new directory with `headwater store copy`."
        )


@contextmanager
def making(filesystem: Filesystem, root: Path) -> Iterator[Path]:
    """Where to put the parts of a store that is to be at `root`; it is there, whole and durable, when this ends."""
    unfinished = root.with_name(UNFINISHED)
    try:
        if unfinished.exists():
            # Left by a run that died before it could rename it, so nothing in it was ever acknowledged.
            shutil.rmtree(unfinished)
        filesystem.make_directory(unfinished)
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            if path.is_dir():
                filesystem.sync_directory(path)
        filesystem.replace(unfinished, root)
        filesystem.sync_directory(root.parent)
    except OSError as error:
        raise StorageError(f"{root} cannot be made: {error}") from error


def write_manifest(filesystem: Filesystem, root: Path, manifest: Manifest) -> None:
    """Its name is durable once the directory is synced."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    write_file(filesystem, root / MANIFEST, text)
