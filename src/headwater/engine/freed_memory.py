"""Return freed memory to the system.

The allocator of the C library keeps the memory of freed large buffers: after many slow readers have disconnected, the
process would stay as large as it was with them. Invariant: memory that was freed and is still resident stays below
`FREE_MAX_BYTES` plus what is freed within one interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headwater.operating_system import SYSTEM, Allocator

INTERVAL_S: Final = 2.0
FREE_MAX_BYTES: Final = 4 * 1024 * 1024


class MemoryReturn:
    """Checks every few seconds whether much memory was freed since the last time, and returns it."""

    def __init__(self, allocator: Allocator, resident: Callable[[], int] = SYSTEM.resident_bytes) -> None:
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
        try:
            grown = max(free - self._least_free, min(free, self._resident() - self._after_bytes))
            if grown >= FREE_MAX_BYTES:
                self._allocator.trim()
                self._after_bytes, self._least_free = self._resident(), free
        except OSError:
            pass  # There is no free descriptor to read the size of the process: later.


def memory_return() -> MemoryReturn | None:
    """Create a `MemoryReturn`; None if the C library does not support it."""
    allocator = SYSTEM.allocator()
    return None if allocator is None else MemoryReturn(allocator)
