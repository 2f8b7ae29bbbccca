"""Test doubles for the engine: a manual clock, a manual scheduler, and stores that can be observed.

Nothing runs automatically. A test decides when a tick ends, when the commit thread works, when it reports back and when
the disk fails, so a test can write down any interleaving as a list of steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headwater.core.records import Append, Create, Delete, Image, Record, decode_record, encode_record
from headwater.storage.arrival_times import TimeRun
from headwater.storage.interface import Committed, ImageOf, Storage, Usage, WriteFailedError
from headwater.storage.memory import MemoryStorage

START_MS = 1_800_000_000_000


class ManualClock:
    def __init__(self, now_ms: int = START_MS) -> None:
        self.at_ms = now_ms
        self.ahead_ms = 0
        """How far the wall clock is ahead, because it was set or the machine was suspended."""
        self._moved_ms = 0

    def now_ms(self) -> int:
        return self.at_ms

    def wall_ms(self) -> int:
        return self.at_ms + self.ahead_ms

    def move_to(self, now_ms: int) -> None:
        self._moved_ms += now_ms - self.at_ms
        self.ahead_ms -= now_ms - self.at_ms
        self.at_ms = now_ms

    @property
    def monotonic_ms(self) -> int:
        """The time that timers use; clock jumps do not affect it."""
        return self.at_ms - self._moved_ms

    @monotonic_ms.setter
    def monotonic_ms(self, value: int) -> None:
        self.at_ms = value + self._moved_ms


class ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualScheduler:
    """A scheduler without an event loop: the test runs ticks, timers and the commit thread."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[int, int, ManualTimer]] = []
        self._order = itertools.count()
        self._work: deque[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = deque()
        self._reports: deque[tuple[Callable[[BaseException | None], None], BaseException | None]] = deque()
        self.closed = False

    # -- called by the engine

    def soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        due_ms = self._clock.monotonic_ms + max(1, round(delay_s * 1000))
        heapq.heappush(self._timers, (due_ms, next(self._order), timer))
        return timer

    def on_thread(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self._work.append((work, done))

    def timer_s(self) -> float:
        """The manual clock, so that a test does the same steps on a busy machine."""
        return self._clock.monotonic_ms / 1000

    def close(self) -> None:
        self.closed = True

    # -- called by tests

    @property
    def quiet(self) -> bool:
        """Whether only timers are left."""
        return not (self._soon or self._work or self._reports)

    def tick(self) -> None:
        """End the current tick: run the callbacks that were scheduled before it, and no others."""
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def work(self) -> bool:
        """Run the next task of the commit thread; its result is not reported to the loop yet."""
        if not self._work:
            return False
        work, done = self._work.popleft()
        try:
            work()
        except Exception as error:
            self._reports.append((done, error))
        else:
            self._reports.append((done, None))
        return True

    def report(self) -> bool:
        """Report the oldest finished task to the loop."""
        if not self._reports:
            return False
        done, error = self._reports.popleft()
        done(error)
        return True

    def run_until_idle(self) -> None:
        """Run until only timers are left."""
        for _ in range(10_000):
            if self.quiet:
                return
            self.tick()
            self.work()
            self.report()
        raise AssertionError("the engine does not become idle")

    def advance(self, milliseconds: int) -> None:
        """Advance the time, and run every due timer at its own deadline."""
        until_ms = self._clock.monotonic_ms + milliseconds
        while self._timers and self._timers[0][0] <= until_ms:
            due_ms, _, timer = heapq.heappop(self._timers)
            self._clock.monotonic_ms = max(self._clock.monotonic_ms, due_ms)
            if timer.callback is not None:
                timer.callback()
        self._clock.monotonic_ms = until_ms


class Durable:
    """The durable state of one incarnation."""

    def __init__(self, name: str, message_index: int, closed: bool) -> None:
        self.name = name
        self.message_index = message_index
        self.closed = closed
        self.deleted = False


class WatchedStorage:
    """A store that records what is durable and published, and whose disk can be made to fail."""

    def __init__(self, inner: Storage, *, waits_for_disk: bool | None = None) -> None:
        self._inner = inner
        self._waits = inner.waits_for_disk if waits_for_disk is None else waits_for_disk
        self.durable: dict[int, Durable] = {}
        self.batches: list[int] = []
        """The size of each batch that was written."""
        self.fails_in: int | None = None
        """Fail after this many more writes; every later write fails too."""
        self.keeps_failed = False
        """Whether the records of a failed write are stored nevertheless."""
        self.failures = 0
        self.on_publish: Callable[[Committed], None] = lambda _: None

    @property
    def waits_for_disk(self) -> bool:
        return self._waits

    def recover(self) -> Iterable[Record]:
        for record in self._inner.recover():
            self._note(record)
            yield record

    def takes_long(self) -> bool:
        return self._inner.takes_long()

    def write(self, batch: Sequence[Committed]) -> None:
        if self.fails_in is not None:
            if self.fails_in == 0:
                self.failures += 1
                if self.keeps_failed:
                    self._inner.write(batch)
                raise WriteFailedError("the test made this write fail")
            self.fails_in -= 1
        self._inner.write(batch)
        self.batches.append(len(batch))
        for record, _ in batch:
            self._note(record)

    def publish(self, batch: Sequence[Committed]) -> None:
        self._inner.publish(batch)
        for committed in batch:
            if not self._waits:
                self._note(committed.record)
            self.on_publish(committed)

    def boundary(self, stream_id: int, message_index: int) -> int | None:
        return self._inner.boundary(stream_id, message_index)

    def cut(
        self, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        return self._inner.cut(stream_id, message_index, byte_position, end_index, max_bytes)

    def lengths(self, stream_id: int, message_index: int, end_index: int) -> Sequence[int]:
        return self._inner.lengths(stream_id, message_index, end_index)

    def arrivals(self, stream_id: int, message_index: int, end_index: int) -> Sequence[TimeRun]:
        return self._inner.arrivals(stream_id, message_index, end_index)

    def first_since(self, stream_id: int, at_ms: int) -> int:
        return self._inner.first_since(stream_id, at_ms)

    def read(self, stream_id: int, byte_position: int, end_position: int) -> Sequence[bytes | memoryview]:
        return self._inner.read(stream_id, byte_position, end_position)

    def trim(self, stream_id: int, message_index: int, byte_position: int) -> None:
        self._inner.trim(stream_id, message_index, byte_position)

    def maintain(self, image_of: ImageOf) -> None:
        self._inner.maintain(image_of)

    def refusal(self) -> str | None:
        return self._inner.refusal()

    def busy(self) -> str | None:
        return self._inner.busy()

    def usage(self) -> Usage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def _note(self, record: Record) -> None:
        if type(record) is Create:
            base = record.fork.message_index if record.fork is not None else 0
            self.durable[record.id] = Durable(record.name, base + len(record.lengths), record.closed)
        elif type(record) is Append:
            state = self.durable[record.id]
            state.message_index = record.message_index + len(record.lengths)
            state.closed = state.closed or record.close
        elif type(record) is Delete:
            self.durable[record.id].deleted = True
        elif type(record) is Image:
            self.durable[record.id] = Durable(record.name, record.message_index, record.closed)
            self.durable[record.id].deleted = record.deleted


class JournalStorage(MemoryStorage):
    """A durable `MemoryStorage`: it keeps encoded records in a list that survives a restart."""

    waits_for_disk = True

    def __init__(self, journal: list[tuple[bytes, tuple[int, ...]]]) -> None:
        super().__init__()
        self._journal = journal

    def recover(self) -> Iterable[Record]:
        for committed in self.kept():
            super().publish((committed,))
            yield committed.record

    def kept(self) -> Iterable[Committed]:
        """Yield the journal's records in order."""
        for encoded, removed in tuple(self._journal):
            yield Committed(decode_record(encoded), removed)

    def write(self, batch: Sequence[Committed]) -> None:
        self._journal.extend((encode_record(record), removed) for record, removed in batch)


class Backing(Protocol):
    """The place where a store keeps its data. A store opened after a crash has what was durable."""

    survives: bool

    def open(self) -> Storage: ...

    def crash(self, storage: Storage) -> None:
        """End the process without closing the store."""

    def discard(self) -> None: ...


class MemoryBacking:
    """Memory: nothing survives a restart."""

    survives = False

    def open(self) -> Storage:
        return MemoryStorage()

    def crash(self, storage: Storage) -> None:
        raise AssertionError("memory does not survive a crash")

    def discard(self) -> None: ...


class JournalBacking:
    """A journal in a list."""

    survives = True

    def __init__(self) -> None:
        self.journal: list[tuple[bytes, tuple[int, ...]]] = []

    def open(self) -> Storage:
        return JournalStorage(self.journal)

    def crash(self, storage: Storage) -> None: ...

    def discard(self) -> None:
        self.journal.clear()
