"""Extents: where the saved bytes of a stream are, in a compact form that is kept in memory for every stream.

An extent is a run of complete messages in one pack, or in one shard. A stream's extents are one `bytes` object of
fixed-size entries in the order of the stream, without gap or overlap: 48 bytes each, so that a hundred thousand idle
streams cost little. The object is replaced, never changed, so that another thread may read it at any time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

EXTENT: Final = struct.Struct("<6Q")
NO_EXTENTS: Final = b""

_PAIR: Final = struct.Struct("<QQ")
_INDEX_AT: Final = 16
_unpack = EXTENT.unpack_from


class Extent(NamedTuple):
    """Messages from `first_index`, bytes from `byte_position` of a stream, stored at `offset` of a pack."""

    pack: int
    offset: int
    first_index: int
    byte_position: int
    messages: int
    length: int

    @property
    def end_index(self) -> int:
        return self.first_index + self.messages

    @property
    def end_position(self) -> int:
        return self.byte_position + self.length


def join(extents: Iterable[Extent]) -> bytes:
    return b"".join([EXTENT.pack(*extent) for extent in extents])


def split(blob: bytes) -> Iterator[Extent]:
    return map(Extent._make, EXTENT.iter_unpack(blob))


def count(blob: bytes) -> int:
    return len(blob) // EXTENT.size


def at(blob: bytes, number: int) -> Extent:
    return Extent._make(_unpack(blob, number * EXTENT.size))


def last(blob: bytes) -> Extent:
    return Extent._make(_unpack(blob, len(blob) - EXTENT.size))


def find_message_index(blob: bytes, message_index: int) -> int:
    """The number of the extent that contains message `message_index`: the last one that begins at or before it."""
    return _find(blob, message_index, 0)


def find_byte_position(blob: bytes, byte_position: int) -> int:
    """The number of the extent that contains the byte at `byte_position`."""
    return _find(blob, byte_position, 1)


def _find(blob: bytes, wanted: int, field: int) -> int:
    low, high = 0, len(blob) // EXTENT.size
    while high - low > 1:
        middle = (low + high) // 2
        if _PAIR.unpack_from(blob, middle * EXTENT.size + _INDEX_AT)[field] <= wanted:
            low = middle
        else:
            high = middle
    return low


def after(blob: bytes, byte_position: int) -> bytes:
    """Remove the extents that end at or before `byte_position`."""
    if not blob or byte_position < at(blob, 0).end_position:
        return blob
    number = find_byte_position(blob, byte_position)
    # The last one may end before that byte position, when all of them do.
    return blob[(number + (at(blob, number).end_position <= byte_position)) * EXTENT.size :]


def is_chain(blob: bytes, message_index: int, byte_position: int, end_index: int, end_position: int) -> bool:
    """Whether the extents follow each other without a gap from the given beginning to the given end."""
    for _, _, first_index, first_position, messages, length in EXTENT.iter_unpack(blob):
        if first_index != message_index or first_position != byte_position:
            return False
        message_index += messages
        byte_position += length
    return message_index == end_index and byte_position == end_position


def chain(found: Iterable[Extent], end_index: int, end_position: int) -> bytes:
    """The extents that follow each other without a gap up to the given end."""
    linked: list[Extent] = []
    for extent in sorted(found, key=lambda extent: extent.byte_position, reverse=True):
        if (extent.end_index, extent.end_position) == (end_index, end_position):
            linked.append(extent)
            end_index, end_position = extent.first_index, extent.byte_position
    return join(reversed(linked))


def merge(blob: bytes, merged: Extent) -> bytes:
    """Replace the extents that `merged` was made from, as far as they still exist."""
    inside = [merged.byte_position <= extent.byte_position < merged.end_position for extent in split(blob)]
    if True not in inside:
        return blob
    first = inside.index(True)
    rest = first + sum(inside)
    return blob[: first * EXTENT.size] + EXTENT.pack(*merged) + blob[rest * EXTENT.size :]
