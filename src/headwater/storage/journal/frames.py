"""Frames: the units of an append-only file. Torn and damaged frames are detected.

A frame is written and synced before the next one is begun. So a frame that fails its checksum was never finished if no
valid frame follows it (a torn tail, which is cut), and was damaged later if one does (it is never served or cut).
Every file has a random salt, with which each of its frames begins. Without it, a client could send a payload that looks
like a frame, and make a torn tail look like damage.

In the journal a frame is one batch: either all of its records are valid, or none. It is encoded in parts, because large
payloads are not copied.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from headwater.core.checksum import crc32
from headwater.core.records import Append, Create, Document, Record, decode_record
from headwater.storage.filesystem import Bytes
from headwater.storage.interface import BatchTooLargeError, Committed
from headwater.storage.journal.large_records import LARGE_BYTES, decode_large, encode_large

FRAME: Final = struct.Struct("<QIIQI")
"""Salt; checksum of all that follows it; length of the body; number (of the first record); count (of records)."""
BODY_MAX_BYTES: Final = 2**32 - 1
NO_STREAM: Final = 0
"""The stream id of a record that does not belong to a stream."""

_CHECKED_FROM: Final = 12
_RECORD: Final = struct.Struct("<QII")
"""For each record of a batch: its stream, its length, and how many incarnations it removes."""


class Frame(NamedTuple):
    start: int
    end: int
    number: int
    entries: int
    body: memoryview


class Logged(NamedTuple):
    """A record of the journal, not yet decoded."""

    lsn: int
    stream_id: int
    removed: tuple[int, ...]
    encoded: memoryview

    @property
    def record(self) -> Record:
        """The record with its own copy of the payload. Only while nothing is served: a large copy takes long."""
        record: Record = decode_record(self.encoded)
        return record

    @property
    def borrowed_record(self) -> Record:
        """The same without a long copy: a large payload is a view of the frame."""
        return decode_large(self.encoded) if len(self.encoded) >= LARGE_BYTES else self.record


def seal(buffer: bytearray, salt: int, number: int, count: int, rest: Sequence[Bytes] = ()) -> None:
    """Write the header into the first `FRAME.size` bytes of the buffer; `rest` are the parts after the buffer."""
    FRAME.pack_into(buffer, 0, salt, 0, len(buffer) - FRAME.size + sum(map(len, rest)), number, count)
    with memoryview(buffer) as whole:
        checksum = crc32(whole[_CHECKED_FROM:])
    for part in rest:
        checksum = crc32(part, checksum)
    struct.pack_into("<I", buffer, 8, checksum)


def change_salt(buffer: bytearray, salt: int) -> None:
    """Set the salt of another file in a sealed frame; the checksum does not cover the salt."""
    struct.pack_into("<Q", buffer, 0, salt)


def read_frame(data: memoryview, at: int, salt: int) -> Frame | None:
    """The frame that begins at this byte, or None if there is no complete and valid one."""
    body = at + FRAME.size
    if body > len(data):
        return None
    found_salt, checksum, length, number, count = FRAME.unpack_from(data, at)
    end = body + length
    if found_salt != salt or end > len(data) or crc32(data[at + _CHECKED_FROM : end]) != checksum:
        return None
    return Frame(at, end, number, count, data[body:end])


def find_frame(data: bytes, at: int, salt: int) -> Frame | None:
    """The first valid frame that begins at this byte or later."""
    mark = salt.to_bytes(8, "little")
    view = memoryview(data)
    while (at := data.find(mark, at)) >= 0:
        frame = read_frame(view, at, salt)
        if frame is not None:
            return frame
        at += 1
    return None


class BatchEncoder:
    """Encodes batches as frames. Each writer has its own."""

    __slots__ = ("_encode_into",)

    def __init__(self) -> None:
        self._encode_into = msgspec.msgpack.Encoder().encode_into

    def encode(self, batch: Sequence[Committed], lsn: int, salt: int) -> tuple[bytearray, list[Bytes]]:
        """The beginning of the frame, with its header, and the parts that follow it."""
        encode_into = self._encode_into
        at = FRAME.size + _RECORD.size * len(batch)
        first = buffer = bytearray(at)
        rest: list[Bytes] = []
        total = at
        table: list[int] = []
        all_removed: tuple[int, ...] = ()
        for record, removed in batch:
            if (type(record) is Append or type(record) is Create) and len(record.payload) >= LARGE_BYTES:
                before, payload, after = encode_large(record)
                buffer += before
                buffer = bytearray(after)
                rest += (payload, buffer)
                length = len(before) + len(payload) + len(after)
            else:
                encode_into(record, buffer, at)
                length = len(buffer) - at
            table += (NO_STREAM if isinstance(record, Document) else record.id, length, len(removed))
            at = len(buffer)
            total += length
            if total > BODY_MAX_BYTES:
                raise BatchTooLargeError(
                    f"A batch of more than {BODY_MAX_BYTES} bytes does not fit into a frame of the journal; send"
                    " less at once."
                )
            if removed:
                all_removed += removed
        if all_removed:
            buffer += struct.pack(f"<{len(all_removed)}Q", *all_removed)
        struct.pack_into("<" + "QII" * len(batch), first, FRAME.size, *table)
        seal(first, salt, lsn, len(batch), rest)
        return first, rest


def read_batch(frame: Frame) -> Iterator[Logged]:
    """The records of a valid frame of the journal."""
    body = frame.body
    at = _RECORD.size * frame.entries
    table = list(_RECORD.iter_unpack(body[:at]))
    removed_at = at + sum(length for _, length, _ in table)
    for lsn, (stream_id, length, removals) in enumerate(table, frame.number):
        removed: tuple[int, ...] = ()
        if removals:
            removed = struct.unpack_from(f"<{removals}Q", body, removed_at)
            removed_at += 8 * removals
        yield Logged(lsn, stream_id, removed, body[at : at + length])
        at += length
    assert removed_at == len(body)


def suspects(data: memoryview, at: int) -> list[int]:
    """The streams that a damaged frame of the journal probably concerns, as far as its header can be read."""
    if at + FRAME.size > len(data):
        return []
    count: int = FRAME.unpack_from(data, at)[4]
    table = data[at + FRAME.size : at + FRAME.size + _RECORD.size * min(count, 16)]
    whole = len(table) // _RECORD.size * _RECORD.size
    return list(dict.fromkeys(stream_id for stream_id, _, _ in _RECORD.iter_unpack(table[:whole])))
