"""Arrival times: runs of consecutive messages with the same time, in the form that packs and shards store.

A table has two columns: for each run, how many messages of the extent or piece there are up to its end, and its time in
milliseconds since the epoch. An append is one run, and appends in the same millisecond share one. Times never decrease
within a stream. 0 is an unknown time, of data stored by versions without times; it is older than any other.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from headwater.storage.columns import shifted

UNKNOWN_MS: Final = 0
RUN_BYTES: Final = 12
COUNT: Final = struct.Struct("<I")
"""A table begins with the number of its runs; then all ends, then all times."""


class TimeRun(NamedTuple):
    """Consecutive messages that arrived at the same time."""

    messages: int
    at_ms: int


class TimeTable:
    """The arrival times of an extent or piece that is being written."""

    __slots__ = ("ends", "times_ms")

    def __init__(self, runs: Iterable[TimeRun] = ()) -> None:
        self.ends: array[int] = array("I")
        self.times_ms: array[int] = array("Q")
        for messages, at_ms in runs:
            self.add(messages, at_ms)

    def add(self, messages: int, at_ms: int) -> None:
        if self.times_ms and at_ms <= self.times_ms[-1]:
            self.ends[-1] += messages
        elif messages:
            self.ends.append((self.ends[-1] if self.ends else 0) + messages)
            self.times_ms.append(at_ms)

    def join(self, following: StoredTimes) -> None:
        """Add all runs of the extent or piece after this one."""
        shift = self.ends[-1] if self.ends else 0
        ends, times_ms = following
        first = 0
        if self.times_ms and times_ms[0] <= self.times_ms[-1]:
            # Only the first run may have the time of the last one here.
            self.ends[-1] = shift + ends[0]
            first = 1
        self.ends.extend(shifted(ends[first:], shift))
        self.times_ms.extend(shifted(times_ms[first:], 0, "Q"))

    def encoded(self) -> bytes:
        return b"".join((COUNT.pack(len(self.ends)), little_endian(self.ends), little_endian(self.times_ms)))


class StoredTimes(NamedTuple):
    """The two columns of a stored table; each may be read in place."""

    ends: Sequence[int]
    times_ms: Sequence[int]

    def first_since(self, at_ms: int) -> int:
        """How many messages arrived before `at_ms`."""
        run = bisect_left(self.times_ms, at_ms)
        return self.ends[run - 1] if run else 0

    def between(self, low: int, high: int) -> list[TimeRun]:
        """The runs of the messages from `low` to `high`."""
        runs: list[TimeRun] = []
        run = bisect_right(self.ends, low)
        while low < high:
            end = min(self.ends[run], high)
            runs.append(TimeRun(end - low, self.times_ms[run]))
            low = end
            run += 1
        return runs

    def is_valid(self, messages: int) -> bool:
        """Whether the runs cover exactly this many messages, in order of time."""
        return (
            len(self.ends) > 0
            and self.ends[-1] == messages
            and all(earlier < later for earlier, later in pairwise((0, *self.ends)))
            and all(earlier < later for earlier, later in pairwise(self.times_ms))
        )


def unknown_times(messages: int) -> StoredTimes:
    """The times of messages that were stored without times."""
    return StoredTimes((messages,), (UNKNOWN_MS,))


def table_bytes(view: memoryview, at: int) -> int:
    """The size of the table that begins at this byte."""
    runs: int = COUNT.unpack_from(view, at)[0]
    return COUNT.size + RUN_BYTES * runs


def read_table(view: memoryview, at: int) -> StoredTimes:
    """The table that begins at this byte, in place."""
    runs: int = COUNT.unpack_from(view, at)[0]
    ends_at = at + COUNT.size
    times_at = ends_at + 4 * runs
    ends, times_ms = view[ends_at:times_at], view[times_at : times_at + 8 * runs]
    if sys.byteorder == "big":
        return StoredTimes(array("I", little_endian(array("I", ends))), array("Q", little_endian(array("Q", times_ms))))
    return StoredTimes(ends.cast("I"), times_ms.cast("Q"))


def little_endian(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()
