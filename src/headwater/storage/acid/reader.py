"""Read the bytes of a stream from its shard: boundaries, lengths and ranges, all verified.

Every call is one short read transaction; its result is copied, because LMDB may reuse a page when the transaction
that sees it has ended. Invariant: the pieces that are read follow each other without a gap, and each belongs to the
stream and matches its checksum, or the call raises `CorruptError` with the stream's name and the byte position.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

import lmdb
import msgspec

from headwater.core.records import Image
from headwater.storage.acid.environment import reading
from headwater.storage.acid.pieces import KEY, DamagedPieceError, StoredPiece, decode_piece
from headwater.storage.acid.rows import ID, DamagedRowError, decode_image
from headwater.storage.acid.shard import Shard
from headwater.storage.arrival_times import TimeRun
from headwater.storage.extents import Extent
from headwater.storage.interface import CorruptError, StorageError

_AFTER_ANY_POSITION: Final = b"\xff" * 9


class ShardRun:
    """The bytes of one stream in a shard, as stream data reads them."""

    __slots__ = ("_reader", "_stream_id", "end_index", "end_position")

    def __init__(self, reader: ShardReader, stream_id: int, extent: Extent) -> None:
        self._reader = reader
        self._stream_id = stream_id
        self.end_index = extent.end_index
        self.end_position = extent.end_position

    def boundary(self, message_index: int) -> int | None:
        return self._reader.boundary(self._stream_id, message_index) if message_index <= self.end_index else None

    def cut(self, message_index: int, byte_position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        return self._reader.cut(self._stream_id, message_index, byte_position, end_index, max_bytes)

    def lengths(self, message_index: int, end_index: int) -> list[int]:
        return self._reader.lengths(self._stream_id, message_index, end_index)

    def arrivals(self, message_index: int, end_index: int) -> list[TimeRun]:
        return self._reader.arrivals(self._stream_id, message_index, end_index)

    def first_since(self, at_ms: int) -> int:
        return min(self._reader.first_since(self._stream_id, at_ms), self.end_index)

    def read(self, byte_position: int, end_position: int) -> list[bytes]:
        return self._reader.read(self._stream_id, byte_position, end_position)


class ShardReader:
    def __init__(self, shard: Shard) -> None:
        self._shard: Final = shard
        self._environment: Final = shard.environment
        self._data: Final = shard.databases.data

    def read(self, stream_id: int, byte_position: int, end_position: int) -> list[bytes]:
        """The bytes of a range that is entirely in this shard."""
        parts: list[bytes] = []
        with reading(self._shard.path), self._environment.begin(buffers=True) as txn:
            for piece in self._walk(txn, stream_id, byte_position):
                try:
                    body = piece.verified_body()
                except DamagedPieceError as error:
                    raise self._corrupt(txn, stream_id, piece.byte_position, error) from error
                begin = byte_position - piece.byte_position
                if piece.end_position >= end_position:
                    parts.append(bytes(body[begin : end_position - piece.byte_position]))
                    break
                parts.append(bytes(body[begin:]))
                byte_position = piece.end_position
        return parts

    def cut(
        self, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        """The last boundary within `max_bytes` of (message_index, byte_position), at least one message further, at most
        `end_index`."""
        limit = byte_position + max_bytes
        best = (message_index, byte_position)
        with reading(self._shard.path), self._environment.begin(buffers=True) as txn:
            for piece in self._walk(txn, stream_id, byte_position):
                low = max(best[0] - piece.start_index, 0)
                high = min(end_index - piece.start_index, len(piece.ends))
                at = bisect_right(piece.ends, limit - piece.byte_position, low, high)
                if at == low and best[0] == message_index and low < high:
                    at = low + 1
                if at > low:
                    best = (piece.start_index + at, piece.byte_position + piece.ends[at - 1])
                if best[0] == end_index or (piece.end_position >= limit and best[0] > message_index):
                    break
        return best

    def lengths(self, stream_id: int, message_index: int, end_index: int) -> list[int]:
        """The lengths of the messages from `message_index` to `end_index`, all of which are in this shard."""
        lengths: list[int] = []
        with reading(self._shard.path), self._environment.begin(buffers=True) as txn:
            last = self._find(txn, stream_id, message_index)
            if last is None:
                raise self._missing(txn, stream_id, message_index)
            for piece in self._walk(txn, stream_id, last):
                low = max(message_index + len(lengths) - piece.start_index, 0)
                for end in piece.ends[low : end_index - piece.start_index]:
                    lengths.append(piece.byte_position + end - last)
                    last = piece.byte_position + end
                if message_index + len(lengths) == end_index:
                    break
        return lengths

    def arrivals(self, stream_id: int, message_index: int, end_index: int) -> list[TimeRun]:
        """The arrival times of the messages from `message_index` to `end_index`, all of which are in this shard."""
        runs: list[TimeRun] = []
        with reading(self._shard.path), self._environment.begin(buffers=True) as txn:
            byte_position = self._find(txn, stream_id, message_index)
            if byte_position is None:
                raise self._missing(txn, stream_id, message_index)
            for piece in self._walk(txn, stream_id, byte_position):
                if message_index >= piece.start_index:
                    end = min(end_index, piece.end_index)
                    runs += piece.times.between(message_index - piece.start_index, end - piece.start_index)
                    message_index = max(message_index, end)
                if message_index >= end_index:
                    break
        return runs

    def first_since(self, stream_id: int, at_ms: int) -> int:
        """The index of the first message that arrived at `at_ms` or later; the end of the stream if there is none."""
        with reading(self._shard.path), self._environment.begin(buffers=True) as txn, txn.cursor(self._data) as cursor:
            first, last = self._first(txn, cursor, stream_id), self._last(txn, cursor, stream_id)
            if first is None or last is None:
                return self._image(txn, stream_id).message_index
            low, high = first.start_index, last.end_index
            while low < high:
                piece = self._ending(txn, cursor, stream_id, (low + high) // 2 + 1, first, last)
                found = piece.start_index + piece.times.first_since(at_ms)
                if found == piece.end_index:
                    low = found
                elif found > piece.start_index:
                    return found
                else:
                    high = found
            return low

    def boundary(self, stream_id: int, message_index: int) -> int | None:
        """The byte position after `message_index` messages; None outside what this shard has of the stream."""
        with reading(self._shard.path), self._environment.begin(buffers=True) as txn:
            byte_position = self._find(txn, stream_id, message_index)
            if byte_position is not None:
                return byte_position
            image = self._image(txn, stream_id)
            if message_index == image.message_index:
                # A stream without its own bytes, or with all of them trimmed.
                return image.byte_position
            base_index = image.fork.message_index if image.fork is not None else 0
            if max(base_index, image.retained_index) <= message_index < image.message_index:
                raise self._missing(txn, stream_id, message_index)
            return None

    def name_of(self, stream_id: int) -> str | None:
        """The name of a stream, if its state can be read."""
        try:
            with reading(self._shard.path), self._environment.begin(buffers=True) as txn:
                return self._image(txn, stream_id).name
        except StorageError:
            return None

    # -- implementation --------------------------------------------------------------------------------------------

    def _find(self, txn: lmdb.Transaction[memoryview], stream_id: int, message_index: int) -> int | None:
        """The byte position after `message_index` messages according to the pieces; None if they do not cover it."""
        with txn.cursor(self._data) as cursor:
            first = self._first(txn, cursor, stream_id)
            last = self._last(txn, cursor, stream_id)
            if first is None or last is None or not first.start_index <= message_index <= last.end_index:
                return None
            if message_index == first.start_index:
                return first.byte_position
            piece = self._ending(txn, cursor, stream_id, message_index, first, last)
            return piece.byte_position + piece.ends[message_index - piece.start_index - 1]

    def _ending(
        self,
        txn: lmdb.Transaction[memoryview],
        cursor: lmdb.Cursor[memoryview],
        stream_id: int,
        message_index: int,
        first: StoredPiece,
        last: StoredPiece,
    ) -> StoredPiece:
        """The piece in which the message before `message_index` ends.

        A search over positions: guesses in proportion and in the middle alternate, so that messages of equal size cost
        a few seeks, and no stream costs more than twice the logarithm of its length.
        """
        low, low_index = first.byte_position, first.start_index
        high, high_index = last.end_position, last.end_index
        proportional = True
        while low < high:
            middle = (low + high) // 2
            if proportional:
                middle = low + (high - low) * (message_index - low_index) // max(high_index - low_index, 1)
                middle = min(max(middle, low), high - 1)
            proportional = not proportional
            piece = self._at(txn, cursor, stream_id, middle)
            if message_index <= piece.start_index:
                high, high_index = piece.byte_position, piece.start_index
            elif message_index > piece.end_index:
                low, low_index = piece.end_position, piece.end_index
            else:
                return piece
        raise self._missing(txn, stream_id, message_index)

    def _walk(self, txn: lmdb.Transaction[memoryview], stream_id: int, byte_position: int) -> Iterator[StoredPiece]:
        """Iterate over the pieces from the one with `byte_position`, without end; a missing piece is an error."""
        with txn.cursor(self._data) as cursor:
            piece = self._at(txn, cursor, stream_id, byte_position)
            while True:
                yield piece
                byte_position, message_index = piece.end_position, piece.end_index
                following = self._next(txn, cursor, stream_id)
                if (
                    following is None
                    or following.byte_position != byte_position
                    or following.start_index != message_index
                ):
                    raise self._corrupt(txn, stream_id, byte_position, "the piece that begins there is missing")
                piece = following

    def _at(
        self, txn: lmdb.Transaction[memoryview], cursor: lmdb.Cursor[memoryview], stream_id: int, byte_position: int
    ) -> StoredPiece:
        """The piece that contains the byte at `byte_position`."""
        key = KEY.pack(stream_id, byte_position)
        found = cursor.set_range(key)
        if not found:
            found = cursor.last()
        elif cursor.key() != key:
            found = cursor.prev()
        piece = self._current(txn, cursor, stream_id, byte_position) if found else None
        if piece is None or not piece.byte_position <= byte_position < piece.end_position:
            raise self._corrupt(txn, stream_id, byte_position, "the piece that contains it is missing")
        return piece

    def _first(
        self, txn: lmdb.Transaction[memoryview], cursor: lmdb.Cursor[memoryview], stream_id: int
    ) -> StoredPiece | None:
        return self._current(txn, cursor, stream_id, 0) if cursor.set_range(KEY.pack(stream_id, 0)) else None

    def _last(
        self, txn: lmdb.Transaction[memoryview], cursor: lmdb.Cursor[memoryview], stream_id: int
    ) -> StoredPiece | None:
        beyond = cursor.set_range(ID.pack(stream_id) + _AFTER_ANY_POSITION)
        found = cursor.prev() if beyond else cursor.last()
        return self._current(txn, cursor, stream_id, 0) if found else None

    def _next(
        self, txn: lmdb.Transaction[memoryview], cursor: lmdb.Cursor[memoryview], stream_id: int
    ) -> StoredPiece | None:
        return self._current(txn, cursor, stream_id, 0) if cursor.next() else None

    def _current(
        self, txn: lmdb.Transaction[memoryview], cursor: lmdb.Cursor[memoryview], stream_id: int, byte_position: int
    ) -> StoredPiece | None:
        """The piece under the cursor, or None when it is another stream's."""
        key = bytes(cursor.key())
        if len(key) != KEY.size:
            raise self._corrupt(txn, stream_id, byte_position, "a piece is stored under a key of the wrong size")
        owner, at = KEY.unpack(key)
        if owner != stream_id:
            return None
        try:
            return decode_piece(key, cursor.value())
        except DamagedPieceError as error:
            raise self._corrupt(txn, stream_id, at, error) from error

    def _image(self, txn: lmdb.Transaction[memoryview], stream_id: int) -> Image:
        key = ID.pack(stream_id)
        row = txn.get(key, db=self._shard.databases.streams)
        if row is None:
            raise CorruptError(f"{self._shard.path}: stream id {key.hex()} is missing.")
        try:
            return decode_image(key, row)
        except (DamagedRowError, msgspec.MsgspecError) as error:
            raise CorruptError(
                f"{self._shard.path}: the state of stream id {key.hex()} is damaged: {error}."
            ) from error

    def _missing(self, txn: lmdb.Transaction[memoryview], stream_id: int, message_index: int) -> CorruptError:
        name = self._image(txn, stream_id).name
        return CorruptError(
            f"Stream {name!r}: the piece with message {message_index} is missing from {self._shard.path}."
        )

    def _corrupt(
        self, txn: lmdb.Transaction[memoryview], stream_id: int, byte_position: int, why: object
    ) -> CorruptError:
        name = self._image(txn, stream_id).name
        return CorruptError(f"Stream {name!r}, position {byte_position}: {why} ({self._shard.path}).")
