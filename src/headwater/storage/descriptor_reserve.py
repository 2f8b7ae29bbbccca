"""A reserve of file descriptors, so that storage can open files when connections have used up all others.

Sockets and files share one limit per process (`ulimit -n`). The reserve keeps a few descriptors of `/dev/null` open;
when an open fails because the limit is reached, one of them is closed and the open is retried. The reserve is refilled
as soon as descriptors are available.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Final, TypeVar

RESERVE: Final = 32
"""Enough to merge eight packs, which use two descriptors each, into two new ones, and to read others meanwhile. A
checkpoint needs fewer: two packs, two manifests, the next log segment, and directories to sync."""

EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE})

T = TypeVar("T")


class DescriptorReserve:
    """Safe to use from any thread."""

    def __init__(self, count: int = RESERVE) -> None:
        self._count = count
        self._held: list[int] = []
        self._lock = threading.Lock()
        self._fill()

    def __len__(self) -> int:
        return len(self._held)

    def open(self, opener: Callable[[], T]) -> T:
        """Call `opener`; while it fails for lack of descriptors, release one of the reserve and call it again."""
        try:
            opened = opener()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            return self._open_with_reserve(opener, error)
        if len(self._held) < self._count:
            with self._lock:
                self._fill()
        return opened

    def close(self) -> None:
        with self._lock:
            self._count = 0
            while self._held:
                os.close(self._held.pop())

    def __del__(self) -> None:
        # The reserve lives as long as its store, even if opening the store failed.
        self.close()

    def _open_with_reserve(self, opener: Callable[[], T], error: OSError) -> T:
        with self._lock:
            while self._held:
                os.close(self._held.pop())
                try:
                    return opener()
                except OSError as again:
                    # Another thread may have taken the descriptor first.
                    if again.errno not in EXHAUSTED:
                        raise
                    error = again
        raise error

    def _fill(self) -> None:
        while len(self._held) < self._count:
            try:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return
