"""Retention: free bytes that cannot be read any more, and drop the front of streams by age and size.

The bytes of a stream may be removed when they are before what it retains, before what any fork at any depth still reads
from it, and before the start of a running bootstrap (a pin). `_update_floor` computes that floor, trims storage to
it, and continues with the source of the stream, whose floor may have moved with it.

Each stream with forks has a heap of the offsets that its forks need. Needs only move forward, so an outdated entry is
skipped: deleting a thousand forks takes a thousand steps, not a million.

Trimming is not recorded: the floors are computed from the catalog at every start.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.records import Retain
from headwater.core.retention import SLACK_SHARE, RetentionRule
from headwater.engine.clock import Clock
from headwater.engine.reading import StreamReader
from headwater.engine.scheduler import Scheduler, Timer
from headwater.engine.slices import Slices
from headwater.engine.stream import LiveStream
from headwater.storage.interface import Storage

log = logging.getLogger("headwater.engine")

INTERVAL_S: Final = 0.5
CHECKED_MAX: Final = 5000
"""Streams checked in one run of the timer. A check of a stream that is due takes 10 microseconds and more, so a run is
cut into slices."""


class Pin:
    """Keeps a stream's bytes from an offset for a running bootstrap. Release it exactly once."""

    __slots__ = ("_keeper", "offset", "stream")

    def __init__(self, keeper: RetentionKeeper, stream: LiveStream, offset: Offset) -> None:
        self._keeper = keeper
        self.stream = stream
        self.offset = offset

    def release(self) -> None:
        self._keeper.unpin(self)


