"""A shard: one LMDB environment with the streams that route to it, and the transaction that applies records to it.

    streams    id                  -> the state of a stream, without its producers
    producers  id, digest          -> the state of one producer of a stream
    data       id, byte position   -> a piece of a stream's bytes
    documents  digest of a key     -> a document
    graves     id                  -> a removed stream whose pieces are still being deleted
    (main)     ledger              -> the last record that the shard has, and the sum of all row checksums

Invariant: one transaction moves the ledger from record n to record m together with everything that the records between
them change here, so applying them again after a crash is harmless: records up to the ledger are skipped. The sum in
the ledger is checked when the rows are read at startup, so a row that is missing or out of date is found even if its
own checksum is right.
"""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import lmdb
import msgspec

from headwater.core.checksum import crc32
from headwater.core.producers import ProducerState
from headwater.core.records import Document, Image, Record
from headwater.storage.acid.applier import Applier
from headwater.storage.acid.environment import Databases, open_environment, reading, room_bytes, unused_bytes, writing
from headwater.storage.acid.layout import (
    FORMAT,
    ROUTING,
    AcidManifest,
    Mark,
    making,
    shard_of,
    shard_path,
    write_manifest,
    write_mark,
)
from headwater.storage.acid.pieces import KEY, DamagedPieceError, decode_piece
from headwater.storage.acid.rows import ID, DamagedRowError, crc_of, decode_document, decode_image, decode_producer
from headwater.storage.filesystem import DIRECTORY_MODE, Filesystem
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.journal.segments import Segment

REAPED_AT_ONCE: Final = 512
"""Rows and pieces of removed streams that one transaction deletes: about 32 MiB, some milliseconds."""

YIELD_EVERY: Final = 32
"""Records after which the thread releases the interpreter lock, so that the event loop does not wait for it."""

LEDGER_KEY: Final = b"\0ledger"
_LEDGER: Final = struct.Struct(">16sHQQ")
SUM_MASK: Final = 2**64 - 1


class ShardChange(NamedTuple):
    """The changes of one journal record to a shard."""

    record: Record | None
    removed: tuple[int, ...]


class Reached(NamedTuple):
    """The end of a stream's data in its shard."""

    stream_id: int
    shard: int
    end_index: int
    end_position: int


class Ledger(NamedTuple):
    lsn: int
    row_sum: int


