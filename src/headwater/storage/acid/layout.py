"""The files of an `acid` store: its directories, its manifest, its checkpoint file, and the shard of each stream.

    acid/manifest.json   format, shard count, routing, and the store's id
    acid/checkpoint      the last record that all shards have, and the first segment of the journal that is needed
    acid/shard-00/ …     LMDB: the streams whose name routes there
    log/                 the journal, as in the file modes
    acid/journal/        format 1 only: the journal as an LMDB database

Since format 3, pieces have the arrival times of their messages.

A stream's shard is `crc32(name as UTF-8) & (shard_count - 1)`, which any language can compute.
A store is created under another name and renamed when all of it is durable, so `acid/` is complete whenever it exists.
Invariant: a store is never opened with another shard count or routing than it was created with, or with a shard or
a checkpoint file of another store (each contains the store's id).
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from headwater.core.checksum import crc32
from headwater.storage.directory import replace_file, write_file
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import CorruptError, StorageError

DIRECTORY: Final = "acid"
UNFINISHED: Final = "acid.new"
MANIFEST: Final = "manifest.json"
CHECKPOINT: Final = "checkpoint"
FORMAT: Final = 3
FIRST_FORMAT: Final = 1
"""The format with the journal as an LMDB database; read and upgraded, never written."""
_OLD_MANIFEST: Final = "manifest-1.json"
ROUTING: Final = "crc32"
SHARD_COUNT_MAX: Final = 256


class AcidManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters with which a store was created."""

    format: int
    shard_count: int
    routing: str
    store_id: str

    @property
    def id_bytes(self) -> bytes:
        return uuid.UUID(hex=self.store_id).bytes


def shard_of(name: str, shard_count: int) -> int:
    """The shard that holds a stream."""
    return crc32(name.encode("utf-8", "surrogatepass")) & (shard_count - 1)


def shard_path(root: Path, shard: int) -> Path:
    return root / f"shard-{shard:02x}"


def old_journal_path(root: Path) -> Path:
    return root / "journal"


def check_shard_count(count: int) -> None:
    if not 1 <= count <= SHARD_COUNT_MAX or count & (count - 1):
        raise StorageError(f"storage.acid_shard_count must be a power of two from 1 to {SHARD_COUNT_MAX}, not {count}.")


def read_manifest(root: Path) -> AcidManifest:
    path = root / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise StorageError(
            f"{path} is missing; streams cannot be found without it. Restore it from a backup of this store."
        ) from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error
    try:
        fields = msgspec.json.decode(text)
        if isinstance(fields, dict) and fields.get("format") not in range(FIRST_FORMAT, FORMAT + 1):
            raise StorageError(
                f"{path} has format {fields.get('format')}; this Headwater reads formats {FIRST_FORMAT} to {FORMAT}."
                " Open it with the Headwater that wrote it."
            )
        manifest = msgspec.convert(fields, AcidManifest)
        uuid.UUID(hex=manifest.store_id)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StorageError(f"{path} is not a manifest of an acid store: {error}.") from error
    if manifest.routing != ROUTING:
        raise StorageError(f"{path} routes streams by {manifest.routing!r}; this version only knows {ROUTING!r}.")
    check_shard_count(manifest.shard_count)
    return manifest


def check_manifest(root: Path, manifest: AcidManifest, shard_count: int) -> None:
    """Refuse a store that was created with another shard count; the error says what to do."""
    if manifest.shard_count != shard_count:
        raise StorageError(
            f"{root} was made with {manifest.shard_count} shards, and storage.acid_shard_count is"
            f" {shard_count}. A stream's shard follows from the count, so it cannot change in place: set it back"
            f" to {manifest.shard_count}, or move the streams to a new directory with `headwater store copy`."
        )


@contextmanager
def making(filesystem: Filesystem, root: Path) -> Iterator[Path]:
    """Yield a directory for the parts of a new store; at the end sync it and rename it to `root`."""
    unfinished = root.with_name(UNFINISHED)
    try:
        if unfinished.exists():
            # Left by a process that died before it could rename it: nothing in it was acknowledged.
            shutil.rmtree(unfinished)
        filesystem.make_directory(unfinished)
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            if path.is_dir():
                filesystem.sync_directory(path)
        filesystem.replace(unfinished, root)
        filesystem.sync_directory(root.parent)
    except OSError as error:
        raise StorageError(f"{root} cannot be created: {error}") from error


def write_manifest(filesystem: Filesystem, root: Path, manifest: AcidManifest, name: str = MANIFEST) -> None:
    """Write the manifest; its name is durable once the caller has synced the directory."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    write_file(filesystem, root / name, text)


# -- the checkpoint file -----------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """The content of the checkpoint file."""

    lsn: int
    """Every shard has every record up to this one."""
    segment: int
    """The journal is needed from this segment on."""
    salt: int
    """The salt of that segment; the journal of another store has a different one."""
    shard_lsns: tuple[int, ...]
    """The last record of each shard. A shard that is found before its record was replaced by an older copy."""


_Packed: TypeAlias = tuple[bytes, int, int, int, tuple[int, ...]]
_encode_mark: Final = msgspec.msgpack.Encoder().encode
_decode_mark: Final = msgspec.msgpack.Decoder(_Packed).decode


def write_mark(filesystem: Filesystem, root: Path, manifest: AcidManifest, mark: Mark) -> None:
    """Replace the checkpoint file; it is durable when this returns."""
    content = _encode_mark((manifest.id_bytes, *mark))
    replace_file(filesystem, root / CHECKPOINT, crc32(content).to_bytes(4, "big") + content)


def read_mark(root: Path, manifest: AcidManifest) -> Mark:
    path = root / CHECKPOINT
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptError(f"{path} is missing. Restore the store from a backup.") from None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}.") from error
    if len(data) <= 4 or crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise CorruptError(f"{path} does not match its checksum.")
    try:
        store_id, lsn, segment, salt, shard_lsns = _decode_mark(data[4:])
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{path} cannot be decoded: {error}.") from error
    if store_id != manifest.id_bytes or len(shard_lsns) != manifest.shard_count:
        raise StorageError(f"{path} belongs to another store; its files were mixed up.")
    return Mark(lsn, segment, salt, shard_lsns)


# -- from earlier formats ----------------------------------------------------------------------------------------------


def upgrade_manifest(filesystem: Filesystem, root: Path, manifest: AcidManifest) -> AcidManifest:
    """Upgrade the manifest to the current format, which older versions refuse.

    The manifest of format 1 stays as a hard link, until its journal is removed.
    """
    old = root / _OLD_MANIFEST
    if manifest.format == FIRST_FORMAT and not old.exists():
        filesystem.link(root / MANIFEST, old)
    upgraded = msgspec.structs.replace(manifest, format=FORMAT)
    text = msgspec.json.format(msgspec.json.encode(upgraded), indent=2) + b"\n"
    replace_file(filesystem, root / MANIFEST, text)
    return upgraded


def remove_old_format(filesystem: Filesystem, root: Path) -> None:
    """Remove the files of format 1 that an upgrade kept, if there are any."""
    old = root / _OLD_MANIFEST
    if old.exists():
        shutil.rmtree(old_journal_path(root), ignore_errors=True)
        filesystem.unlink(old)