class RetentionKeeper:
    def __init__(
        self,
        by_id: Mapping[int, LiveStream],
        storage: Storage,
        reader: StreamReader,
        clock: Clock,
        scheduler: Scheduler,
        rule: RetentionRule,
        freed: Callable[[str, int], None],
        retain: Callable[[LiveStream, Retain], None],
        trusts_clock: Callable[[], bool],
    ) -> None:
        self._by_id = by_id
        self._storage = storage
        self._reader = reader
        self._clock = clock
        self._scheduler = scheduler
        self._slices = Slices(scheduler)
        self._freed = freed
        self._retain = retain
        self._trusts_clock = trusts_clock
        """False after a clock jump: then nothing is dropped because of its age."""
        self._pins: dict[int, list[Pin]] = {}
        self._sources: dict[int, int] = {}
        """The source of each fork."""
        self._needs: dict[int, Offset] = {}
        """The first offset that each fork needs of its source; missing if it needs nothing."""
        self._needs_by_source: dict[int, list[tuple[int, int, int]]] = {}
        self._ended: set[int] = set()
        """Deleted streams that only forks still read. A deletion counts when it is durable."""
        self._watched: dict[int, None] = {}
        self._turn: deque[int] = deque()
        self._timer: Timer | None = None
        self._is_stopped = False
        self._failed: set[int] = set()
        self.errors = 0
        """The number of failed steps; for each stream only the first is logged."""
        self.rule: Final = rule

    # -- startup and shutdown --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register all forks, sources after their forks, then trim every stream to its floor."""
        forks: dict[int, list[LiveStream]] = {}
        for stream in self._by_id.values():
            if stream.fork is not None:
                forks.setdefault(stream.fork.source_id, []).append(stream)
            if stream.deleted:
                self._ended.add(stream.id)
            self._watch(stream)
        orphans = [fork for id_ in forks.keys() - self._by_id.keys() for fork in forks[id_]]
        for fork in orphans:
            log.error("the source of stream %r is missing: only its own data can be read", fork.name)
        sources = (self._by_id[id_] for id_ in forks if id_ in self._by_id)
        in_order = [stream for stream in sources if stream.fork is None] + orphans
        for stream in in_order:
            in_order.extend(forks.get(stream.id, ()))
        for stream in reversed(in_order):
            self._note_need(stream)
        for stream in self._by_id.values():
            self._attempt(stream, self._trim)
        self._timer = self._scheduler.later(INTERVAL_S, self._on_timer)

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- durable records -------------------------------------------------------------------------------------------

    def created(self, stream: LiveStream) -> None:
        self._note_need(stream)
        self._watch(stream)

    def retained(self, stream: LiveStream) -> None:
        self._update_floor(stream.id)

    def ended(self, stream: LiveStream, removed: Sequence[int]) -> None:
        """Handle a deletion. `removed` are the stream and the deleted sources above it that were removed with it."""
        self._watched.pop(stream.id, None)
        self._failed.discard(stream.id)
        if not removed:
            self._ended.add(stream.id)
            self._update_floor(stream.id)
            return
        source_id = None
        for stream_id in removed:
            source_id = self._sources.pop(stream_id, None)
            self._needs.pop(stream_id, None)
            self._needs_by_source.pop(stream_id, None)
            self._ended.discard(stream_id)
        if source_id is not None:
            self._update_floor(source_id)

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, stream: LiveStream, offset: Offset) -> Pin:
        """Keep everything from `offset` readable. It must not be before the earliest retained offset."""
        assert offset >= Offset(stream.durable_retained_index, stream.durable_retained_position)
        pin = Pin(self, stream, offset)
        self._pins.setdefault(stream.id, []).append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        pins = self._pins[pin.stream.id]
        pins.remove(pin)
        if not pins:
            del self._pins[pin.stream.id]
        self._update_floor(pin.stream.id)

    # -- floors ----------------------------------------------------------------------------------------------------

    def _update_floor(self, stream_id: int) -> None:
        """Trim a stream to its floor, then its source, and so on while needs change."""
        stream = self._by_id.get(stream_id)
        while stream is not None:
            self._trim(stream)
            if not self._note_need(stream) or stream.fork is None:
                return
            stream = self._by_id.get(stream.fork.source_id)

    def _floor(self, stream: LiveStream) -> Offset:
        """The first offset of the stream that can still be read; the tail if there is none."""
        floor = Offset(stream.durable_index, stream.durable_position)
        if stream.id not in self._ended:
            floor = Offset(stream.durable_retained_index, stream.durable_retained_position)
            for pin in self._pins.get(stream.id, ()):
                floor = min(floor, pin.offset)
        needs = self._needs_by_source.get(stream.id)
        while needs:
            message_index, byte_position, fork_id = needs[0]
            if self._needs.get(fork_id) == Offset(message_index, byte_position):
                return min(floor, Offset(message_index, byte_position))
            heapq.heappop(needs)
        return floor

    def _trim(self, stream: LiveStream) -> None:
        floor = self._floor(stream)
        if floor.message_index > stream.floor_index:
            self._storage.trim(stream.id, floor.message_index, floor.byte_position)
            self._freed(stream.name, floor.byte_position - stream.floor_position)
            stream.floor_index, stream.floor_position = floor.message_index, floor.byte_position

    def _note_need(self, stream: LiveStream) -> bool:
        """Update what a fork needs of its source: from its floor, if that is before its own data. True if changed."""
        if stream.fork is None:
            return False
        floor = self._floor(stream)
        self._sources[stream.id] = stream.fork.source_id
        if floor.message_index >= stream.base_index:
            return self._needs.pop(stream.id, None) is not None
        if self._needs.get(stream.id) == floor:
            return False
        self._needs[stream.id] = floor
        needs = self._needs_by_source.setdefault(stream.fork.source_id, [])
        heapq.heappush(needs, (floor.message_index, floor.byte_position, stream.id))
        return True

    # -- age and size ----------------------------------------------------------------------------------------------

    def _watch(self, stream: LiveStream) -> None:
        if self.rule.of(stream.retention).drops and not stream.deleted:
            self._watched[stream.id] = None

    def _on_timer(self) -> None:
        self._slices.add(self.check_next(), self._on_checked)

    def _on_checked(self, error: Exception | None) -> None:
        if error is not None:
            log.error("the check of retention failed", exc_info=error)
        if not self._is_stopped:
            self._timer = self._scheduler.later(INTERVAL_S, self._on_timer)

    def check_next(self) -> Iterator[None]:
        """Move the earliest retained offset of the streams whose turn it is, one in each step."""
        if not self._turn:
            self._turn.extend(self._watched)
        for _ in range(min(CHECKED_MAX, len(self._turn))):
            if self._is_stopped:
                return
            stream = self._by_id.get(self._turn.popleft())
            if stream is not None and stream.visible and not stream.deleted:
                self._attempt(stream, self._advance)
            yield

    def _attempt(self, stream: LiveStream, step: Callable[[LiveStream], None]) -> None:
        """Run one step for a stream. An error of one (a damaged index page) must not affect the others."""
        try:
            step(stream)
        except Exception as error:
            self.errors += 1
            if stream.id not in self._failed:
                self._failed.add(stream.id)
                trace = None if isinstance(error, Refusal) else error
                log.error("retention of stream %r failed: %s", stream.name, error, exc_info=trace)

    def _advance(self, stream: LiveStream) -> None:
        now_ms = self._clock.now_ms()
        rule = self.rule.of(stream.retention)
        due = self._due(stream, rule, now_ms)
        starts_tracking = bool(rule.max_age_ms) and stream.ages is None
        if due is not None and due.message_index > stream.retained_index:
            self._retain(stream, Retain(stream.id, now_ms, due.message_index, due.byte_position, None, starts_tracking))
        elif starts_tracking:
            retained = stream.retained
            self._retain(stream, Retain(stream.id, now_ms, retained.message_index, retained.byte_position, None, True))

    def _due(self, stream: LiveStream, rule: RetentionRule, now_ms: int) -> Offset | None:
        """The offset that retention may move to. Messages after a snapshot stay until the next one covers them:
        without them `/bootstrap` would be incomplete (extensions §3.4)."""
        if stream.snapshot is not None:
            return None
        too_much = self._too_much(stream, rule.max_bytes) if rule.max_bytes else None
        checks_age = rule.max_age_ms and self._trusts_clock()
        too_old = self._too_old(stream, now_ms - rule.max_age_ms) if checks_age else None
        return max((offset for offset in (too_much, too_old) if offset is not None), default=None)

    def _too_old(self, stream: LiveStream, until_ms: int) -> Offset | None:
        """The last offset before which everything was appended at `until_ms` or earlier."""
        if stream.written_ms <= until_ms:
            return Offset(stream.durable_index, stream.durable_position)
        mark = stream.ages.last_until(until_ms) if stream.ages is not None else None
        if mark is None or mark[0] > stream.durable_index:
            return None
        return Offset(*mark)

    def _too_much(self, stream: LiveStream, max_bytes: int) -> Offset | None:
        """The last offset after which at least `max_bytes` remain; None unless the stream is well beyond that size."""
        start = stream.retained
        excess = stream.durable_position - start.byte_position - max_bytes
        if excess <= max_bytes // SLACK_SHARE:
            return None
        end = self._reader.chunk(stream, start, excess).end
        return end if end.byte_position - start.byte_position <= excess else None
