"""The last change of each stream, numbered in the order of the changes.

A search begins at its cursor, so its cost does not depend on how many streams changed before that. The changes are kept
in blocks: adding one removes the earlier change of the same stream from its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from sortedcontainers import SortedDict

CHANGES_MAX: Final = 200_000
"""Streams whose last change is kept. A client that is further behind lists all streams again."""
STEP_CHANGES: Final = 2_000
"""Changes that are compared in one step of a search: less than a millisecond."""
_BLOCK: Final = 1024


class ChangeLog:
    def __init__(self, changes_max: int = CHANGES_MAX) -> None:
        self._changes_max = changes_max
        self.count = 0
        """The number of changes so far."""
        self.floor = 0
        """Changes up to this number may have been dropped."""
        self._last: dict[str, int] = {}
        """The number of the last change of each stream."""
        self._newest: dict[int, str] = {}
        self._blocks = SortedDict({0: self._newest})
        """The names of the streams by the number of their last change, in ascending order, in blocks."""

    def add(self, name: str) -> None:
        """Record a change of a stream."""
        self.count = number = self.count + 1
        if not number % _BLOCK:
            self._begin_block(number // _BLOCK)
        earlier = self._last.get(name)
        if earlier is not None:
            self._remove(earlier)
        self._newest[number] = name
        self._last[name] = number
        if len(self._last) > self._changes_max:
            _, oldest = self._blocks.peekitem(0)
            self.floor = next(iter(oldest))
            del self._last[oldest[self.floor]]
            self._remove(self.floor)

    def after(self, since: int) -> Iterator[tuple[int, str]]:
        """Number and name of each stream whose last change has a number above `since`, in order. The log must not
        change meanwhile."""
        for block in self._blocks.irange(since // _BLOCK):
            for number, name in self._blocks[block].items():
                if number > since:
                    yield number, name

    def _begin_block(self, block: int) -> None:
        if self._newest:
            # The copy has no space for what was removed.
            self._blocks[block - 1] = dict(self._newest)
        else:
            del self._blocks[block - 1]
        self._newest = self._blocks[block] = {}

    def _remove(self, number: int) -> None:
        block = number // _BLOCK
        changes = self._blocks[block]
        del changes[number]
        if changes is self._newest:
            return
        left = len(changes)
        if not left:
            del self._blocks[block]
        elif not left & (left - 1):
            # Free the space of the removed ones, each time that half of the rest was removed.
            self._blocks[block] = dict(changes)


class ChangeSearch:
    """The first `limit` streams that changed after a number and are `wanted`, in the order of their last changes."""

    def __init__(self, changes: ChangeLog, since: int, limit: int, wanted: Callable[[str], bool]) -> None:
        self._changes = changes
        self._since = since
        self._limit = limit
        self._wanted = wanted
        self.found: dict[str, int] = {}
        """The streams, with the numbers of their last changes."""
        self.is_complete = True
        """False if changes were dropped that the search had not reached."""

    def steps(self) -> Iterator[None]:
        """Search. The log may change between two steps: then a stream that was found can be found again later."""
        at, found, wanted = self._since, self.found, self._wanted
        while True:
            if at < self._changes.floor:
                self.is_complete = False
                return
            for compared, (number, name) in enumerate(self._changes.after(at), 1):
                at = number
                if wanted(name):
                    found.pop(name, None)
                    found[name] = number
                    if len(found) == self._limit:
                        return
                if compared == STEP_CHANGES:
                    break
            else:
                return
            yield
