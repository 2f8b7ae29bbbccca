"""Doubles of the engine's seams: a clock and a scheduler that only move when told to, and stores that can be watched.

Nothing here runs by itself. A test decides when a tick ends, when the commit thread works, when it reports back and
when the disk fails, so every interleaving of them can be written down as a list of steps.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headwater.core.records import Append, Create, Delete, Image, Record, decode_record, encode_record
from headwater.storage.interface import Committed, ImageOf, Storage, Usage, WriteFailedError
from headwater.storage.memory import MemoryStorage

START_MS = 1_800_000_000_000


class ManualClock:
    def __init__(self, now_ms: int = START_MS) -> None:
        self.at_ms = now_ms
        self.ahead_ms = 0
        """How far the wall clock is ahead: it was set, or the machine was suspended."""
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
        """The time that timers run by: it knows nothing of jumps."""
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
    """A loop without a loop: ticks, timers and the one commit thread, each moved by hand."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[int, int, ManualTimer]] = []
        self._order = itertools.count()
        self._work: deque[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = deque()
        self._reports: deque[tuple[Callable[[BaseException | None], None], BaseException | None]] = deque()
        self.closed = False

    # -- what the engine calls

    def soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        due_ms = self._clock.monotonic_ms + max(1, round(delay_s * 1000))
        heapq.heappush(self._timers, (due_ms, next(self._order), timer))
        return timer

    def on_thread(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self._work.append((work, done))

    def close(self) -> None:
        self.closed = True

    # -- what a test calls

    @property
    def quiet(self) -> bool:
        """Nothing is left to do but timers."""
        return not (self._soon or self._work or self._reports)

    def tick(self) -> None:
        """End the current tick: run what was put off until then, and no more than that."""
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def work(self) -> bool:
        """Let the commit thread do its next piece of work; the loop does not know yet."""
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
        """Let the loop hear of the oldest finished piece of work."""
        if not self._reports:
            return False
        done, error = self._reports.popleft()
        done(error)
        return True

    def settle(self) -> None:
        """Run on until nothing but timers is left."""
        for _ in range(10_000):
            if self.quiet:
                return
            self.tick()
            self.work()
            self.report()
        raise AssertionError("the engine never comes to rest")

    def advance(self, milliseconds: int) -> None:
        """Let time pass, and run every timer that comes due at its own moment."""
        until_ms = self._clock.monotonic_ms + milliseconds
        while self._timers and self._timers[0][0] <= until_ms:
            due_ms, _, timer = heapq.heappop(self._timers)
            self._clock.monotonic_ms = max(self._clock.monotonic_ms, due_ms)
            if timer.callback is not None:
                timer.callback()
        self._clock.monotonic_ms = until_ms


class Durable:
    """What a store made durable of one incarnation."""

    def __init__(self, name: str, index: int, closed: bool) -> None:
        self.name = name
        self.index = index
        self.closed = closed
        self.deleted = False


class WatchedStorage:
    """A store under observation: what is durable, what readers have, and a disk that fails when told to."""

    def __init__(self, inner: Storage, *, waits_for_disk: bool | None = None) -> None:
        self._inner = inner
        self._waits = inner.waits_for_disk if waits_for_disk is None else waits_for_disk
        self.durable: dict[int, Durable] = {}
        self.batches: list[int] = []
        """The size of each batch that was written."""
        self.fails_in: int | None = None
        """Fail the write after this many more; once failed, always."""
        self.keeps_failed = False
        """Whether what a failed write was given is on the disk all the same."""
        self.failures = 0
        self.on_publish: Callable[[Committed], None] = lambda _: None

    @property
    def waits_for_disk(self) -> bool:
        return self._waits

    def recover(self) -> Iterable[Record]:
        for record in self._inner.recover():
            self._note(record)
            yield record

    def write(self, batch: Sequence[Committed]) -> None:
        if self.fails_in is not None:
            if self.fails_in == 0:
                self.failures += 1
                if self.keeps_failed:
                    self._inner.write(batch)
                raise WriteFailedError("the disk of this test is broken")
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

    def boundary(self, stream_id: int, index: int) -> int | None:
        return self._inner.boundary(stream_id, index)

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        return self._inner.cut(stream_id, index, position, end_index, max_bytes)

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]:
        return self._inner.lengths(stream_id, index, end_index)

    def read(self, stream_id: int, position: int, end_position: int) -> Sequence[bytes | memoryview]:
        return self._inner.read(stream_id, position, end_position)

    def trim(self, stream_id: int, index: int, position: int) -> None:
        self._inner.trim(stream_id, index, position)

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
            state.index = record.message_index + len(record.lengths)
            state.closed = state.closed or record.close
        elif type(record) is Delete:
            self.durable[record.id].deleted = True
        elif type(record) is Image:
            self.durable[record.id] = Durable(record.name, record.message_index, record.closed)
            self.durable[record.id].deleted = record.deleted


class JournalStorage(MemoryStorage):
    """A store that survives: `MemoryStorage` over a list of encoded records that outlives it."""

    waits_for_disk = True

    def __init__(self, journal: list[tuple[bytes, tuple[int, ...]]]) -> None:
        super().__init__()
        self._journal = journal

    def recover(self) -> Iterable[Record]:
        for committed in self.kept():
            super().publish((committed,))
            yield committed.record

    def kept(self) -> Iterable[Committed]:
        """What the journal has, in order."""
        for encoded, removed in tuple(self._journal):
            yield Committed(decode_record(encoded), removed)

    def write(self, batch: Sequence[Committed]) -> None:
        self._journal.extend((encode_record(record), removed) for record, removed in batch)


class Ground(Protocol):
    """Where a store lives. Opened again after a crash, it has what was durable."""

    survives: bool

    def open(self) -> Storage: ...

    def crash(self, storage: Storage) -> None:
        """The process is gone: the store was not closed."""

    def discard(self) -> None: ...


class MemoryGround:
    """Nothing survives, and no disk is waited for."""

    survives = False

    def open(self) -> Storage:
        return MemoryStorage()

    def crash(self, storage: Storage) -> None:
        raise AssertionError("nothing survives in memory")

    def discard(self) -> None: ...


class JournalGround:
    """A disk that is a list."""

    survives = True

    def __init__(self) -> None:
        self._journal: list[tuple[bytes, tuple[int, ...]]] = []

    def open(self) -> Storage:
        return JournalStorage(self._journal)

    def crash(self, storage: Storage) -> None: ...

    def discard(self) -> None:
        self._journal.clear()