class Shard:
    def __init__(
        self, path: Path, number: int, shard_count: int, map_bytes: int, store_id: bytes, *, readonly: bool = False
    ) -> None:
        self.path: Final = path
        self.number: Final = number
        self.map_bytes: Final = map_bytes
        self._shard_count = shard_count
        self._store_id = store_id
        self.environment: Final = open_environment(path, map_bytes, len(Databases._fields), readonly=readonly)
        try:
            with reading(path):
                self.databases: Final = Databases(
                    *(self.environment.open_db(name.encode(), create=False) for name in Databases._fields)
                )
                with self.environment.begin() as txn:
                    self.ledger = self.read_ledger(txn)
                    self.has_graves = txn.stat(self.databases.graves)["entries"] > 0
        except BaseException:
            self.environment.close()
            raise

    # -- writing, on the store's worker ----------------------------------------------------------------------------

    def apply(self, lsn: int, changes: Sequence[ShardChange]) -> list[Reached]:
        """Apply changes in one transaction and move the ledger to `lsn`; returns the streams that changed."""
        with writing(self.path), self.environment.begin(write=True, buffers=True) as txn:
            work = Applier(txn, self.databases, self.path)
            for number, (record, removed) in enumerate(changes):
                if not number % YIELD_EVERY:
                    time.sleep(0)
                if record is not None:
                    work.apply(record)
                for stream_id in removed:
                    work.remove(stream_id)
            streams = work.flush()
            more, reaped_sum = self._reap(txn, REAPED_AT_ONCE) if work.removed_ids else (self.has_graves, 0)
            ledger = Ledger(lsn, (self.ledger.row_sum + work.row_sum - reaped_sum) & SUM_MASK)
            self._put_ledger(txn, ledger)
        self.ledger = ledger
        self.has_graves = more
        return [Reached(stream.id, self.number, stream.message_index, stream.byte_position) for stream in streams]

    def reap(self) -> None:
        """Delete some more rows and pieces of removed streams."""
        with writing(self.path), self.environment.begin(write=True, buffers=True) as txn:
            more, reaped_sum = self._reap(txn, REAPED_AT_ONCE)
            ledger = Ledger(self.ledger.lsn, (self.ledger.row_sum - reaped_sum) & SUM_MASK)
            self._put_ledger(txn, ledger)
        self.ledger = ledger
        self.has_graves = more

    def trim(self, stream_id: int, byte_position: int) -> bool:
        """Delete some of the pieces that end at or before `byte_position`; True when none are left."""
        prefix = ID.pack(stream_id)
        with (
            writing(self.path),
            self.environment.begin(write=True, buffers=True) as txn,
            txn.cursor(self.databases.data) as cursor,
        ):
            found = cursor.set_range(prefix)
            for _ in range(REAPED_AT_ONCE):
                if not found or cursor.key()[: ID.size] != prefix or not _ends_by(byte_position, cursor, prefix):
                    return True
                found = cursor.delete() and bool(cursor.key())
        return False

    def _reap(self, txn: lmdb.Transaction[memoryview], budget: int) -> tuple[bool, int]:
        """Delete up to `budget` rows and pieces of removed streams.

        Returns whether graves are left, and the sum of the checksums of the deleted rows.
        """
        row_sum = 0
        with txn.cursor(self.databases.graves) as graves:
            while graves.first():
                prefix = bytes(graves.key())
                for database, is_row in ((self.databases.producers, True), (self.databases.data, False)):
                    with txn.cursor(database) as cursor:
                        found = cursor.set_range(prefix)
                        while found and cursor.key()[: ID.size] == prefix:
                            if not budget:
                                return True, row_sum
                            if is_row:
                                row_sum += crc_of(cursor.value())
                            found = cursor.delete() and bool(cursor.key())
                            budget -= 1
                graves.delete()
        return False, row_sum

    # -- reading back, at startup and by the offline tools ---------------------------------------------------------

    def states(self) -> Iterator[Image | Document]:
        """The state of every stream, and every document. Raises `CorruptError` where one is damaged, missing or old."""
        with reading(self.path), self.environment.begin(buffers=True) as txn:
            ledger = self.read_ledger(txn)
            row_sum = 0
            for crc, document in self._documents(txn):
                row_sum += crc
                yield document
            producers = self._producers(txn)
            waiting = next(producers, None)
            for crc, image in self._images(txn):
                row_sum += crc
                known: dict[str, ProducerState] = {}
                while waiting is not None and waiting[1] <= image.id:
                    producer_crc, stream_id, producer_id, state = waiting
                    row_sum += producer_crc
                    if stream_id == image.id:
                        known[producer_id] = state
                    waiting = next(producers, None)
                yield msgspec.structs.replace(image, producers=known) if known else image
            while waiting is not None:
                row_sum += waiting[0]
                waiting = next(producers, None)
            if row_sum & SUM_MASK != ledger.row_sum:
                raise CorruptError(
                    f"{self.path}: the state of one or more streams is missing or out of date (the sum over all of"
                    " them is wrong)."
                )

    def read_ledger(self, txn: lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]) -> Ledger:
        ledger = txn.get(LEDGER_KEY)
        if ledger is None or len(ledger) != 4 + _LEDGER.size or crc32(ledger[4:]) != crc_of(ledger):
            raise CorruptError(f"{self.path}: its ledger is missing or does not match its checksum.")
        store_id, number, lsn, row_sum = _LEDGER.unpack_from(ledger, 4)
        if store_id != self._store_id or number != self.number:
            raise StorageError(f"{self.path} belongs to another store, or is another shard; files were mixed up.")
        return Ledger(lsn, row_sum)

    def has_stream(self, stream_id: int) -> bool:
        with reading(self.path), self.environment.begin() as txn:
            return txn.get(ID.pack(stream_id), db=self.databases.streams) is not None

    def has_room(self, reserve_bytes: int) -> bool:
        with reading(self.path):
            return (
                unused_bytes(self.environment) >= reserve_bytes
                or room_bytes(self.environment, self.databases) >= reserve_bytes
            )

    def close(self) -> None:
        self.environment.close()

    def _images(self, txn: lmdb.Transaction[memoryview]) -> Iterator[tuple[int, Image]]:
        for key, row in self._rows(txn, self.databases.streams):
            try:
                image = decode_image(key, row)
            except (DamagedRowError, msgspec.MsgspecError) as error:
                raise CorruptError(f"{self.path}: the state of stream id {key.hex()} is damaged: {error}.") from error
            if shard_of(image.name, self._shard_count) != self.number:
                raise CorruptError(f"{self.path}: stream {image.name!r} does not belong to this shard.")
            yield crc_of(row), image

    def _producers(self, txn: lmdb.Transaction[memoryview]) -> Iterator[tuple[int, int, str, ProducerState]]:
        """Producers in the order of their streams."""
        for key, row in self._rows(txn, self.databases.producers):
            try:
                producer_id, state = decode_producer(key, row)
                stream_id: int = ID.unpack_from(key)[0]
            except (DamagedRowError, msgspec.MsgspecError, struct.error) as error:
                raise CorruptError(
                    f"{self.path}: a producer of stream id {key[: ID.size].hex()} is damaged: {error}."
                ) from error
            yield crc_of(row), stream_id, producer_id, state

    def _documents(self, txn: lmdb.Transaction[memoryview]) -> Iterator[tuple[int, Document]]:
        for key, row in self._rows(txn, self.databases.documents):
            try:
                document = decode_document(key, row)
            except (DamagedRowError, msgspec.MsgspecError) as error:
                raise CorruptError(f"{self.path}: document {key.hex()} is damaged: {error}.") from error
            yield crc_of(row), document

    def _rows(self, txn: lmdb.Transaction[memoryview], database: lmdb._Database) -> Iterator[tuple[bytes, memoryview]]:
        """Iterate over all rows of a database, and check their order and their number."""
        previous = b""
        count = 0
        with txn.cursor(database) as cursor:
            for view, row in cursor:
                key = bytes(view)
                if key <= previous:
                    raise CorruptError(f"{self.path}: rows are out of order at {key.hex()}.")
                previous = key
                count += 1
                yield key, row
        if count != txn.stat(database)["entries"]:
            raise CorruptError(f"{self.path}: {count} rows instead of {txn.stat(database)['entries']}.")

    def _put_ledger(self, txn: lmdb.Transaction[memoryview], ledger: Ledger) -> None:
        txn.put(LEDGER_KEY, _encode_ledger(self._store_id, self.number, ledger))


