"""The carrier: a thread that takes what the journal has committed into the shards, some batches at a time.

It waits until enough has gathered or the oldest has waited long enough, so that a shard commits every few seconds
instead of with every batch, and a stream's small appends become few, larger pieces. In its spare time it takes away
what removed streams have left, and what was trimmed. If it cannot write, the store fails: what it holds is safe in the
journal and stays readable from the hot tails, but nothing more may be accepted that could not be carried on.

Invariant: `mark` never names an entry that a shard does not have durably.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from headwater.storage.acid.journal import Mark, Routed
from headwater.storage.acid.shard import Change, Shard
from headwater.storage.interface import WriteFailedError

log = logging.getLogger("headwater.storage")

CARRY_BYTES: Final = 16 * 2**20
"""Carry as soon as this much waits."""
CARRY_AFTER_S: Final = 5.0
"""Carry when something has waited this long. A round costs two flushes of the disk in every shard that it touches;
came it more often, batches that are committed meanwhile would feel it."""
WAITING_BYTES_MAX: Final = 64 * 2**20
"""New writes are refused while more than this waits: it bounds memory, the journal, and the time that a boot takes."""


class Load(NamedTuple):
    """A batch that is durable in the journal, up to entry `seq`."""

    seq: int
    batch: Sequence[Routed]
    size: int


class Trim(NamedTuple):
    """What a stream has before `position` is not asked for any more."""

    shard: int
    stream_id: int
    position: int


class Carrier:
    def __init__(self, shards: Sequence[Shard], carry_bytes: int, carry_after_s: float) -> None:
        self._shards = shards
        self._carry_bytes = carry_bytes
        self._carry_after_s = carry_after_s
        self._changed = threading.Condition()
        self._waiting: list[Load] = []
        self._waiting_since_s = 0.0
        self._asked_trims: dict[int, Trim] = {}
        self._due_trims: dict[int, Trim] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.waiting_bytes = 0
        self.failure: str | None = None
        self.mark = Mark(0, ())
        self.reached: Final[deque[list[tuple[int, int]]]] = deque()
        """What each round has brought into the shards, for the event loop to take note of."""

    def start(self, seq: int) -> None:
        """Begin, with all shards known to be at `seq`."""
        self.mark = Mark(seq, tuple(shard.ledger.seq for shard in self._shards))
        self._thread = threading.Thread(target=self._run, name="headwater-acid-carrier", daemon=True)
        self._thread.start()

    def submit(self, load: Load) -> None:
        with self._changed:
            if not self._waiting:
                self._waiting_since_s = time.monotonic()
                self._changed.notify_all()
            self._waiting.append(load)
            self.waiting_bytes += load.size
            if self.waiting_bytes >= self._carry_bytes:
                self._changed.notify_all()

    def trim(self, trim: Trim) -> None:
        """Trim a stream some time after all that was submitted up to now has been carried."""
        with self._changed:
            self._asked_trims[trim.stream_id] = trim
            if not self._waiting:
                self._changed.notify_all()

    def check(self) -> None:
        """Raise `WriteFailedError` when nothing more can be carried."""
        if self.failure is not None:
            raise WriteFailedError(self.failure)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no new data should be accepted."""
        return self.waiting_bytes >= WAITING_BYTES_MAX and self.failure is None

    def stop(self) -> None:
        """Carry what waits, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # -- on the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                loads = self._take()
                if loads:
                    self.carry(loads)
                    self._give_room(loads)
                else:
                    self._tidy()
        except Exception as error:
            log.critical("storage failed, no more writes are taken: %s", error, exc_info=error)
            with self._changed:
                self.failure = str(error) or type(error).__name__
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Until there is something to do; False when there is nothing left and the store closes."""
        with self._changed:
            while True:
                left_s = self._left_s()
                if left_s is not None and left_s <= 0:
                    return True
                if self._stopping:
                    return False
                if not self._waiting:
                    self._due_trims |= self._asked_trims
                    self._asked_trims.clear()
                if self._due_trims or any(shard.has_graves for shard in self._shards):
                    return True
                self._changed.wait(left_s)

    def _left_s(self) -> float | None:
        """How long until what waits is carried; None while nothing waits."""
        if not self._waiting:
            return None
        if self._stopping or self.waiting_bytes >= self._carry_bytes:
            return 0.0
        return self._waiting_since_s + self._carry_after_s - time.monotonic()

    def _take(self) -> list[Load]:
        """What is due; nothing when it is only time to tidy up."""
        with self._changed:
            left_s = self._left_s()
            if left_s is None or left_s > 0:
                return []
            loads, self._waiting = self._waiting, []
            self._due_trims |= self._asked_trims
            self._asked_trims.clear()
            return loads

    def _give_room(self, loads: Sequence[Load]) -> None:
        with self._changed:
            self.waiting_bytes -= sum(load.size for load in loads)
            self._changed.notify_all()

    def carry(self, loads: Iterable[Load]) -> None:
        """Bring batches into the shards, passing over what a shard has already."""
        by_shard: dict[int, list[Change]] = {}
        seq = self.mark.seq
        for load in loads:
            seq = load.seq
            # Where nothing else does, let go of the interpreter lock: the event loop would wait for it.
            time.sleep(0)
            for routed in load.batch:
                self._route(by_shard, load.seq, routed)
        reached: list[tuple[int, int]] = []
        for number, changes in sorted(by_shard.items()):
            reached += self._shards[number].apply(seq, changes)
        self.mark = Mark(seq, tuple(shard.ledger.seq for shard in self._shards))
        self.reached.append(reached)

    def _route(self, by_shard: dict[int, list[Change]], seq: int, routed: Routed) -> None:
        shard, record, removed = routed.shard, routed.record, routed.removed
        if self._shards[shard].ledger.seq < seq:
            here = tuple(stream_id for stream_id, owner in removed if owner == shard)
            by_shard.setdefault(shard, []).append(Change(record, here))
        for stream_id, owner in removed:
            if owner != shard and self._shards[owner].ledger.seq < seq:
                by_shard.setdefault(owner, []).append(Change(None, (stream_id,)))

    def _tidy(self) -> None:
        """One small transaction towards a shard without leftovers."""
        for trim in self._due_trims.values():
            if self._shards[trim.shard].trim(trim.stream_id, trim.position):
                del self._due_trims[trim.stream_id]
            return
        for shard in self._shards:
            if shard.has_graves:
                shard.reap()
                return
