"""The allocator of glibc: how much freed memory it keeps, and how to return it to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
MAPPED_MIN_BYTES: Final = 4 * 1024 * 1024
"""Blocks of this size have their own mapping, which grows without a copy. By default glibc raises this limit to 32 MiB
once such a block was freed; then a large body is copied as it grows, which takes up to 50 ms."""
KEPT_BYTES: Final = 128 * 1024 * 1024
"""Free memory at the end of the heap that is kept: more than a checkpoint frees, because the next appends need it.
If it is returned at once, every page of a body is mapped and cleared again, a tenth of the CPU time of 1 MiB bodies.
`engine.freed_memory` returns it after two seconds."""


class _Info(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


class Glibc:
    """Raises AttributeError if the C library is not glibc, or is older than 2.33."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._info: Callable[[], _Info] = library.mallinfo2
        self._trim: Callable[[int], int] = library.malloc_trim
        library.mallinfo2.restype = _Info
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED_MIN_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)

    def free_bytes(self) -> int:
        return int(self._info().fordblks)

    def trim(self) -> None:
        self._trim(0)
