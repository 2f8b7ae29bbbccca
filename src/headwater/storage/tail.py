"""A run of consecutive messages of one stream in memory: bytes, message ends and arrival times.

Used for all of a stream in `memory`, and for the hot tail in the other modes. Positions and indexes are absolute.

Small payloads are collected in blocks; a large one becomes a block without a copy, so that an append of many megabytes
does not block the event loop.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

from headwater.core import native
from headwater.storage.arrival_times import TimeRun

BLOCK_BYTES: Final = 256 * 1024
"""A block of this size is complete."""
OWN_BLOCK_BYTES: Final = 32 * 1024
"""A payload of at least this size becomes its own block."""
SHARED_MAX_BYTES: Final = 1024 * 1024
"""Readers get views of blocks up to this size, and copies of parts of larger ones: a view keeps its block in memory."""
TIME_RUN_BYTES: Final = 16


class Tail:
    """Bytes from `position`, the first of them the start of message `index`."""

    __slots__ = ("_blocks", "_growing", "_growing_position", "_starts", "ends", "index", "position", "times")

    def __init__(self, index: int, position: int) -> None:
        self.index = index
        self.position = position
        self.ends = array("Q")
        self.times = array("Q")
        """Runs of messages that arrived at the same time, two numbers each: the index after its last message, and the
        time in milliseconds. One array instead of two, to save memory for each stream."""
        self._growing = bytearray()
        """The last block, to which the next small payload is added."""
        self._growing_position = position
        self._blocks: list[bytes | bytearray] | None = None
        """The blocks before it, which never change; the first may begin before `position`."""
        self._starts: list[int] = _NO_STARTS
        """The position of each of `_blocks`."""

    @property
    def end_index(self) -> int:
        return self.index + len(self.ends)

    @property
    def end_position(self) -> int:
        return self._growing_position + len(self._growing)

    @property
    def size(self) -> int:
        """The number of bytes in the run."""
        return self._growing_position + len(self._growing) - self.position

    def extend(self, payload: bytes, lengths: Sequence[int], at_ms: int) -> int:
        """Add messages that arrived at `at_ms`, which never decreases; returns the memory that they use."""
        growing = self._growing
        size = len(payload)
        end = self._growing_position + len(growing)
        if size >= OWN_BLOCK_BYTES:
            if growing:
                self._seal()
            self._growing_position = end + size
            self._add_block(payload, end)
        else:
            growing += payload
            if len(growing) >= BLOCK_BYTES:
                self._seal()
        ends = self.ends
        count = len(lengths)
        if count == 1:
            ends.append(end + size)
        else:
            native.extend_ends(ends, lengths, end)
        times = self.times
        end_index = self.index + len(ends)
        if times and at_ms <= times[-1]:
            times[-2] = end_index
            return size + 8 * count
        times.extend((end_index, at_ms))
        return size + 8 * count + TIME_RUN_BYTES

    def boundary(self, index: int) -> int | None:
        """Position after `index` messages of the stream, for boundaries inside the run or at its start."""
        at = index - self.index
        if at == 0:
            return self.position
        if 0 < at <= len(self.ends):
            return self.ends[at - 1]
        return None

    def cut(self, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        """The last boundary within `max_bytes` of (index, position), at least one message further."""
        low = index - self.index
        high = end_index - self.index
        at = bisect_right(self.ends, position + max_bytes, low, high)
        at = max(at, low + 1)
        return self.index + at, self.ends[at - 1]

    def lengths(self, index: int, end_index: int) -> list[int]:
        if index == end_index:
            return []
        low = index - self.index
        ends = self.ends[low : end_index - self.index]
        starts = array("Q", [self.position if low == 0 else self.ends[low - 1]]) + ends[:-1]
        return [end - start for start, end in zip(starts, ends, strict=True)]

    def arrivals(self, index: int, end_index: int) -> list[TimeRun]:
        return list(self.time_runs(index, end_index))

    def time_runs(self, index: int, end_index: int) -> Iterator[TimeRun]:
        """The same one by one: there may be as many runs as messages."""
        run = bisect_right(self._time_runs, index, key=self._run_end)
        while index < end_index:
            end = min(self.times[2 * run], end_index)
            yield TimeRun(end - index, self.times[2 * run + 1])
            index = end
            run += 1

    def first_since(self, at_ms: int) -> int:
        """The index of the first message that arrived at `at_ms` or later; the end if there is none."""
        run = bisect_left(self._time_runs, at_ms, key=self._run_time)
        return self.times[2 * run - 2] if run else self.index

    def time_runs_from(self, index: int) -> int:
        """The number of runs of arrival times that begin at `index` or later."""
        return len(self._time_runs) - bisect_left(self._time_runs, index, key=self._run_end) - 1

    @property
    def _time_runs(self) -> range:
        return range(len(self.times) // 2)

    def _run_end(self, run: int) -> int:
        return self.times[2 * run]

    def _run_time(self, run: int) -> int:
        return self.times[2 * run + 1]

    def read(self, position: int, end_position: int) -> list[bytes | memoryview]:
        """The bytes from `position` to `end_position`, in the pieces in which they are stored."""
        pieces: list[bytes | memoryview] = []
        for block, view in self._parts(position, end_position):
            # A view of the growing block would make the next append fail.
            is_shared = block is not self._growing and len(block) <= SHARED_MAX_BYTES
            pieces.append(view if is_shared else bytes(view))
        return pieces

    def views(self, position: int, end_position: int) -> Iterator[memoryview]:
        """The same without copies. The caller must release them before the run is extended."""
        return (view for _, view in self._parts(position, end_position))

    def _parts(self, position: int, end_position: int) -> Iterator[tuple[bytes | bytearray, memoryview]]:
        """Each block of the range, and its part in the range."""
        if self._blocks is not None and position < self._growing_position:
            number = bisect_right(self._starts, position) - 1
            while position < end_position and number < len(self._blocks):
                block = self._blocks[number]
                at = position - self._starts[number]
                view = memoryview(block)[at : at + end_position - position]
                yield block, view
                position += len(view)
                number += 1
        if position < end_position:
            at = position - self._growing_position
            yield self._growing, memoryview(self._growing)[at : at + end_position - position]

    def drop(self, index: int) -> None:
        """Drop the messages before `index`, which must be a boundary of the run."""
        at = index - self.index
        if at <= 0:
            return
        self.index = index
        self.position = self.ends[at - 1]
        self.ends = self.ends[at:]
        del self.times[: 2 * bisect_right(self._time_runs, index, key=self._run_end)]
        if self.position >= self._growing_position:
            del self._growing[: self.position - self._growing_position]
            self._growing_position = self.position
            self._blocks, self._starts = None, _NO_STARTS
        elif self._blocks is not None:
            number = bisect_right(self._starts, self.position) - 1
            del self._blocks[:number], self._starts[:number]
            self._shrink_first(self._blocks)

    def _shrink_first(self, blocks: list[bytes | bytearray]) -> None:
        """Free the dropped part of the first block once it is half of it, so that each byte is copied at most once."""
        unused = self.position - self._starts[0]
        if unused * 2 >= len(blocks[0]):
            blocks[0] = blocks[0][unused:]
            self._starts[0] = self.position

    def _seal(self) -> None:
        self._add_block(self._growing, self._growing_position)
        self._growing_position += len(self._growing)
        self._growing = bytearray()

    def _add_block(self, block: bytes | bytearray, position: int) -> None:
        if self._blocks is None:
            self._blocks, self._starts = [], []
        self._blocks.append(block)
        self._starts.append(position)


_NO_STARTS: Final[list[int]] = []
