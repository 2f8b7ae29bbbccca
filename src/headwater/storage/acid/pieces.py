"""Pieces: how the bytes of a stream are stored in a shard, each piece with its checksums.

A piece is a run of consecutive bytes of one stream, at most `PIECE_BYTES` long, stored under (stream id, position of
its first byte), so a range of bytes is one seek and a scan. It says how many messages end before it and where messages
end inside it; a message may span pieces, so the amount that one read must verify is limited.

Layout of a value: head checksum, body checksum, index, count, length; `count` ends relative to the piece; a table of
the arrival times of the messages that end in it; the bytes. The highest bit of `count` says that there is such a table:
pieces of formats 1 and 2 have none. The head checksum covers the key too, so a piece under the key of another stream or
position is detected. Nothing is used from a piece before its head has been verified, or from its body before that has
been verified.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from headwater.core.checksum import crc32
from headwater.storage.arrival_times import (
    COUNT,
    StoredTimes,
    TimeRun,
    TimeTable,
    little_endian,
    read_table,
    table_bytes,
    unknown_times,
)

PIECE_BYTES: Final = 65_536
"""Small enough to verify for a short read, large enough that a long read is made of few pieces."""

KEY: Final = struct.Struct(">QQ")
_HAS_TIMES: Final = 2**31
_HEAD: Final = struct.Struct("<IIQII")
_HEAD_FIELDS: Final = struct.Struct("<QII")


class DamagedPieceError(Exception):
    """A piece does not match its checksums."""


class StoredPiece(NamedTuple):
    """A piece whose head has been verified. `ends` and `body` are views that live as long as their transaction."""

    byte_position: int
    start_index: int
    """How many messages end before the piece."""
    ends: memoryview
    body: memoryview
    body_crc: int
    times: StoredTimes
    """Arrival times of the messages that end in the piece."""

    @property
    def end_position(self) -> int:
        return self.byte_position + len(self.body)

    @property
    def end_index(self) -> int:
        return self.start_index + len(self.ends)

    def verified_body(self) -> memoryview:
        if crc32(self.body) != self.body_crc:
            raise DamagedPieceError("its bytes do not match their checksum")
        return self.body


def encode_piece(
    key: bytes, message_index: int, ends: array[int], times: TimeTable, body: bytes | bytearray | memoryview
) -> bytes:
    """The value to store under `key`."""
    body_crc = crc32(body)
    count = len(ends) | _HAS_TIMES
    fields = _HEAD_FIELDS.pack(message_index, count, len(body))
    tables = little_endian(ends) + times.encoded()
    head_crc = crc32(tables, crc32(fields, crc32(body_crc.to_bytes(4, "little"), crc32(key))))
    return b"".join((_HEAD.pack(head_crc, body_crc, message_index, count, len(body)), tables, body))


def decode_piece(key: bytes | memoryview, value: memoryview) -> StoredPiece:
    """Decode the piece stored under `key` and verify its head."""
    if len(key) != KEY.size or len(value) < _HEAD.size:
        raise DamagedPieceError("it is too short")
    head_crc, body_crc, message_index, count, length = _HEAD.unpack_from(value)
    has_times = bool(count & _HAS_TIMES)
    count &= ~_HAS_TIMES
    times_at = body_at = _HEAD.size + 4 * count
    if has_times and times_at + COUNT.size <= len(value):
        body_at += table_bytes(value, times_at)
    if body_at + length != len(value) or not length:
        raise DamagedPieceError("its length is inconsistent")
    if crc32(value[4 + 4 : body_at], crc32(value[4:8], crc32(key))) != head_crc:
        raise DamagedPieceError("its index does not match its checksum")
    times = read_table(value, times_at) if has_times else unknown_times(count)
    ends = value[_HEAD.size : times_at]
    if sys.byteorder == "big":
        swapped = array("I", ends)
        swapped.byteswap()
        ends = memoryview(swapped.tobytes())
    return StoredPiece(KEY.unpack(key)[1], message_index, ends.cast("I"), value[body_at:], body_crc, times)


class PieceWriter:
    """Splits new bytes of a stream into pieces, joining small appends into one piece.

    Each piece is passed on with its key when it is complete, so that a large append is not in memory a second time.
    """

    __slots__ = ("_body", "_byte_position", "_ends", "_id", "_message_index", "_put", "_times")

    def __init__(
        self, stream_id: int, message_index: int, byte_position: int, put: Callable[[bytes, bytes], None]
    ) -> None:
        self._put = put
        self._id = stream_id
        self._message_index = message_index
        self._byte_position = byte_position
        self._body = bytearray()
        self._ends: array[int] = array("I")
        self._times = TimeTable()

    def add_piece(self, ends: Sequence[int], times: Iterable[TimeRun], body: bytes) -> None:
        """Add an earlier piece: bytes, and where messages end in them. The last message may end in a later piece."""
        at = number = 0
        for messages, at_ms in times:
            for end in ends[number : number + messages]:
                self._fill(body[at:end])
                self._end_message(at_ms)
                at = end
            number += messages
        self._fill(body[at:])

    def add(self, payload: bytes | memoryview, lengths: Sequence[int], at_ms: int) -> None:
        if len(self._body) + len(payload) <= PIECE_BYTES:
            end = len(self._body)
            self._body += payload
            for length in lengths:
                end += length
                self._ends.append(end)
            self._times.add(len(lengths), at_ms)
            return
        view = memoryview(payload)
        at = 0
        for length in lengths:
            self._fill(view[at : at + length])
            self._end_message(at_ms)
            at += length

    def finish(self) -> None:
        """Pass on the last piece."""
        if self._body:
            self._seal()

    def _end_message(self, at_ms: int) -> None:
        self._ends.append(len(self._body))
        self._times.add(1, at_ms)

    def _fill(self, data: bytes | memoryview) -> None:
        while data:
            if len(self._body) == PIECE_BYTES:
                self._seal()
            taken = PIECE_BYTES - len(self._body)
            self._body += data[:taken]
            data = data[taken:]

    def _seal(self) -> None:
        key = KEY.pack(self._id, self._byte_position)
        self._put(key, encode_piece(key, self._message_index, self._ends, self._times, self._body))
        self._message_index += len(self._ends)
        self._byte_position += len(self._body)
        self._body.clear()
        self._ends = array("I")
        self._times = TimeTable()
