"""Functions with an optional compiled version, and their pure Python versions.

The compiled versions are optional. They are built when the package is installed, if there is a C compiler (see
`hatch_build.py`); HEADWATER_PURE=1 disables them. Both builds give the same results: a function that returns None
leaves the answer to its caller, who has a way without it.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, Final, TypeAlias

SplitBody: TypeAlias = Callable[[bytes], tuple[bytes, tuple[int, ...], bool] | None]
ScanElements: TypeAlias = Callable[[bytes, int, int, int], tuple[bytes, tuple[int, ...], int, bool] | None]
ExtendEnds: TypeAlias = Callable[["array[int]", Sequence[int], int], None]
ExtendShifted: TypeAlias = Callable[["array[int]", Sequence[int], int], None]
OffsetToken: TypeAlias = Callable[[int, int, int], bytes]


def pure_split(body: bytes) -> None:
    """Leave all bodies to the caller."""


def pure_scan(body: bytes, begin: int, stop: int, max_bytes: int) -> None:
    """Leave all bodies to the caller."""


def pure_extend_ends(ends: array[int], lengths: Sequence[int], end: int) -> None:
    """Add the end of each message to an array of type "Q"; the first one begins at `end`."""
    added = list(accumulate(lengths, initial=end))
    del added[0]
    ends.fromlist(added)


def pure_extend_shifted(column: array[int], numbers: Sequence[int], by: int) -> None:
    """Add numbers to an array of type "I" or "Q", each of them shifted by the same distance."""
    column.fromlist([number + by for number in numbers])


def pure_offset_token(index: int, position: int, incarnation: int) -> bytes:
    """The token of an offset (see `core/offsets`)."""
    return b"%016x_%016x_%016x" % (index, position, incarnation)


split: SplitBody = pure_split
scan: ScanElements = pure_scan
extend_ends: ExtendEnds = pure_extend_ends
extend_shifted: ExtendShifted = pure_extend_shifted
offset_token: OffsetToken = pure_offset_token
PlainAppendPath: Any = None
"""The class of the compiled path of plain appends; None in the pure build, whose way is the usual one."""
if not os.environ.get("HEADWATER_PURE"):
    try:
        json_scan = import_module("headwater.core.native.json_scan")
        plain_append = import_module("headwater.core.native.plain_append")
    except ImportError:
        # Built without a compiler, or for another version of Python.
        pass
    else:
        split, scan, extend_ends = json_scan.split, json_scan.scan, json_scan.extend_ends
        extend_shifted, offset_token = json_scan.extend_shifted, json_scan.offset_token
        PlainAppendPath = plain_append.PlainAppendPath

BUILD: Final = "pure" if split is pure_split else "compiled"
