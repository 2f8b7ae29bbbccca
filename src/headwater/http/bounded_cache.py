"""A dictionary with a limit, for results that can be computed again.

When it is full, a new entry replaces the newest one. Replacing the oldest one would be useless for a client that uses
slightly more keys than the limit in turns: each entry would be removed just before it is used again. After several
times as many replacements as there are entries it is cleared, because then the keys in use have changed.
"""

from __future__ import annotations

from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

REPLACED_MAX: Final = 4
"""Replacements before the cache is cleared, as a multiple of its limit."""


class BoundedCache(dict[K, V]):
    __slots__ = ("_limit", "_replaced")

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._replaced = 0

    def put(self, key: K, value: V) -> None:
        if len(self) >= self._limit and key not in self:
            self._replaced += 1
            if self._replaced > REPLACED_MAX * self._limit:
                self._replaced = 0
                self.clear()
            else:
                self.popitem()
        self[key] = value
