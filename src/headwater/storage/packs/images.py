"""Encode the state of a stream without stored the interpreter for long, however many producers it has.

The encoder does not release the interpreter lock while it works, so 100,000 producers in one call would stop the event
loop for tens of milliseconds, though a checkpoint is saved on another thread. They are encoded in pieces, and the
pieces joined to what one call would have made.
"""

from __future__ import annotations

import struct
import time
from itertools import islice
from typing import Final

import msgspec

from headwater.core.records import Document, Image

PRODUCERS_AT_ONCE: Final = 2048
"""Producers that are encoded or copied in one go: well under a millisecond."""

_encode = msgspec.msgpack.Encoder().encode
_FIELDS: Final = Image.__struct_fields__
_ARRAY: Final = struct.Struct(">BH")
_ARRAY_16: Final = 0xDC
_MAP: Final = struct.Struct(">BI")
_MAP_32: Final = 0xDF


def is_large(image: Image | None) -> bool:
    """Whether an image takes noticeably long to copy, to encode and to release."""
    return image is not None and len(image.producers) > PRODUCERS_AT_ONCE


def encode_state(state: Image | Document) -> bytes:
    """The state in MessagePack."""
    if isinstance(state, Document) or not is_large(state):
        return _encode(state)
    parts: list[bytes | memoryview] = [_ARRAY.pack(_ARRAY_16, 1 + len(_FIELDS)), _encode(Image.__struct_config__.tag)]
    for field in _FIELDS:
        value = getattr(state, field)
        if field == "producers":
            parts.append(_MAP.pack(_MAP_32, len(value)))
            items = iter(value.items())
            while piece := dict(islice(items, PRODUCERS_AT_ONCE)):
                parts.append(_without_header(_encode(piece), len(piece)))
                # Let the event loop have the interpreter.
                time.sleep(0)
        else:
            parts.append(_encode(value))
    return b"".join(parts)


def _without_header(encoded: bytes, count: int) -> memoryview:
    """The entries of a map, without the bytes that say how many there are."""
    return memoryview(encoded)[1 if count < 16 else 3 if count < 2**16 else 5 :]
