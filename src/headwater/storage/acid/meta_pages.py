"""The two meta pages of an LMDB file, read without LMDB: has the newest commit been hidden?

LMDB keeps the last two commits, each with a meta page that points to its tree, and opens the one with the higher
number. The meta pages carry no checksum, so a flipped bit in such a number would silently bring back the commit before
the last. Damage anywhere else runs into a checksum of ours; this one is found by looking at both trees: the last key
of a tree whose keys only grow must not be higher in the commit that is passed over.

Layout of the 0.9 format on a 64-bit little-endian machine; for any other nothing is said.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

_PAGE: Final = struct.Struct("<QHHHH")
_META: Final = struct.Struct("<IIQQ48sIHHQQQQQQQ")
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH: Final = 1
_LEAF: Final = 2
_NODE: Final = struct.Struct("<HHHH")
_DEPTH_MAX: Final = 32


class Meta(NamedTuple):
    txn: int
    root: int
    page_size: int


def hidden_key(path: Path) -> bytes | None:
    """The last key of the commit that LMDB passes over if it is the higher one; None when all is as it should be."""
    with (path / "data.mdb").open("rb") as file:
        first = _read_meta(file, 0, 4096)
        second = _read_meta(file, first.page_size, first.page_size) if first is not None else None
        if first is None or second is None:
            return None
        newer, older = (first, second) if first.txn >= second.txn else (second, first)
        try:
            passed_over, opened = _last_key(file, older), _last_key(file, newer)
        except (struct.error, ValueError, OSError):
            # Damage in the commit that is passed over is not our concern; in the one that is opened, LMDB's or ours.
            return None
    return passed_over if passed_over > opened else None


def _read_meta(file: BinaryIO, offset: int, page_size: int) -> Meta | None:
    file.seek(offset)
    page = file.read(page_size)
    if len(page) < _PAGE.size + _META.size:
        return None
    magic, version, _, _, _, _, _, _, _, _, _, _, root, _, txn = _META.unpack_from(page, _PAGE.size)
    if magic != _MAGIC or version != _VERSION:
        return None
    # The page size lies where the free list's own `pad` would.
    (size,) = struct.unpack_from("<I", page, _PAGE.size + 24)
    return Meta(txn, root, size)


def _last_key(file: BinaryIO, meta: Meta) -> bytes:
    """Down the last child of every page; raises where a page makes no sense."""
    number = meta.root
    for _ in range(_DEPTH_MAX):
        file.seek(number * meta.page_size)
        page = file.read(meta.page_size)
        own_number, _, flags, lower, _ = _PAGE.unpack_from(page)
        keys = (lower - _PAGE.size) // 2
        if own_number != number or keys < 1:
            raise ValueError("not a page of this tree")
        (at,) = struct.unpack_from("<H", page, _PAGE.size + 2 * (keys - 1))
        low, high, node_flags, key_size = _NODE.unpack_from(page, at)
        if flags & _LEAF:
            key = page[at + _NODE.size : at + _NODE.size + key_size]
            if len(key) != key_size:
                raise ValueError("a key beyond its page")
            return key
        if not flags & _BRANCH:
            raise ValueError("neither branch nor leaf")
        number = low | high << 16 | node_flags << 32
    raise ValueError("a tree without an end")
