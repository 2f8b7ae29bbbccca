"""Return freed memory to the system.

The allocator of the C library keeps the memory of freed large buffers: after many slow readers have disconnected, the
process would stay as large as it was with them. Invariant: memory that was freed and is still resident stays below
`FREE_MAX_BYTES` plus what is freed within one interval.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

INTERVAL_S: Final = 2.0
FREE_MAX_BYTES: Final = 8 * 1024 * 1024
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_STATM: Final = Path("/proc/self/statm")
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
MAPPED_MIN_BYTES: Final = 4 * 1024 * 1024
"""Blocks of this size have their own mapping, which grows without a copy. By default glibc raises this limit to 32 MiB
once such a block was freed; then a large body is copied as it grows, which takes up to 50 ms."""


class Allocator(Protocol):
    def free_bytes(self) -> int:
        """Bytes that the program has freed and the allocator keeps, resident or not."""

    def trim(self) -> None:
        """Return the resident ones to the operating system."""


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
        # The value that glibc would set itself if the other limit were not given.
        library.mallopt(_M_TRIM_THRESHOLD, 2 * MAPPED_MIN_BYTES)

    def free_bytes(self) -> int:
        return int(self._info().fordblks)

    def trim(self) -> None:
        self._trim(0)


def resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


class MemoryReturn:
    """Checks every few seconds whether much memory was freed since the last time, and returns it."""

    def __init__(self, allocator: Allocator, resident: Callable[[], int] = resident_bytes) -> None:
        self._allocator = allocator
        self._resident = resident
        self._next_s = 0.0
        # Free bytes are counted whether they are resident or not. Those that are became free since the last return, or
        # were used and freed again since.
        self._after_bytes = 0
        """Resident bytes after the last return."""
        self._least_free = 0
        """The lowest number of free bytes since then."""

    def check(self, now_s: float) -> None:
        if now_s < self._next_s:
            return
        self._next_s = now_s + INTERVAL_S
        free = self._allocator.free_bytes()
        self._least_free = min(self._least_free, free)
        grown = max(free - self._least_free, min(free, self._resident() - self._after_bytes))
        if grown >= FREE_MAX_BYTES:
            self._allocator.trim()
            self._after_bytes, self._least_free = self._resident(), free


def memory_return() -> MemoryReturn | None:
    """Create a `MemoryReturn`; None if the C library does not support it."""
    try:
        return MemoryReturn(Glibc()) if _STATM.exists() else None
    except (AttributeError, OSError):
        return None
