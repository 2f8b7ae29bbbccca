"""The journal of format 1, an LMDB database: read to upgrade a store, never written.

An entry is stored under its sequence number: 1, 2, 3 … without a gap. Entry 0 is the header: how far entries have been
trimmed, and how far each shard was at that time. Sequence numbers continue as record numbers in format 2.

LMDB keeps the last two commits, each with a meta page that points to its tree, and opens the one with the higher
number. The meta pages have no checksum, so a flipped bit in such a number would silently restore the commit before
the last. Both trees are therefore compared: the last key of the tree that LMDB ignores must not be the higher one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from headwater.core.checksum import crc32
from headwater.core.records import Record
from headwater.storage.acid.environment import open_environment, reading
from headwater.storage.acid.shard import Shard
from headwater.storage.interface import CorruptError, StorageError

MAP_BYTES: Final = 2**40
"""Address space: enough for any journal that an earlier version wrote."""

_KEY: Final = struct.Struct(">Q")
_HEADER_KEY: Final = _KEY.pack(0)
_HEADER: Final = struct.Struct(">16sQH")


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """A record with the shard of its stream, and the removed streams each with its shard."""

    shard: int
    record: Record
    removed: tuple[tuple[int, int], ...] = ()


_decoder: Final = msgspec.msgpack.Decoder(list[Routed])


class OldJournal:
    def __init__(self, path: Path, store_id: bytes, shard_count: int) -> None:
        self.path: Final = path
        self._store_id = store_id
        self._shard_count = shard_count
        self._environment: Final = open_environment(path, MAP_BYTES, 0, readonly=True)
        try:
            self.trimmed_seq, self.shard_seqs, self.last_seq = self._read_header()
            self._check_newest()
        except BaseException:
            self._environment.close()
            raise

    def entries(self) -> Iterator[tuple[int, list[Routed]]]:
        """Every entry that is left, oldest first. Raises `CorruptError` at a gap or a failed checksum."""
        with reading(self.path), self._environment.begin(buffers=True) as txn, txn.cursor() as cursor:
            expected = self.trimmed_seq
            if cursor.set_range(_KEY.pack(1)):
                for key, value in cursor:
                    expected += 1
                    if bytes(key) != _KEY.pack(expected):
                        raise CorruptError(f"{self.path}: entry {expected} is missing.")
                    yield expected, self._decode(expected, value)
            if expected != self.last_seq:
                raise CorruptError(f"{self.path}: entries end at {expected} instead of {self.last_seq}.")

    def check_same_age(self, shards: Iterable[Shard]) -> None:
        """Refuse shards that are older than the journal has seen them, and a journal that is older than they are."""
        for shard, seen in zip(shards, self.shard_seqs, strict=True):
            if not seen <= shard.ledger.lsn <= self.last_seq:
                raise CorruptError(
                    f"{shard.path} is at entry {shard.ledger.lsn}, which does not fit the journal (seen at {seen}, ends"
                    f" at {self.last_seq}): one of them is from an older copy, or damaged. Restore all of the store"
                    " from one backup."
                )

    def close(self) -> None:
        self._environment.close()

    def _read_header(self) -> tuple[int, tuple[int, ...], int]:
        with reading(self.path), self._environment.begin() as txn, txn.cursor() as cursor:
            header = txn.get(_HEADER_KEY)
            if header is None:
                raise CorruptError(f"{self.path} has no header: it is damaged, or was emptied.")
            trimmed, shard_seqs = self._decode_header(header)
            cursor.last()
            last_key = cursor.key()
            if len(last_key) != _KEY.size:
                raise CorruptError(f"{self.path}: an entry is stored under a key of the wrong size.")
            last_seq: int = max(_KEY.unpack(last_key)[0], trimmed)
        return trimmed, shard_seqs, last_seq

    def _decode_header(self, header: bytes) -> tuple[int, tuple[int, ...]]:
        size = _HEADER.size + 8 * self._shard_count
        if len(header) != 4 + size or crc32(header[4:]) != int.from_bytes(header[:4], "big"):
            raise CorruptError(f"{self.path}: its header does not match its checksum.")
        store_id, trimmed, _count = _HEADER.unpack_from(header, 4)
        if store_id != self._store_id:
            raise StorageError(f"{self.path} belongs to another store; its files were mixed up.")
        return trimmed, struct.unpack_from(f">{self._shard_count}Q", header, 4 + _HEADER.size)

    def _decode(self, seq: int, value: memoryview) -> list[Routed]:
        body = value[4:]
        if len(value) < 5 or crc32(body, crc32(_KEY.pack(seq))) != int.from_bytes(value[:4], "big"):
            raise CorruptError(f"{self.path}: entry {seq} does not match its checksum.")
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptError(f"{self.path}: entry {seq} cannot be decoded: {error}") from error

    def _check_newest(self) -> None:
        key = _hidden_key(self.path)
        if key is not None and key > _KEY.pack(self.last_seq):
            raise CorruptError(
                f"{self.path}: its newest entry ({key.hex()}) exists but is hidden, because a meta page of LMDB is"
                " damaged. Restore the store from a backup."
            )


_PAGE: Final = struct.Struct("<QHHHH")
_META: Final = struct.Struct("<IIQQ48sIHHQQQQQQQ")
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH: Final = 1
_LEAF: Final = 2
_NODE: Final = struct.Struct("<HHHH")
_DEPTH_MAX: Final = 32


class _Meta(NamedTuple):
    txn: int
    root: int
    page_size: int


def _hidden_key(path: Path) -> bytes | None:
    """The last key of the commit that LMDB ignores if it is the higher one, else None.

    It assumes the layout of format 0.9 on a 64-bit little-endian machine, and returns None for any other.
    """
    with (path / "data.mdb").open("rb") as file:
        first = _read_meta(file, 0, 4096)
        second = _read_meta(file, first.page_size, first.page_size) if first is not None else None
        if first is None or second is None:
            return None
        newer, older = (first, second) if first.txn >= second.txn else (second, first)
        try:
            ignored, opened = _last_key(file, older), _last_key(file, newer)
        except (struct.error, ValueError, OSError):
            # Damage in the commit that LMDB opens is found by LMDB or by our checksums.
            return None
    return ignored if ignored > opened else None


def _read_meta(file: BinaryIO, offset: int, page_size: int) -> _Meta | None:
    file.seek(offset)
    page = file.read(page_size)
    if len(page) < _PAGE.size + _META.size:
        return None
    magic, version, _, _, _, _, _, _, _, _, _, _, root, _, txn = _META.unpack_from(page, _PAGE.size)
    if magic != _MAGIC or version != _VERSION:
        return None
    # The page size is stored in the field `pad` of the free list.
    (size,) = struct.unpack_from("<I", page, _PAGE.size + 24)
    return _Meta(txn, root, size)


def _last_key(file: BinaryIO, meta: _Meta) -> bytes:
    """Follow the last child of every page; raises where a page is invalid."""
    number = meta.root
    for _ in range(_DEPTH_MAX):
        file.seek(number * meta.page_size)
        page = file.read(meta.page_size)
        own_number, _, flags, lower, _ = _PAGE.unpack_from(page)
        keys = (lower - _PAGE.size) // 2
        if own_number != number or keys < 1:
            raise ValueError("not a page of this tree")
        (at,) = struct.unpack_from("<H", page, _PAGE.size + 2 * (keys - 1))
        low, high, node_flags, key_size = _NODE.unpack_from(page, at)
        if flags & _LEAF:
            key = page[at + _NODE.size : at + _NODE.size + key_size]
            if len(key) != key_size:
                raise ValueError("a key that exceeds its page")
            return key
        if not flags & _BRANCH:
            raise ValueError("neither branch nor leaf")
        number = low | high << 16 | node_flags << 32
    raise ValueError("a tree that is too deep")
