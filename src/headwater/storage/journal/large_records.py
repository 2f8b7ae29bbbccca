"""Encode and decode records with large payloads without a copy of the payload.

A copy of many megabytes in one call holds the interpreter lock, and so blocks the event loop, regardless of the
thread. A copy in short calls does not help: the buffer grows, and where it cannot grow in place, one of these calls
copies everything before it. The encoding is the same as that of other records.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from headwater.core.records import Append, Create, Record, decode_record, encode_record

LARGE_BYTES: Final = 1024 * 1024
"""Payloads of at least this size are large."""

_BIN_32: Final = b"\xc6"
_BIN_BYTES: Final = {0xC4: 2, 0xC5: 3, 0xC6: 5}
"""MessagePack writes bytes after their type and length; which of three types it is depends on the length."""
_EMPTY: Final = b"\xc4\x00"
_PAYLOAD: Final = {
    encode_record(kind.__struct_config__.tag): 1 + kind.__struct_fields__.index("payload") for kind in (Append, Create)
}
"""Which element of the encoded array is the payload, by the encoded tag."""
_decode_elements: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode


class EncodedParts(NamedTuple):
    """An encoded record: the bytes before its payload, the payload, and the bytes after it."""

    before: bytes
    payload: bytes | memoryview
    after: bytes


def encode_large(record: Append | Create) -> EncodedParts:
    """The encoding of a record whose payload is large."""
    payload = record.payload
    encoded = encode_record(msgspec.structs.replace(record, payload=b""))
    before, _, after = _split(encoded)
    return EncodedParts(before + _BIN_32 + len(payload).to_bytes(4, "big"), payload, after)


def decode_large(encoded: memoryview) -> Record:
    """Decode a record whose encoding is large, because of its payload or of something else.

    A large payload is a view of `encoded`, which stays in memory as long as the record.
    """
    before, element, after = _split(encoded)
    if len(element) < LARGE_BYTES:
        record: Record = decode_record(encoded)
        return record
    record = decode_record(before + _EMPTY + after)
    return msgspec.structs.replace(record, payload=element[_BIN_BYTES[element[0]] :])


def _split(encoded: bytes | memoryview) -> tuple[bytes, memoryview, bytes]:
    """The bytes before the encoded payload, the payload, and the bytes after it; all empty if it has no payload."""
    elements = [memoryview(each) for each in _decode_elements(encoded)]
    number = _PAYLOAD.get(bytes(elements[0]))
    if number is None:
        return b"", memoryview(b""), b""
    view = memoryview(encoded)
    end = len(view) - sum(map(len, elements[number + 1 :]))
    start = end - len(elements[number])
    return bytes(view[:start]), view[start:end], bytes(view[end:])
