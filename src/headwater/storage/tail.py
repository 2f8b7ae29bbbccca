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
    """Bytes from `byte_position`, the first of them the start of message `message_index`."""

    __slots__ = (
        "_blocks",
        "_growing",
        "_growing_position",
        "_starts",
        "byte_position",
        "ends",
        "message_index",
        "times",
    )

    def __init__(self, message_index: int, byte_position: int) -> None:
        self.message_index = message_index
        self.byte_position = byte_position
        self.ends = array("Q")
        self.times = array("Q")
        """Runs of messages that arrived at the same time, two numbers each: the index after its last message, and the
        time in milliseconds. One array instead of two, to save memory for each stream."""
        self._growing = bytearray()
        """The last block, to which the next small payload is added."""
        self._growing_position = byte_position
        self._blocks: list[bytes | bytearray] | None = None
        """The blocks before it, which never change; the first may begin before `byte_position`."""
        self._starts: list[int] = _NO_STARTS
        """The byte position of each of `_blocks`."""

    @property
    def end_index(self) -> int:
        return self.message_index + len(self.ends)

    @property
    def end_position(self) -> int:
        return self._growing_position + len(self._growing)

    @property
    def size(self) -> int:
        """The number of bytes in the run."""
        return self._growing_position + len(self._growing) - self.byte_position

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
        end_index = self.message_index + len(ends)
        if times and at_ms <= times[-1]:
            times[-2] = end_index
            return size + 8 * count
        times.extend((end_index, at_ms))
        return size + 8 * count + TIME_RUN_BYTES

    def boundary(self, message_index: int) -> int | None:
        """Byte position after `message_index` messages of the stream, for boundaries in the run or at its start."""
        at = message_index - self.message_index
        if at == 0:
            return self.byte_position
        if 0 < at <= len(self.ends):
            return self.ends[at - 1]
        return None

    def cut(self, message_index: int, byte_position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        """The last boundary within `max_bytes` of (message_index, byte_position), at least one message further."""
        low = message_index - self.message_index
        high = end_index - self.message_index
        at = bisect_right(self.ends, byte_position + max_bytes, low, high)
        at = max(at, low + 1)
        return self.message_index + at, self.ends[at - 1]

    def lengths(self, message_index: int, end_index: int) -> list[int]:
        if message_index == end_index:
            return []
        low = message_index - self.message_index
        ends = self.ends[low : end_index - self.message_index]
        starts = array("Q", [self.byte_position if low == 0 else self.ends[low - 1]]) + ends[:-1]
        return [end - start for start, end in zip(starts, ends, strict=True)]

    def arrivals(self, message_index: int, end_index: int) -> list[TimeRun]:
        return list(self.time_runs(message_index, end_index))

    def time_runs(self, message_index: int, end_index: int) -> Iterator[TimeRun]:
        """The same one by one: there may be as many runs as messages."""
        run = bisect_right(self._time_runs, message_index, key=self._run_end)
        while message_index < end_index:
            end = min(self.times[2 * run], end_index)
            yield TimeRun(end - message_index, self.times[2 * run + 1])
            message_index = end
            run += 1

    def first_since(self, at_ms: int) -> int:
        """The index of the first message that arrived at `at_ms` or later; the end if there is none."""
        run = bisect_left(self._time_runs, at_ms, key=self._run_time)
        return self.times[2 * run - 2] if run else self.message_index

    def time_runs_from(self, message_index: int) -> int:
        """The number of runs of arrival times that begin at `message_index` or later."""
        return len(self._time_runs) - bisect_left(self._time_runs, message_index, key=self._run_end) - 1

    @property
    def _time_runs(self) -> range:
        return range(len(self.times) // 2)

    def _run_end(self, run: int) -> int:
        return self.times[2 * run]

    def _run_time(self, run: int) -> int:
        return self.times[2 * run + 1]

    def read(self, byte_position: int, end_position: int) -> list[bytes | memoryview]:
        """The bytes from `byte_position` to `end_position`, in the pieces in which they are stored."""
        pieces: list[bytes | memoryview] = []
        for block, view in self._parts(byte_position, end_position):
            # A view of the growing block would make the next append fail.
            is_shared = block is not self._growing and len(block) <= SHARED_MAX_BYTES
            pieces.append(view if is_shared else bytes(view))
        return pieces

    def views(self, byte_position: int, end_position: int) -> Iterator[memoryview]:
        """The same without copies. The caller must release them before the run is extended."""
        return (view for _, view in self._parts(byte_position, end_position))

    def _parts(self, byte_position: int, end_position: int) -> Iterator[tuple[bytes | bytearray, memoryview]]:
        """Each block of the range, and its part in the range."""
        if self._blocks is not None and byte_position < self._growing_position:
            number = bisect_right(self._starts, byte_position) - 1
            while byte_position < end_position and number < len(self._blocks):
                block = self._blocks[number]
                at = byte_position - self._starts[number]
                view = memoryview(block)[at : at + end_position - byte_position]
                yield block, view
                byte_position += len(view)
                number += 1
        if byte_position < end_position:
            at = byte_position - self._growing_position
            yield self._growing, memoryview(self._growing)[at : at + end_position - byte_position]

    def drop(self, message_index: int) -> None:
        """Drop the messages before `message_index`, which must be a boundary of the run."""
        at = message_index - self.message_index
        if at <= 0:
            return
        self.message_index = message_index
        self.byte_position = self.ends[at - 1]
        self.ends = self.ends[at:]
        del self.times[: 2 * bisect_right(self._time_runs, message_index, key=self._run_end)]
        if self.byte_position >= self._growing_position:
            del self._growing[: self.byte_position - self._growing_position]
            self._growing_position = self.byte_position
            self._blocks, self._starts = None, _NO_STARTS
        elif self._blocks is not None:
            number = bisect_right(self._starts, self.byte_position) - 1
            del self._blocks[:number], self._starts[:number]
            self._shrink_first(self._blocks)

    def _shrink_first(self, blocks: list[bytes | bytearray]) -> None:
        """Free the dropped part of the first block once it is half of it, so that each byte is copied at most once."""
        unused = self.byte_position - self._starts[0]
        if unused * 2 >= len(blocks[0]):
            blocks[0] = blocks[0][unused:]
            self._starts[0] = self.byte_position

    def _seal(self) -> None:
        self._add_block(self._growing, self._growing_position)
        self._growing_position += len(self._growing)
        self._growing = bytearray()

    def _add_block(self, block: bytes | bytearray, byte_position: int) -> None:
        if self._blocks is None:
            self._blocks, self._starts = [], []
        self._blocks.append(block)
        self._starts.append(byte_position)


_NO_STARTS: Final[list[int]] = []
