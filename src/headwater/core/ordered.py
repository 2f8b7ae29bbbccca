"""Names in order: an index that stays fast with a million of them.

A sorted list of sorted runs, each short enough that inserting into it moves a few kilobytes. Adding, removing and
finding a place cost two binary searches; reading on from there costs what is read. The order of strings is the order
of their code points, which is the order of their bytes in UTF-8.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Final

RUN_MAX: Final = 1024


class OrderedNames:
    """A set of strings that can be walked in order from any place."""

    __slots__ = ("_count", "_lasts", "_runs")

    def __init__(self, names: Iterable[str] = ()) -> None:
        ordered = sorted(set(names))
        half = RUN_MAX // 2
        self._runs = [ordered[at : at + half] for at in range(0, len(ordered), half)]
        self._lasts = [run[-1] for run in self._runs]
        self._count = len(ordered)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: str) -> bool:
        at = bisect_left(self._lasts, name)
        if at == len(self._runs):
            return False
        run = self._runs[at]
        return run[bisect_left(run, name)] == name

    def add(self, name: str) -> None:
        if name in self:
            return
        self._count += 1
        if not self._runs:
            self._runs.append([name])
            self._lasts.append(name)
            return
        at = min(bisect_left(self._lasts, name), len(self._runs) - 1)
        run = self._runs[at]
        insort(run, name)
        self._lasts[at] = run[-1]
        if len(run) > RUN_MAX:
            rest = run[RUN_MAX // 2 :]
            del run[RUN_MAX // 2 :]
            self._lasts[at] = run[-1]
            self._runs.insert(at + 1, rest)
            self._lasts.insert(at + 1, rest[-1])

    def discard(self, name: str) -> None:
        if name not in self:
            return
        self._count -= 1
        at = bisect_left(self._lasts, name)
        run = self._runs[at]
        del run[bisect_left(run, name)]
        if run:
            self._lasts[at] = run[-1]
        else:
            del self._runs[at]
            del self._lasts[at]

    def walk(self, prefix: str, after: str | None) -> Iterator[str]:
        """The names with a prefix, in order, the first of them strictly behind `after`. Do not change it meanwhile."""
        start = prefix if after is None else max(prefix, after)
        at = bisect_left(self._lasts, start)
        if at == len(self._runs):
            return
        first = self._runs[at]
        low = bisect_right(first, start) if after == start else bisect_left(first, start)
        for number in range(at, len(self._runs)):
            run = self._runs[number]
            for position in range(low, len(run)):
                name = run[position]
                if not name.startswith(prefix):
                    return
                yield name
            low = 0
