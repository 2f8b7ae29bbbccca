"""Apply records of the journal to a shard, in one transaction.

`Catalog.apply` decides what a record does to a stream, here on a catalog with only the streams that the
transaction touches. Then each of them is written once, for any number of records: its row, the producers that
changed, and its new bytes joined into pieces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

import lmdb
import msgspec

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create, Delete, Document, Evict, Image, Record, Retain, Touch
from headwater.storage.acid.environment import Databases
from headwater.storage.acid.pieces import KEY, PIECE_BYTES, DamagedPieceError, PieceWriter, decode_piece
from headwater.storage.acid.rows import (
    ID,
    DamagedRowError,
    crc_of,
    decode_image,
    decode_producer,
    document_key,
    encode_document,
    encode_image,
    encode_producer,
    producer_key,
)
from headwater.storage.arrival_times import TimeRun
from headwater.storage.interface import CorruptError


class _Touched:
    """A stream that the transaction changes."""

    __slots__ = ("added", "evicted", "producers_replaced", "row_crc", "start", "stream")

    def __init__(self, stream: StreamState, row_crc: int | None) -> None:
        self.stream = stream
        self.row_crc = row_crc
        """The checksum of its row in the shard, or None while it has none."""
        self.added: list[Append | Create] = []
        """The records with new bytes, in order."""
        self.start = (0, 0)
        """Message index and byte position at which the new bytes begin."""
        self.producers_replaced = False
        self.evicted: set[str] = set()
        """Producers whose rows are deleted, unless they append again."""


class _JoinedPiece(NamedTuple):
    """A piece that is written again, joined with the bytes after it."""

    start_index: int
    byte_position: int
    ends: list[int]
    times: list[TimeRun]
    body: bytes


class Applier:
    def __init__(self, txn: lmdb.Transaction[memoryview], databases: Databases, path: Path) -> None:
        self._txn = txn
        self._databases = databases
        self._path = path
        self._catalog: Catalog[StreamState] = Catalog(StreamState)
        self._touched: dict[int, _Touched] = {}
        self.row_sum = 0
        """The change of the sum of all row checksums."""
        self.removed_ids: Final[list[int]] = []

    def apply(self, record: Record) -> None:
        if type(record) is Append:
            touched = self._touch(record.id)
            stream = touched.stream
            if (stream.message_index, stream.byte_position) != (record.message_index, record.byte_position):
                raise CorruptError(
                    f"{self._path}: stream {stream.name!r} ends at {stream.tail}, and the journal continues at"
                    f" position {record.byte_position}: something between them is missing."
                )
            if record.producer_id is not None:
                self._load_producer(touched, record.producer_id)
            self._catalog.apply(record)
            if record.payload:
                self._add(touched, record.message_index, record.byte_position, record)
        elif type(record) is Create:
            self._create(record)
        elif type(record) is Delete:
            # The journal says what is removed permanently; otherwise forks keep the stream. The catalog here cannot
            # decide that, because it does not hold the forks.
            touched = self._touch(record.id)
            self._catalog.apply(msgspec.structs.replace(touched.stream.image(), deleted=True))
            touched.stream = self._catalog.by_id[record.id]
        elif type(record) is Image:
            self._replace(record)
        elif type(record) is Document:
            self._write_document(record)
        elif type(record) is Evict:
            self._touch(record.id).evicted.update(record.producer_ids)
            self._catalog.apply(record)
        else:
            assert type(record) is Touch or type(record) is Retain, f"no rule to apply {record!r}"
            self._touch(record.id)
            self._catalog.apply(record)

    def remove(self, stream_id: int) -> None:
        """Remove a stream permanently. Its pieces are deleted later, some in each transaction."""
        touched = self._touched.pop(stream_id, None)
        self._catalog.by_id.pop(stream_id, None)
        if touched is not None and touched.row_crc is None:
            return
        key = ID.pack(stream_id)
        row = self._txn.get(key, db=self._databases.streams)
        if row is None:
            raise CorruptError(f"{self._path}: stream id {key.hex()}, which a record removes, does not exist.")
        self.row_sum -= crc_of(row)
        self._txn.delete(key, db=self._databases.streams)
        self._txn.put(key, b"", db=self._databases.graves)
        self.removed_ids.append(stream_id)

    def flush(self) -> list[StreamState]:
        """Write what changed; returns the streams that were touched."""
        for stream_id in sorted(self._touched):
            touched = self._touched[stream_id]
            self._write_row(touched)
            self._write_producers(touched)
            if touched.added:
                self._write_bytes(touched)
        return [touched.stream for touched in self._touched.values()]

    def _touch(self, stream_id: int) -> _Touched:
        touched = self._touched.get(stream_id)
        if touched is not None:
            return touched
        key = ID.pack(stream_id)
        row = self._txn.get(key, db=self._databases.streams)
        if row is None:
            raise CorruptError(f"{self._path}: stream id {key.hex()} is in the journal but not in its shard.")
        try:
            image = decode_image(key, row)
        except (DamagedRowError, msgspec.MsgspecError) as error:
            raise CorruptError(f"{self._path}: the state of stream id {key.hex()} is damaged: {error}.") from error
        return self._install(image, crc_of(row))

    def _load_producer(self, touched: _Touched, producer_id: str) -> None:
        """Read a producer of the stream from the shard. Only producers that change are read and written."""
        stream = touched.stream
        if touched.row_crc is None or touched.producers_replaced or producer_id in (stream.producers or ()):
            return
        if producer_id in touched.evicted:
            return
        key = producer_key(stream.id, producer_id)
        row = self._txn.get(key, db=self._databases.producers)
        if row is None:
            return
        try:
            _, state = decode_producer(key, row)
        except (DamagedRowError, msgspec.MsgspecError) as error:
            raise CorruptError(
                f"{self._path}: producer {producer_id!r} of {stream.name!r} is damaged: {error}."
            ) from error
        if stream.producers is None:
            stream.producers = {}
        stream.producers[producer_id] = state

    def _install(self, image: Image, row_crc: int | None) -> _Touched:
        self._catalog.apply(image)
        touched = self._touched[image.id] = _Touched(self._catalog.by_id[image.id], row_crc)
        return touched

    def _create(self, record: Create) -> None:
        self._catalog.apply(record)
        stream = self._catalog.by_id[record.id]
        touched = self._touched[record.id] = _Touched(stream, None)
        if record.payload:
            self._add(touched, stream.base.message_index, stream.base.byte_position, record)

    def _replace(self, image: Image) -> None:
        """Install a complete state, which comes from a copy of another store, in place of the present one if there is
        one."""
        key = ID.pack(image.id)
        known = self._touched.get(image.id)
        if known is not None:
            row_crc = known.row_crc
        else:
            row = self._txn.get(key, db=self._databases.streams)
            row_crc = crc_of(row) if row is not None else None
        touched = self._install(image, row_crc)
        if known is not None:
            touched.added, touched.start = known.added, known.start
        touched.producers_replaced = True

    def _add(self, touched: _Touched, message_index: int, byte_position: int, record: Append | Create) -> None:
        if not touched.added:
            touched.start = (message_index, byte_position)
        touched.added.append(record)

    def _write_bytes(self, touched: _Touched) -> None:
        stream_id = touched.stream.id
        size = sum(len(record.payload) for record in touched.added)
        earlier = self._take_small_pieces(stream_id, *touched.start, size)
        message_index, byte_position = (
            (earlier[-1].start_index, earlier[-1].byte_position) if earlier else touched.start
        )

        def put(key: bytes, value: bytes) -> None:
            if not self._txn.put(key, value, db=self._databases.data, overwrite=False):
                raise CorruptError(f"{self._path}: stream {touched.stream.name!r} already has bytes after its end.")

        writer = PieceWriter(stream_id, message_index, byte_position, put)
        for piece in reversed(earlier):
            writer.add_piece(piece.ends, piece.times, piece.body)
        for record in touched.added:
            writer.add(record.payload, record.lengths, record.at_ms)
        writer.finish()

    def _take_small_pieces(
        self, stream_id: int, message_index: int, byte_position: int, size: int
    ) -> list[_JoinedPiece]:
        """Delete and return the pieces before the new bytes that are no larger than these, the newest first.

        They are written again, joined with the new bytes. So the pieces at the end of a stream at least double in size
        from one to the next older one: a reader finds few of them however many checkpoints wrote them, and a byte is
        written again at most as often as its piece can double.
        """
        taken: list[_JoinedPiece] = []
        with self._txn.cursor(self._databases.data) as cursor:
            found = cursor.prev() if cursor.set_range(KEY.pack(stream_id, byte_position)) else cursor.last()
            while found and cursor.key()[: ID.size] == ID.pack(stream_id):
                try:
                    piece = decode_piece(bytes(cursor.key()), cursor.value())
                    joins = (piece.end_index, piece.end_position) == (message_index, byte_position)
                    if not joins or len(piece.body) >= PIECE_BYTES or len(piece.body) > size:
                        break
                    times = piece.times.between(0, len(piece.ends))
                    body = bytes(piece.verified_body())
                    taken.append(_JoinedPiece(piece.start_index, piece.byte_position, list(piece.ends), times, body))
                except DamagedPieceError:
                    # Keep it: a copy would have a valid checksum. A read or a check reports it.
                    break
                message_index, byte_position = piece.start_index, piece.byte_position
                size += len(piece.body)
                cursor.delete()
                found = cursor.prev() if cursor.key() else cursor.last()
        return taken

    def _write_row(self, touched: _Touched) -> None:
        stream = touched.stream
        row = encode_image(msgspec.structs.replace(stream.image(), producers={}))
        self._txn.put(ID.pack(stream.id), row, db=self._databases.streams)
        self.row_sum += crc_of(row) - (touched.row_crc or 0)

    def _write_producers(self, touched: _Touched) -> None:
        stream = touched.stream
        producers = self._databases.producers
        if touched.producers_replaced and touched.row_crc is not None:
            self._drop_producers(stream.id)
        for producer_id in touched.evicted.difference(stream.producers or ()):
            self._drop_producer(producer_key(stream.id, producer_id))
        for producer_id, state in (stream.producers or {}).items():
            key = producer_key(stream.id, producer_id)
            before = self._txn.get(key, db=producers)
            if before is not None:
                self.row_sum -= crc_of(before)
            row = encode_producer(key, producer_id, state)
            self._txn.put(key, row, db=producers)
            self.row_sum += crc_of(row)

    def _write_document(self, document: Document) -> None:
        documents = self._databases.documents
        key = document_key(document.key)
        before = self._txn.get(key, db=documents)
        if before is not None:
            self.row_sum -= crc_of(before)
        if document.value is not None:
            row = encode_document(document)
            self._txn.put(key, row, db=documents)
            self.row_sum += crc_of(row)
        elif before is not None:
            self._txn.delete(key, db=documents)

    def _drop_producer(self, key: bytes) -> None:
        row = self._txn.get(key, db=self._databases.producers)
        if row is not None:
            self.row_sum -= crc_of(row)
            self._txn.delete(key, db=self._databases.producers)

    def _drop_producers(self, stream_id: int) -> None:
        prefix = ID.pack(stream_id)
        with self._txn.cursor(self._databases.producers) as cursor:
            found = cursor.set_range(prefix)
            while found and cursor.key()[: ID.size] == prefix:
                self.row_sum -= crc_of(cursor.value())
                found = cursor.delete() and bool(cursor.key())
