"""What the store holds of one stream, and how to find one's way in it: extents in packs, then tails in memory.

The bytes of a stream are a chain of runs without gap: its extents, then the tail that a checkpoint is just saving,
then the tail that grows. All that is asked of a stream is asked of its runs, in order, from the right one on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from headwater.storage import extents
from headwater.storage.extents import NO_EXTENTS, Extent
from headwater.storage.interface import CorruptError
from headwater.storage.packs.pack import DamagedPageError, Pack
from headwater.storage.packs.pack_set import PackSet
from headwater.storage.tail import Tail

TAIL_BYTES: Final = 320
"""About what an empty tail costs in memory: itself, its buffer and its index."""


class Run(Protocol):
    """Consecutive messages that lie together: a `Tail` in memory, or a `SavedRun` in a pack."""

    @property
    def end_index(self) -> int: ...

    @property
    def end_position(self) -> int: ...

    def boundary(self, index: int) -> int | None: ...

    def cut(self, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]: ...

    def lengths(self, index: int, end_index: int) -> list[int]: ...

    def read(self, position: int, end_position: int) -> Sequence[bytes | memoryview]: ...


class DamagedRangeError(Exception):
    """Bytes of a stream that cannot be given out. `position` is the first that may be affected."""

    def __init__(self, position: int, what: str) -> None:
        super().__init__(what)
        self.position = position


class SavedRun:
    """An extent, read in place."""

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
        with self._naming(self.position):
            return self.position + self._pack.ends(self._extent)[at - 1]

    def cut(self, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        low = index - self.index
        ends = self._pack.ends(self._extent)
        with self._naming(position):
            at = bisect_right(ends, position + max_bytes - self.position, low, end_index - self.index)
            at = max(at, low + 1)
            return self.index + at, self.position + ends[at - 1]

    def lengths(self, index: int, end_index: int) -> list[int]:
        low = index - self.index
        with self._naming(self.position):
            ends = self._pack.ends(self._extent).slice(max(low - 1, 0), end_index - self.index).tolist()
        starts = ends[:-1] if low else [0, *ends[:-1]]
        return [end - start for start, end in zip(starts, ends[1:] if low else ends, strict=True)]

    def read(self, position: int, end_position: int) -> Sequence[memoryview]:
        start = self._extent.offset + position - self.position
        try:
            return (self._pack.data(start, start + end_position - position),)
        except DamagedPageError as damage:
            raise DamagedRangeError(position + max(damage.offset - start, 0), str(damage)) from damage
        except OSError as error:
            raise DamagedRangeError(position, f"{self._pack.path} cannot be read: {error}") from error

    @contextmanager
    def _naming(self, position: int) -> Iterator[None]:
        """Let damage to the index tell where in the stream it is felt."""
        try:
            yield
        except DamagedPageError as damage:
            raise DamagedRangeError(position, f"{damage} (its index)") from damage
        except OSError as error:
            raise DamagedRangeError(position, f"{self._pack.path} cannot be read: {error}") from error


class StreamData:
    """One stream, from its base on: what lies before is not its own, or was trimmed.

    An idle stream is nothing but this and its extents.
    """

    __slots__ = ("base_index", "base_position", "extents", "frozen", "tail")

    def __init__(self, base_index: int, base_position: int, blob: bytes = NO_EXTENTS) -> None:
        self.base_index = base_index
        self.base_position = base_position
        self.extents = blob
        self.frozen: Tail | None = None
        self.tail: Tail | None = None

    @property
    def end(self) -> tuple[int, int]:
        """Index and position after the last message."""
        tail = self.tail or self.frozen
        if tail is not None:
            return tail.end_index, tail.end_position
        if self.extents:
            extent = extents.last(self.extents)
            return extent.end_index, extent.end_position
        return self.base_index, self.base_position

    @property
    def payload_bytes(self) -> int:
        return self.end[1] - self.base_position

    def growing_tail(self) -> Tail:
        """The tail that takes what comes next."""
        if self.tail is None:
            self.tail = Tail(*self.end)
        return self.tail

    def trim(self, pack_set: PackSet, index: int, position: int) -> None:
        """Let go of what lies before. A tail that is being saved is trimmed once that is done."""
        self.base_index, self.base_position = index, position
        if self.tail is not None:
            self.tail.drop(index)
        self.trim_extents(pack_set)

    def trim_extents(self, pack_set: PackSet) -> None:
        rest = extents.after(self.extents, self.base_position)
        pack_set.release(self.extents[: len(self.extents) - len(rest)])
        self.extents = rest

    def freeze(self) -> Tail | None:
        """Set aside what is in memory, unchanging from now on, for a checkpoint to save."""
        assert self.frozen is None
        self.frozen, self.tail = self.tail, None
        return self.frozen

    def runs_from_index(self, pack_set: PackSet, index: int) -> Iterator[Run]:
        """The runs from the one that holds message `index` on."""
        tail, frozen = self.tail, self.frozen
        if index < self.base_index:
            raise DamagedRangeError(self.base_position, f"messages before {self.base_index} are no longer stored")
        if tail is None or index < tail.index:
            if self.extents and (frozen is None or index < frozen.index):
                yield from self._saved(pack_set, extents.find_index(self.extents, index))
            if frozen is not None:
                yield frozen
        if tail is not None:
            yield tail

    def runs_from_position(self, pack_set: PackSet, position: int) -> Iterator[Run]:
        tail, frozen = self.tail, self.frozen
        if position < self.base_position:
            raise DamagedRangeError(position, f"bytes before {self.base_position} are no longer stored")
        if tail is None or position < tail.position:
            if self.extents and (frozen is None or position < frozen.position):
                yield from self._saved(pack_set, extents.find_position(self.extents, position))
            if frozen is not None:
                yield frozen
        if tail is not None:
            yield tail

    def _saved(self, pack_set: PackSet, first: int) -> Iterator[SavedRun]:
        for number in range(first, extents.count(self.extents)):
            extent = extents.at(self.extents, number)
            try:
                yield SavedRun(pack_set.pack(extent.pack), extent)
            except (OSError, CorruptError) as error:
                raise DamagedRangeError(extent.position, f"pack {extent.pack} cannot be opened: {error}") from error


def boundary(stored: StreamData, pack_set: PackSet, index: int) -> int | None:
    """Position after `index` messages, or None outside the stream's own data."""
    if index == stored.base_index:
        return stored.base_position
    if index < stored.base_index:
        return None
    for run in stored.runs_from_index(pack_set, index):
        return run.boundary(index)
    return None