def _ends_by(byte_position: int, cursor: lmdb.Cursor[memoryview], prefix: bytes) -> bool:
    """Whether the piece under the cursor ends by `byte_position`; usually known from the start of the next piece."""
    key = bytes(cursor.key())
    if cursor.next():
        following = bytes(cursor.key())
        cursor.prev()
        if following[: ID.size] == prefix:
            return bool(KEY.unpack(following)[1] <= byte_position)
    else:
        cursor.last()
    try:
        return decode_piece(key, cursor.value()).end_position <= byte_position
    except DamagedPieceError:
        # Keep it: a read or a check reports it, and trimming must not fail because of it.
        return False


def make_store(filesystem: Filesystem, root: Path, shard_count: int, segment: Segment) -> None:
    """Create an empty store. Its journal must already exist, with this segment: a store without one is damaged."""
    manifest = AcidManifest(FORMAT, shard_count, ROUTING, uuid.uuid4().hex)
    with making(filesystem, root) as unfinished:
        for number in range(shard_count):
            make_shard(shard_path(unfinished, number), number, manifest.id_bytes)
        write_mark(filesystem, unfinished, manifest, Mark(0, segment.number, segment.salt, (0,) * shard_count))
        write_manifest(filesystem, unfinished, manifest)


def make_shard(path: Path, number: int, store_id: bytes) -> None:
    """Create an empty shard; its name is durable once the caller has synced the directory."""
    path.mkdir(mode=DIRECTORY_MODE)
    environment = open_environment(path, 1_048_576, len(Databases._fields), new=True)
    try:
        with writing(path), environment.begin(write=True) as txn:
            for name in Databases._fields:
                environment.open_db(name.encode(), txn)
            txn.put(LEDGER_KEY, _encode_ledger(store_id, number, Ledger(0, 0)))
    finally:
        environment.close()


def _encode_ledger(store_id: bytes, number: int, ledger: Ledger) -> bytes:
    content = _LEDGER.pack(store_id, number, *ledger)
    return crc32(content).to_bytes(4, "big") + content
