"""Rows: how the state of a stream is stored in a shard, each row with a checksum over its key and its content.

A stream is one row (an `Image` without producers) and one row per producer, so that an append rewrites a fixed, small
amount however many producers a stream has. A document is one row. A producer id or a document's key may be longer than
an LMDB key, so their rows are stored under a digest and contain the id or key.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final, NamedTuple

import msgspec

from headwater.core.checksum import crc32
from headwater.core.producers import ProducerState
from headwater.core.records import Document, Image

ID: Final = struct.Struct(">Q")

_CRC_BYTES: Final = 4
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_image: Final = msgspec.msgpack.Decoder(Image).decode
_decode_document: Final = msgspec.msgpack.Decoder(Document).decode


class _ProducerRow(NamedTuple):
    id: str
    epoch: int
    seq: int
    digests: bytes
    used_ms: int = 0
    """Rows of earlier releases do not have it."""


_decode_producer: Final = msgspec.msgpack.Decoder(_ProducerRow).decode


class DamagedRowError(Exception):
    """A row does not match its checksum."""


def crc_of(row: bytes | memoryview) -> int:
    """The checksum at the start of a row."""
    return int.from_bytes(row[:_CRC_BYTES], "big")


def encode_image(image: Image) -> bytes:
    return _seal(ID.pack(image.id), _encode(image))


def decode_image(key: bytes | memoryview, row: bytes | memoryview) -> Image:
    image = _decode_image(_open(key, row))
    if len(key) != ID.size or ID.unpack(key)[0] != image.id:
        raise DamagedRowError("it is stored under the id of another stream")
    return image


def producer_key(stream_id: int, producer_id: str) -> bytes:
    return ID.pack(stream_id) + _digest(producer_id)


def encode_producer(key: bytes, producer_id: str, state: ProducerState) -> bytes:
    return _seal(key, _encode((producer_id, *state)))


def decode_producer(key: bytes | memoryview, row: bytes | memoryview) -> tuple[str, ProducerState]:
    stored = _decode_producer(_open(key, row))
    return stored.id, ProducerState(stored.epoch, stored.seq, stored.digests, stored.used_ms)


def document_key(key: str) -> bytes:
    return _digest(key)


def encode_document(document: Document) -> bytes:
    return _seal(document_key(document.key), _encode(document))


def decode_document(key: bytes | memoryview, row: bytes | memoryview) -> Document:
    return _decode_document(_open(key, row))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _seal(key: bytes, content: bytes) -> bytes:
    return crc32(content, crc32(key)).to_bytes(_CRC_BYTES, "big") + content


def _open(key: bytes | memoryview, row: bytes | memoryview) -> bytes | memoryview:
    content = row[_CRC_BYTES:]
    if crc32(content, crc32(key)) != crc_of(row):
        raise DamagedRowError("it does not match its checksum")
    return content
