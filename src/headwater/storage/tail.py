"""A run of consecutive messages of one stream, in memory: its bytes, and where each message ends.

Used for all of a stream in `memory`, and for the hot tail in the other modes. Positions and indexes are absolute.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence


class Tail:
    """Bytes from `position`, the first of them the start of message `index`."""

    __slots__ = ("data", "ends", "index", "position")

    def __init__(self, index: int, position: int) -> None:
        self.index = index
        self.position = position
        self.data = bytearray()
        self.ends = array("Q")

    @property
    def end_index(self) -> int:
        return self.index + len(self.ends)

    @property
    def end_position(self) -> int:
        return self.position + len(self.data)

    def extend(self, payload: bytes, lengths: Sequence[int]) -> None:
        end = self.position + len(self.data)
        self.data += payload
        if len(lengths) == 1:
            self.ends.append(end + len(payload))
            return
        for length in lengths:
            end += length
            self.ends.append(end)

    def boundary(self, index: int) -> int | None:
        """Position after `index` messages of the stream, for boundaries inside the run or at its start."""
        at = index - self.index
        if at == 0:
            return self.position
        if 0 < at <= len(self.ends):
            return self.ends[at - 1]
        return None

    def cut(self, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        """The last boundary within `max_bytes` of (index, position), at least one message on."""
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

    def read(self, position: int, end_position: int) -> bytes:
        # A copy: a view would pin the buffer and make the next append fail.
        return bytes(memoryview(self.data)[position - self.position : end_position - self.position])

    def drop(self, index: int) -> None:
        """Forget the messages before `index`, which must be a boundary of the run."""
        at = index - self.index
        if at <= 0:
            return
        position = self.ends[at - 1]
        del self.data[: position - self.position]
        self.ends = self.ends[at:]
        self.index = index
        self.position = position
