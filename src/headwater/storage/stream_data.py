"""The bytes of one stream: extents in the cold store, then tails in memory.

They are a chain of runs without a gap: the stream's extents, then the tail that a checkpoint is saving, then the tail
that grows. A tail may begin before the end of the extents; then it also caches their data. Every read of a stream uses
its runs, in order, from the last run that contains its start.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from headwater.core.records import ForkPoint
from headwater.storage import extents
from headwater.storage.arrival_times import TimeRun
from headwater.storage.descriptor_reserve import EXHAUSTED
from headwater.storage.extents import NO_EXTENTS, Extent
from headwater.storage.interface import CorruptError, StorageError
from headwater.storage.tail import TIME_RUN_BYTES, Tail

TAIL_BYTES: Final = 400
"""Approximate memory of an empty tail: the object, its buffer, its index and its times."""


class Run(Protocol):
    """Consecutive messages that are stored together: a `Tail` in memory, or an extent in the cold store."""

    @property
    def end_index(self) -> int: ...

    @property
    def end_position(self) -> int: ...

    def boundary(self, message_index: int) -> int | None: ...

    def cut(self, message_index: int, byte_position: int, end_index: int, max_bytes: int) -> tuple[int, int]: ...

    def lengths(self, message_index: int, end_index: int) -> list[int]: ...

    def arrivals(self, message_index: int, end_index: int) -> list[TimeRun]: ...

    def first_since(self, at_ms: int) -> int: ...

    def read(self, byte_position: int, end_position: int) -> Sequence[bytes | memoryview]: ...


class ColdRuns(Protocol):
    """The part of a cold store that stream data needs."""

    def run(self, stream_id: int, extent: Extent) -> Run:
        """Open an extent for reading. Raises OSError or `CorruptError` if it cannot be opened."""

    def release(self, stream_id: int, blob: bytes, byte_position: int) -> None:
        """Note that these extents, and all bytes of the stream before `byte_position`, are no longer used."""


class DamagedRangeError(Exception):
    """Bytes of a stream cannot be served. `byte_position` is the first that may be affected."""

    def __init__(self, byte_position: int, what: str) -> None:
        super().__init__(what)
        self.byte_position = byte_position


class StreamData:
    """The data of one stream, from its base: what is before the base belongs to its source, or was trimmed.

    An idle stream costs only this object and its extents.
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
        """Message index and byte position after the last message."""
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

    @property
    def unsaved_memory(self) -> int:
        """Estimated memory of the tail, without the part that only caches data of the cold store."""
        tail = self.tail
        cached = self.cached_index
        if tail is None or cached is None:
            return memory_of(tail)
        saved = extents.last(self.extents).end_position
        times = TIME_RUN_BYTES * tail.time_runs_from(cached)
        return tail.end_position - saved + 8 * (tail.end_index - cached) + times

    @property
    def cached_index(self) -> int | None:
        """The message up to which the tail caches data of the cold store; None if it caches nothing."""
        if self.tail is None or not self.extents:
            return None
        end_index = extents.last(self.extents).end_index
        return end_index if end_index > self.tail.message_index else None

    def drop_cached(self, min_bytes: int | None = None) -> None:
        """Free the part of the tail that is also in the cold store: all of it, or the oldest `min_bytes`."""
        message_index, tail = self.cached_index, self.tail
        if message_index is None or tail is None:
            return
        if min_bytes is not None:
            message_index = min(
                message_index, tail.message_index + bisect_left(tail.ends, tail.byte_position + min_bytes) + 1
            )
        tail.drop(message_index)
        if not tail.ends:
            self.tail = None

    def growing_tail(self) -> Tail:
        """The tail that new messages are added to."""
        if self.tail is None:
            self.tail = Tail(*self.end)
        return self.tail

    def trim(self, cold: ColdRuns, stream_id: int, message_index: int, byte_position: int) -> None:
        """Drop everything before a boundary. A tail that is being saved is trimmed after that."""
        self.base_index, self.base_position = message_index, byte_position
        if self.tail is not None:
            self.tail.drop(message_index)
        self.trim_extents(cold, stream_id)

    def trim_extents(self, cold: ColdRuns, stream_id: int) -> None:
        rest = extents.after(self.extents, self.base_position)
        cold.release(stream_id, self.extents[: len(self.extents) - len(rest)], self.base_position)
        self.extents = rest

    def freeze(self) -> Tail | None:
        """Freeze the data in memory for a checkpoint to save; it does not change from now on."""
        assert self.frozen is None
        self.frozen, self.tail = self.tail, None
        return self.frozen

    # -- reading ---------------------------------------------------------------------------------------------------

    def boundary(self, cold: ColdRuns, stream_id: int, message_index: int) -> int | None:
        """Byte position after `message_index` messages, or None outside the stream's own data."""
        if message_index == self.base_index:
            return self.base_position
        if message_index < self.base_index:
            return None
        for run in self._runs_from_message_index(cold, stream_id, message_index):
            return run.boundary(message_index)
        return None

    def cut(
        self, cold: ColdRuns, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        """The last boundary within `max_bytes` of (message_index, byte_position), at least one message further, at most
        `end_index`."""
        limit = byte_position + max_bytes
        found = (message_index, byte_position)
        for run in self._runs_from_message_index(cold, stream_id, message_index):
            further = run.cut(*found, min(end_index, run.end_index), limit - found[1])
            if found[0] > message_index and further[1] > limit:
                break
            found = further
            if found[0] < run.end_index or found[0] >= end_index or found[1] >= limit:
                break
        return found

    def lengths(self, cold: ColdRuns, stream_id: int, message_index: int, end_index: int) -> list[int]:
        found: list[int] = []
        for run, start, stop in self._parts(cold, stream_id, message_index, end_index):
            found += run.lengths(start, stop)
        return found

    def arrivals(self, cold: ColdRuns, stream_id: int, message_index: int, end_index: int) -> list[TimeRun]:
        """The arrival times of the messages from `message_index` to `end_index`."""
        found: list[TimeRun] = []
        for run, start, stop in self._parts(cold, stream_id, message_index, end_index):
            found += run.arrivals(start, stop)
        return found

    def first_since(self, cold: ColdRuns, stream_id: int, at_ms: int) -> int:
        """The index of the first message that arrived at `at_ms` or later; the end if there is none."""
        found = self.end[0]
        for tail in (self.tail, self.frozen):
            if tail is not None:
                found = tail.first_since(at_ms)
                if found > tail.message_index:
                    return found
        low, high = 0, extents.count(self.extents)
        while low < high:
            # In the first extent that has such a message, or at the end of the one before it.
            middle = (low + high) // 2
            extent = extents.at(self.extents, middle)
            run = next(self._cold_runs(cold, stream_id, middle))
            within = run.first_since(at_ms)
            if within < extent.end_index:
                found, high = within, middle
            else:
                low = middle + 1
        return found

    def read(self, cold: ColdRuns, stream_id: int, byte_position: int, end_position: int) -> list[bytes | memoryview]:
        pieces: list[bytes | memoryview] = []
        for run in self._runs_from_byte_position(cold, stream_id, byte_position):
            if byte_position >= end_position:
                break
            stop = min(end_position, run.end_position)
            pieces += run.read(byte_position, stop)
            byte_position = stop
        return pieces

    def _parts(
        self, cold: ColdRuns, stream_id: int, message_index: int, end_index: int
    ) -> Iterator[tuple[Run, int, int]]:
        """The runs with messages from `message_index` to `end_index`, each with its part of that range."""
        for run in self._runs_from_message_index(cold, stream_id, message_index):
            if message_index >= end_index:
                return
            stop = min(end_index, run.end_index)
            yield run, message_index, stop
            message_index = stop

    def _runs_from_message_index(self, cold: ColdRuns, stream_id: int, message_index: int) -> Iterator[Run]:
        """The runs from the one that contains message `message_index`."""
        tail, frozen = self.tail, self.frozen
        if message_index < self.base_index:
            raise DamagedRangeError(self.base_position, f"messages before {self.base_index} are no longer stored")
        if tail is None or message_index < tail.message_index:
            if self.extents and (frozen is None or message_index < frozen.message_index):
                yield from self._cold_runs(cold, stream_id, extents.find_message_index(self.extents, message_index))
            if frozen is not None:
                yield frozen
        if tail is not None:
            yield tail

    def _runs_from_byte_position(self, cold: ColdRuns, stream_id: int, byte_position: int) -> Iterator[Run]:
        tail, frozen = self.tail, self.frozen
        if byte_position < self.base_position:
            raise DamagedRangeError(byte_position, f"bytes before {self.base_position} are no longer stored")
        if tail is None or byte_position < tail.byte_position:
            if self.extents and (frozen is None or byte_position < frozen.byte_position):
                yield from self._cold_runs(cold, stream_id, extents.find_byte_position(self.extents, byte_position))
            if frozen is not None:
                yield frozen
        if tail is not None:
            yield tail

    def _cold_runs(self, cold: ColdRuns, stream_id: int, first: int) -> Iterator[Run]:
        for number in range(first, extents.count(self.extents)):
            extent = extents.at(self.extents, number)
            try:
                yield cold.run(stream_id, extent)
            except (OSError, CorruptError) as error:
                if isinstance(error, OSError) and error.errno in EXHAUSTED:
                    raise StorageError(f"pack {extent.pack} cannot be opened at the moment: {error}") from error
                raise DamagedRangeError(
                    extent.byte_position, f"pack {extent.pack} cannot be opened: {error}"
                ) from error


def new_stream(fork: ForkPoint | None) -> StreamData:
    """The data of a new stream."""
    return StreamData(fork.message_index, fork.byte_position) if fork is not None else StreamData(0, 0)


def memory_of(tail: Tail | None) -> int:
    """The approximate memory of a tail."""
    return TAIL_BYTES + tail.size + 8 * (len(tail.ends) + len(tail.times)) if tail is not None else 0
