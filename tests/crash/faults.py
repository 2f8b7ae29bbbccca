"""Faults that the crash tests must detect, each a patch of the real code.

A server with a fault behaves correctly until it is killed; only its state after SIGKILL is wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headwater.core.records import Append, Delete
from headwater.engine import committer
from headwater.engine.committer import Committer
from headwater.engine.engine import Engine
from headwater.engine.wakes import Wakes
from headwater.storage.acid.shard_store import PendingRecord, ShardStore
from headwater.storage.interface import Committed
from headwater.storage.journal.segments import FileJournal


def acknowledges_before_it_writes() -> None:
    """Acknowledge batches at once and write them a little later."""
    write = FileJournal.append
    waiting: list[list[Committed]] = []
    lock = threading.Lock()

    def flush(writer: FileJournal) -> None:
        while True:
            time.sleep(0.02)
            with lock:
                while waiting:
                    write(writer, waiting.pop(0))

    def later(self: FileJournal, batch: Sequence[Committed]) -> None:
        with lock:
            if not waiting and not hasattr(later, "started"):
                later.started = True  # type: ignore[attr-defined]
                threading.Thread(target=flush, args=(self,), daemon=True).start()
            waiting.append(list(batch))

    FileJournal.append = later  # type: ignore[method-assign]


def shows_what_is_not_durable() -> None:
    """Show a batch to readers before it is written; its writer is answered after the write."""

    def write_inline(self: Committer, batch: list[Any], committed: list[Committed], size_bytes: int) -> None:
        self._storage.publish(committed)
        for entry in batch:
            if entry.record is not None:
                committer._advance(entry.stream, entry.record)
                if type(entry.record) is not Append:
                    self._on_applied(entry, entry.record)
        self._publish(batch)
        # The event loop runs before the write, so readers receive the batch first.
        self._scheduler.later(0.005, lambda: write_later(self, batch, committed))

    def write_later(self: Committer, batch: list[Any], committed: list[Committed]) -> None:
        self._storage.write(committed)
        for entry in batch:
            if entry.done is not None:
                entry.done(entry.result)

    Committer._write_inline = write_inline  # type: ignore[method-assign]
    Committer._write_on_thread = write_inline  # type: ignore[method-assign]


def forgets_producers() -> None:
    """Do not recover producer state."""
    start = Engine.start

    def forgetful(self: Engine) -> None:
        start(self)
        for stream in self.catalog:
            stream.producers = None

    Engine.start = forgetful  # type: ignore[method-assign]


def _rewriting(change: Callable[[Committed], Committed | None]) -> None:
    write = FileJournal.append

    def changed(self: FileJournal, batch: Sequence[Committed]) -> None:
        rewritten = [found for found in map(change, batch) if found is not None]
        if rewritten:
            write(self, rewritten)

    FileJournal.append = changed  # type: ignore[method-assign]


def forgets_deletions() -> None:
    """Do not write deletions to the journal."""
    _rewriting(lambda each: None if isinstance(each.record, Delete) else each)


def forgets_closure() -> None:
    """Do not write the close flag of an append."""

    def opened(each: Committed) -> Committed:
        record = each.record
        if isinstance(record, Append) and record.close:
            return Committed(msgspec.structs.replace(record, close=False), each.removed)
        return each

    _rewriting(opened)


def forgets_sources() -> None:
    """Do not keep a deleted stream for the forks that read from it."""
    start = Engine.start

    def forgetful(self: Engine) -> None:
        start(self)
        for stream in tuple(self.catalog):
            if stream.deleted:
                del self.catalog.by_id[stream.id], self.catalog.by_name[stream.name]

    Engine.start = forgetful  # type: ignore[method-assign]


def forgets_wakes() -> None:
    """Do not announce wakes again after a crash, neither open nor due ones."""

    def idle(self: Wakes, subscriptions: object) -> None:
        self._is_running = True

    Wakes.start = idle  # type: ignore[method-assign]


def applies_only_some() -> None:
    """Leave the last record of a larger batch out of the `acid` shards, though the checkpoint claims it is there."""
    apply = ShardStore._apply

    def lazy(self: ShardStore, pending: list[PendingRecord]) -> None:
        apply(self, pending if len(pending) < 5 else pending[:-1])

    ShardStore._apply = lazy  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        acknowledges_before_it_writes,
        shows_what_is_not_durable,
        forgets_producers,
        forgets_deletions,
        forgets_closure,
        forgets_sources,
        forgets_wakes,
        applies_only_some,
    )
}