def cut(
    stored: StreamData, pack_set: PackSet, index: int, position: int, end_index: int, max_bytes: int
) -> tuple[int, int]:
    """The last boundary within `max_bytes` of (index, position), at least one message on, at most `end_index`."""
    limit = position + max_bytes
    found = (index, position)
    for run in stored.runs_from_index(pack_set, index):
        further = run.cut(*found, min(end_index, run.end_index), limit - found[1])
        if found[0] > index and further[1] > limit:
            break
        found = further
        if found[0] < run.end_index or found[0] >= end_index or found[1] >= limit:
            break
    return found


def lengths(stored: StreamData, pack_set: PackSet, index: int, end_index: int) -> list[int]:
    found: list[int] = []
    for run in stored.runs_from_index(pack_set, index):
        if index >= end_index:
            break
        stop = min(end_index, run.end_index)
        found += run.lengths(index, stop)
        index = stop
    return found


def read(stored: StreamData, pack_set: PackSet, position: int, end_position: int) -> list[bytes | memoryview]:
    pieces: list[bytes | memoryview] = []
    for run in stored.runs_from_position(pack_set, position):
        if position >= end_position:
            break
        stop = min(end_position, run.end_position)
        pieces += run.read(position, stop)
        position = stop
    return pieces


def memory_of(tail: Tail | None) -> int:
    """About how much memory a tail takes."""
    return TAIL_BYTES + tail.size + 8 * len(tail.ends) if tail is not None else 0
