"""The encoding of saved states: images of streams, and documents, in MessagePack.

The encoder and the decoder do not release the interpreter lock during a call. A checkpoint is saved on another thread,
but a call with the 100,000 producers of one stream would still block the event loop for tens of milliseconds. So a
large state is encoded in pieces, and decoded with a call into the interpreter for each producer, where it can switch to
another thread.
"""

from __future__ import annotations

import struct
import time
from itertools import islice
from typing import Final

import msgspec

from headwater.core.producers import ProducerState
from headwater.core.records import Document, Image

PRODUCERS_AT_ONCE: Final = 2048
"""Producers that are encoded or copied in one call: well under a millisecond."""
LARGE_BYTES: Final = 64 * 1024
"""A smaller state is decoded in one call. An entry of the map of producers takes at least 20 bytes."""

_encode = msgspec.msgpack.Encoder().encode
_DECODER: Final[msgspec.msgpack.Decoder[Image | Document]] = msgspec.msgpack.Decoder(Image | Document)
_decode = _DECODER.decode
_decode_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_FIELDS: Final = Image.__struct_fields__
_PRODUCERS_AT: Final = 1 + _FIELDS.index("producers")
"""The tag is before the fields."""
_TAG: Final = _encode(Image.__struct_config__.tag)
_NO_PRODUCERS: Final = msgspec.Raw(_encode({}))
_ARRAY: Final = struct.Struct(">BH")
_ARRAY_16: Final = 0xDC
_MAP: Final = struct.Struct(">BI")
_MAP_32: Final = 0xDF


class _StoredProducer(msgspec.Struct, array_like=True, gc=False):
    """A `ProducerState` whose decoding can be interrupted."""

    epoch: int
    seq: int
    digests: bytes = b""
    used_ms: int = 0

    def __post_init__(self) -> None:
        """Do nothing: during the call the interpreter can switch to another thread."""


_decode_producers = msgspec.msgpack.Decoder(dict[str, _StoredProducer]).decode


def is_large(image: Image | None) -> bool:
    """Whether it takes noticeable time to copy, encode and free an image."""
    return image is not None and len(image.producers) > PRODUCERS_AT_ONCE


def encode_state(state: Image | Document) -> bytes:
    """Encode a state; the result does not depend on the number of pieces in which it is made."""
    if isinstance(state, Document) or not is_large(state):
        return _encode(state)
    parts: list[bytes | memoryview] = [_ARRAY.pack(_ARRAY_16, 1 + len(_FIELDS)), _TAG]
    for field in _FIELDS:
        value = getattr(state, field)
        if field == "producers":
            parts.append(_MAP.pack(_MAP_32, len(value)))
            items = iter(value.items())
            while piece := dict(islice(items, PRODUCERS_AT_ONCE)):
                parts.append(_without_header(_encode(piece), len(piece)))
                # Let the event loop run.
                time.sleep(0)
        else:
            parts.append(_encode(value))
    return b"".join(parts)


def decode_state(encoded: bytes | memoryview) -> Image | Document:
    if len(encoded) < LARGE_BYTES:
        return _decode(encoded)
    parts = _decode_parts(encoded)
    if bytes(parts[0]) != _TAG or len(parts) <= _PRODUCERS_AT:
        return _decode(encoded)
    stored = _decode_producers(parts[_PRODUCERS_AT])
    parts[_PRODUCERS_AT] = _NO_PRODUCERS
    image = _decode(_encode(parts))
    assert isinstance(image, Image)
    producers: dict[str, ProducerState] = {}
    for id_ in list(stored):
        # Free them one by one: freeing all at once takes up to ten milliseconds.
        state = stored.pop(id_)
        producers[id_] = ProducerState(state.epoch, state.seq, state.digests, state.used_ms)
    return msgspec.structs.replace(image, producers=producers)


def _without_header(encoded: bytes, count: int) -> memoryview:
    """The entries of an encoded map, without its header."""
    return memoryview(encoded)[1 if count < 16 else 3 if count < 2**16 else 5 :]
