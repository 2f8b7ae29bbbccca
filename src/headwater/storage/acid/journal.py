"""The journal: where a batch becomes durable, in one LMDB transaction, whichever shards it touches.

An entry is filed under its sequence number: 1, 2, 3 … without a gap. Entry 0 is the header: how far entries have been
trimmed, and how far each shard had come by then. Entries are trimmed only when every shard that they touch has them
durably, and in the transaction of some later batch, so trimming costs no sync of its own.

Why a journal at all: a commit costs two flushes of the disk, and a batch of 32 connections touches most of 16 shards.
One transaction here instead of one in each shard is what keeps `acid` near the speed of the log (bench/acid_commit.py
has the numbers), and makes a batch atomic across shards, which a removal that cascades through forks needs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
import msgspec

from headwater.core.records import Append, Create, Record
from headwater.storage.acid.environment import open_environment, reading, room_bytes, unused_bytes, writing
from headwater.storage.acid.meta_pages import hidden_key
from headwater.storage.filesystem import DIRECTORY_MODE
from headwater.storage.interface import CorruptError, StorageError

ENTRY_BYTES: Final = 1_048_576
"""A batch with more payload than this becomes several entries of the same transaction."""
TRIMMED_AT_ONCE: Final = 8
"""Entries removed along with a batch, whenever so many have reached their shards: more than batches add, and few. Each
is a call in which py-lmdb lets go of the interpreter lock, and a busy event loop may be slow to give it back."""

_KEY: Final = struct.Struct(">Q")
_HEADER_KEY: Final = _KEY.pack(0)
_HEADER: Final = struct.Struct(">16sQH")


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """A record with the shard of its stream, and the removed incarnations each with theirs."""

    shard: int
    record: Record
    removed: tuple[tuple[int, int], ...] = ()


class Mark(NamedTuple):
    """How far the shards have come: all of them up to `seq`, each up to its own number at least."""

    seq: int
    shard_seqs: tuple[int, ...]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[Routed])


class Journal:
    def __init__(
        self, path: Path, map_bytes: int, store_id: bytes, shard_count: int, *, readonly: bool = False
    ) -> None:
        self.path: Final = path
        self.map_bytes: Final = map_bytes
        self._store_id = store_id
        self._shard_count = shard_count
        self.environment: Final = open_environment(path, map_bytes, 0, readonly=readonly)
        try:
            self.mark, self.last_seq = self._read_header()
            if not readonly:
                self._check_newest()
        except BaseException:
            self.environment.close()
            raise

    def write(self, batch: Sequence[Routed], mark: Mark) -> int:
        """Make a batch durable and trim what the shards have; returns the sequence number of its last entry."""
        seq = self.last_seq
        trims = mark.seq - self.mark.seq >= TRIMMED_AT_ONCE
        trimmed_to = self.mark.seq + TRIMMED_AT_ONCE
        with writing(self.path), self.environment.begin(write=True) as txn:
            for entry in _entries_of(batch):
                seq += 1
                txn.put(_KEY.pack(seq), _encode(seq, entry), append=True)
            if trims:
                self._trim(txn, trimmed_to, mark)
        self.last_seq = seq
        if trims:
            self.mark = Mark(trimmed_to, mark.shard_seqs)
        return seq

    def trim(self, mark: Mark) -> None:
        """Trim all that the shards have, in a transaction of its own."""
        if mark == self.mark:
            return
        with writing(self.path), self.environment.begin(write=True) as txn:
            self._trim(txn, mark.seq, mark)
        self.mark = mark

    def entries(self) -> Iterator[tuple[int, list[Routed]]]:
        """Every entry that is left, oldest first. Raises `CorruptError` at a gap or a failed checksum."""
        with reading(self.path), self.environment.begin(buffers=True) as txn, txn.cursor() as cursor:
            expected = self.mark.seq
            if cursor.set_range(_KEY.pack(1)):
                for key, value in cursor:
                    expected += 1
                    if bytes(key) != _KEY.pack(expected):
                        raise CorruptError(f"{self.path}: entry {expected} is missing.")
                    yield expected, self._decode(expected, value)
            if expected != self.last_seq:
                raise CorruptError(f"{self.path}: entries end at {expected} instead of {self.last_seq}.")

    def read_mark(self, txn: lmdb.Transaction[bytes]) -> Mark:
        """How far the journal is trimmed, and the shards were by then, as a transaction sees it."""
        header = txn.get(_HEADER_KEY)
        if header is None:
            raise CorruptError(f"{self.path} has no header: it is damaged, or was emptied.")
        return self._decode_header(header)

    def has_room(self, reserve_bytes: int) -> bool:
        with reading(self.path):
            return unused_bytes(self.environment) >= reserve_bytes or room_bytes(self.environment, ()) >= reserve_bytes

    def close(self) -> None:
        self.environment.close()

    def _trim(self, txn: lmdb.Transaction, to: int, mark: Mark) -> None:
        for seq in range(self.mark.seq + 1, to + 1):
            if not txn.delete(_KEY.pack(seq)):
                raise CorruptError(f"{self.path}: entry {seq} is missing.")
        txn.put(_HEADER_KEY, _encode_header(self._store_id, Mark(to, mark.shard_seqs)))

    def _read_header(self) -> tuple[Mark, int]:
        with reading(self.path), self.environment.begin() as txn, txn.cursor() as cursor:
            mark = self.read_mark(txn)
            cursor.last()
            last_key = cursor.key()
            if len(last_key) != _KEY.size:
                raise CorruptError(f"{self.path}: an entry is filed under a key of the wrong size.")
            last_seq: int = max(_KEY.unpack(last_key)[0], mark.seq)
        return mark, last_seq

    def _check_newest(self) -> None:
        """While nobody writes: LMDB has opened the newest of the two commits that its file holds."""
        key = hidden_key(self.path)
        if key is not None and key > _KEY.pack(self.last_seq):
            raise CorruptError(
                f"{self.path}: its newest entry ({key.hex()}) is there but hidden, because a page that LMDB begins"
                " with is damaged. Restore the store from a backup."
            )

    def _decode_header(self, header: bytes) -> Mark:
        size = _HEADER.size + 8 * self._shard_count
        if len(header) != 4 + size or zlib.crc32(header[4:]) != int.from_bytes(header[:4], "big"):
            raise CorruptError(f"{self.path}: its header does not match its checksum.")
        store_id, trimmed, _count = _HEADER.unpack_from(header, 4)
        if store_id != self._store_id:
            raise StorageError(f"{self.path} belongs to another store; its files were mixed up.")
        return Mark(trimmed, struct.unpack_from(f">{self._shard_count}Q", header, 4 + _HEADER.size))

    def _decode(self, seq: int, value: memoryview) -> list[Routed]:
        body = value[4:]
        if len(value) < 5 or zlib.crc32(body, zlib.crc32(_KEY.pack(seq))) != int.from_bytes(value[:4], "big"):
            raise CorruptError(f"{self.path}: entry {seq} does not match its checksum.")
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise CorruptError(f"{self.path}: entry {seq} cannot be decoded: {error}") from error


def make_journal(path: Path, store_id: bytes, shard_count: int) -> None:
    """A journal with nothing in it, durable but for its name."""
    path.mkdir(mode=DIRECTORY_MODE)
    environment = open_environment(path, 1_048_576, 0, new=True)
    try:
        with writing(path), environment.begin(write=True) as txn:
            txn.put(_HEADER_KEY, _encode_header(store_id, Mark(0, (0,) * shard_count)))
    finally:
        environment.close()


def _encode_header(store_id: bytes, mark: Mark) -> bytes:
    count = len(mark.shard_seqs)
    header = _HEADER.pack(store_id, mark.seq, count) + struct.pack(f">{count}Q", *mark.shard_seqs)
    return zlib.crc32(header).to_bytes(4, "big") + header


def _encode(seq: int, entry: Sequence[Routed]) -> bytearray:
    value = bytearray(4)
    _encoder.encode_into(entry, value, 4)
    value[:4] = zlib.crc32(memoryview(value)[4:], zlib.crc32(_KEY.pack(seq))).to_bytes(4, "big")
    return value


def _entries_of(batch: Sequence[Routed]) -> Iterator[Sequence[Routed]]:
    begin = size = 0
    for at, routed in enumerate(batch):
        record = routed.record
        if type(record) is Append or type(record) is Create:
            if size and size + len(record.payload) > ENTRY_BYTES:
                yield batch[begin:at]
                begin, size = at, 0
            size += len(record.payload)
    yield batch[begin:] if begin else batch
