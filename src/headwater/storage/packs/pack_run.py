"""An extent of a pack, read in place. Damage is reported with the position in the stream that it affects."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.storage.extents import Extent
from headwater.storage.packs.pack import DamagedPageError, Pack
from headwater.storage.stream_data import DamagedRangeError


class PackRun:
    __slots__ = ("_extent", "_pack", "end_index", "end_position", "index", "position")

    def __init__(self, pack: Pack, extent: Extent) -> None:
        self._pack = pack
        self._extent = extent
        self.index = extent.first_index
        self.position = extent.position
        self.end_index = extent.end_index
        self.end_position = extent.end_position

    def boundary(self, index: int) -> int | None:
        at = index - self.index
        if at == 0:
            return self.position
        if not 0 < at <= self._extent.messages:
            return None
        with self._locating(self.position):
            return self.position + self._pack.ends(self._extent)[at - 1]

    def cut(self, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        low = index - self.index
        ends = self._pack.ends(self._extent)
        with self._locating(position):
            at = bisect_right(ends, position + max_bytes - self.position, low, end_index - self.index)
            at = max(at, low + 1)
            return self.index + at, self.position + ends[at - 1]

    def lengths(self, index: int, end_index: int) -> list[int]:
        low = index - self.index
        with self._locating(self.position):
            ends = self._pack.ends(self._extent).slice(max(low - 1, 0), end_index - self.index).tolist()
        starts = ends[:-1] if low else [0, *ends[:-1]]
        return [end - start for start, end in zip(starts, ends[1:] if low else ends, strict=True)]

    def read(self, position: int, end_position: int) -> tuple[memoryview]:
        start = self._extent.offset + position - self.position
        try:
            return (self._pack.data(start, start + end_position - position),)
        except DamagedPageError as damage:
            raise DamagedRangeError(position + max(damage.offset - start, 0), str(damage)) from damage
        except OSError as error:
            raise DamagedRangeError(position, f"{self._pack.path} cannot be read: {error}") from error

    @contextmanager
    def _locating(self, position: int) -> Iterator[None]:
        """Report damage to the index with the position in the stream."""
        try:
            yield
        except DamagedPageError as damage:
            raise DamagedRangeError(position, f"{damage} (its index)") from damage
        except OSError as error:
            raise DamagedRangeError(position, f"{self._pack.path} cannot be read: {error}") from error
