"""Engines with one deliberate fault each, which the model test must detect.

A checker that has never failed proves nothing. Each of these is the real engine with one rule broken; together they
show which rules the model checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec

from headwater.core import rules
from headwater.core.catalog import Catalog, StreamState
from headwater.core.errors import Refusal
from headwater.core.producers import ProducerHeaders, ProducerState, Verdict, judge
from headwater.core.records import Append, Create, Delete, Record
from headwater.engine import engine as engine_module
from headwater.engine.commit_placement import CommitMode
from headwater.engine.committer import CommitEntry
from headwater.engine.engine import Engine
from headwater.engine.reading import ReadChunk, StreamReader
from headwater.engine.stream import LiveStream
from headwater.storage.interface import Committed, Storage
from tests.engine.seams import Backing, JournalBacking, JournalStorage, MemoryBacking


@dataclass(frozen=True)
class Broken:
    """A fault: the storage and commit mode it is run with, and the engine class or patch that contains it."""

    backing: Callable[[], Backing] = MemoryBacking
    commit: CommitMode = "inline"
    engine: Callable[..., Engine] = Engine
    patch: Callable[[], Any] | None = None
    may_crash: bool = False
    """Whether the engine or the store may fail with an error before the checker finds the fault."""

    @contextmanager
    def patched(self) -> Iterator[None]:
        if self.patch is None:
            yield
            return
        with self.patch():
            yield


# -- durability


class AnswersBeforeDurable(Engine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        submit = self._committer.submit

        def hasty(entry: CommitEntry, size_bytes: int) -> None:
            submit(msgspec.structs.replace(entry, done=None), size_bytes)
            if entry.done is not None:
                entry.done(entry.result)

        self._committer.submit = hasty


class AnswersRepeatsAtOnce(Engine):
    def _after_pending(self, stream: LiveStream, done: Callable[..., None], result: object) -> None:
        done(result)


class ShowsPending(Engine):
    def append(self, name: str, *args: Any, **more: Any) -> None:
        super().append(name, *args, **more)
        stream = self.catalog.by_name[name]
        stream.durable_closed = stream.closed


class ForgetsFailures(Engine):
    """Continues after a failed write as if nothing had happened."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        fail = self._committer._fail

        def forget(error: BaseException, batch: list[CommitEntry]) -> None:
            fail(error, batch)
            self._committer.failure = None

        self._committer._fail = forget  # type: ignore[method-assign]


class KeepsFailedQueue(Engine):
    """Refuses the failed batch, and leaves the batches queued after it without an answer."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._committer._refuse = lambda _: None  # type: ignore[method-assign, assignment]


# -- rules


def judge_without_gaps(state: ProducerState | None, producer: ProducerHeaders) -> Verdict:
    if state is not None and producer.epoch == state.epoch and producer.seq > state.seq:
        return Verdict.NEW
    return JUDGE(state, producer)


def judge_without_repeats(state: ProducerState | None, producer: ProducerHeaders) -> Verdict:
    JUDGE(state, producer)
    return Verdict.NEW


def judge_without_epochs(state: ProducerState | None, producer: ProducerHeaders) -> Verdict:
    return JUDGE(state._replace(epoch=producer.epoch) if state is not None else None, producer)


JUDGE = judge
DECIDE = rules.decide_append


def decide_without_stream_seq(stream: StreamState, *args: Any) -> Any:
    content_type, body, producer, _, *rest = args
    return DECIDE(stream, content_type, body, producer, None, *rest)


def decide_without_closer(stream: StreamState, *args: Any) -> Any:
    closed_by, stream.closed_by = stream.closed_by, None
    try:
        return DECIDE(stream, *args)
    finally:
        stream.closed_by = closed_by


def decide_without_closure(stream: StreamState, *args: Any) -> Any:
    closed, stream.closed = stream.closed, False
    decision = DECIDE(stream, *args)
    stream.closed = closed
    return decision


def check_nothing(stream: StreamState, request: Any) -> None:
    """Accept any PUT on an existing stream."""


# -- time


class NeverSlides(Engine):
    def touch(self, stream: LiveStream) -> None: ...


class SlidesOnHead(Engine):
    def look_up(self, name: str, *, touch: bool = False) -> LiveStream:
        return super().look_up(name, touch=True)


class NeverExpires(Engine):
    def _expire(self, stream: LiveStream) -> bool:
        return True


# -- forks and removal


class LeakyReader(StreamReader):
    """Reads a fork from its source beyond the offset of the fork."""

    def chunk(self, stream: LiveStream, start: Any, max_bytes: int) -> ReadChunk:
        if stream.fork is not None and not stream.durable_closed:
            source = self._by_id.get(stream.fork.source_id)
            if source is not None and source.durable_index > stream.durable_index:
                return msgspec.structs.replace(super().chunk(source, start, max_bytes), stream=stream)
        return super().chunk(stream, start, max_bytes)


class LeaksSourceAppends(Engine):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.reader.__class__ = LeakyReader


def delete_without_cascade(self: Catalog[Any], stream: Any) -> tuple[int, ...]:
    if stream.children:
        stream.deleted = True
        return ()
    del self.by_id[stream.id]
    del self.by_name[stream.name]
    if stream.fork is not None and stream.fork.source_id in self.by_id:
        self.by_id[stream.fork.source_id].children -= 1
    return (stream.id,)


class KeepsBytesCounted(Engine):
    def _expire(self, stream: LiveStream) -> bool:
        before = self.quota.content_bytes
        expired = super()._expire(stream)
        self.quota.content_bytes = before
        return expired


class TakesReferenceTooEarly(Engine):
    """Counts a fork on its source before the fork is accepted."""

    def _decide_create(self, request: Any, now_ms: int) -> Create:
        try:
            return super()._decide_create(request, now_ms)
        except Refusal:
            source = self.catalog.by_name.get(request.fork.source_name) if request.fork is not None else None
            if source is not None:
                source.children += 1
            raise


# -- live readers


class WakesNobodyOnClose(Engine):
    def _publish(self, batch: Sequence[CommitEntry]) -> None:
        super()._publish([entry for entry in batch if not (type(entry.record) is Append and entry.record.close)])


class WakesOncePerBatch(Engine):
    """Wakes only the readers of the first stream in a batch."""

    def _publish(self, batch: Sequence[CommitEntry]) -> None:
        super()._publish(batch[:1])


class LeavesReadersOfTheDeleted(Engine):
    def start(self) -> None:
        self.publisher.end_followers = _leave_waiting  # type: ignore[method-assign]
        super().start()


def _leave_waiting(stream: LiveStream) -> None:
    """Do not notify the readers of a deleted stream."""


# -- recovery


class Tampered(JournalStorage):
    """A journal that has lost some records after a restart."""

    def __init__(self, journal: list[tuple[bytes, tuple[int, ...]]], keep: Callable[[Record], Record | None]) -> None:
        super().__init__(journal)
        self._keep = keep

    def kept(self) -> Iterable[Committed]:
        for record, removed in super().kept():
            kept = self._keep(record)
            if kept is not None:
                yield Committed(kept, removed)


class TamperedBacking(JournalBacking):
    def __init__(self, keep: Callable[[Record], Record | None]) -> None:
        super().__init__()
        self._keep = keep

    def open(self) -> Storage:
        return Tampered(self.journal, self._keep)


def without_producers(record: Record) -> Record | None:
    return msgspec.structs.replace(record, producer_id=None) if type(record) is Append else record


def without_deletes(record: Record) -> Record | None:
    return None if type(record) is Delete else record


def without_closure(record: Record) -> Record | None:
    return msgspec.structs.replace(record, close=False) if type(record) is Append else record


class ForgetfulBacking(JournalBacking):
    """Loses the last record whenever it is opened."""

    def open(self) -> Storage:
        del self.journal[-1:]
        return super().open()


class HalfBatchStorage(JournalStorage):
    def write(self, batch: Sequence[Committed]) -> None:
        super().write(batch[:1])


class HalfBatchBacking(JournalBacking):
    def open(self) -> Storage:
        return HalfBatchStorage(self.journal)


def patching(target: object, name: str, replacement: object) -> Callable[[], Any]:
    return lambda: patch.object(target, name, replacement)


BROKEN: dict[str, Broken] = {
    "answers before durable": Broken(JournalBacking, engine=AnswersBeforeDurable),
    "answers before durable, on a thread": Broken(JournalBacking, "thread", AnswersBeforeDurable),
    "answers repeats of pending appends at once": Broken(JournalBacking, engine=AnswersRepeatsAtOnce),
    "shows what is not durable": Broken(JournalBacking, engine=ShowsPending),
    "continues after a failed write": Broken(JournalBacking, engine=ForgetsFailures),
    "leaves batches queued after a failed write unanswered": Broken(JournalBacking, "thread", KeepsFailedQueue),
    "accepts producer gaps": Broken(patch=patching(rules, "judge", judge_without_gaps)),
    "appends repeats again": Broken(patch=patching(rules, "judge", judge_without_repeats)),
    "lets zombies write": Broken(patch=patching(rules, "judge", judge_without_epochs)),
    "ignores Stream-Seq": Broken(patch=patching(engine_module, "decide_append", decide_without_stream_seq)),
    "forgets who closed": Broken(patch=patching(engine_module, "decide_append", decide_without_closer)),
    "appends to closed streams": Broken(patch=patching(engine_module, "decide_append", decide_without_closure)),
    "does not compare configurations": Broken(patch=patching(engine_module, "check_same_config", check_nothing)),
    "does not extend the TTL on reads": Broken(engine=NeverSlides),
    "extends the TTL on HEAD": Broken(engine=SlidesOnHead),
    "never expires": Broken(engine=NeverExpires),
    "leaks source appends into forks": Broken(engine=LeaksSourceAppends),
    "does not cascade": Broken(patch=patching(Catalog, "_delete", delete_without_cascade)),
    "never stops counting expired bytes": Broken(engine=KeepsBytesCounted),
    "leaks a reference of a refused fork": Broken(engine=TakesReferenceTooEarly),
    "does not wake readers on close": Broken(engine=WakesNobodyOnClose),
    "wakes the readers of one stream per batch": Broken(JournalBacking, engine=WakesOncePerBatch),
    "leaves readers of deleted streams waiting": Broken(engine=LeavesReadersOfTheDeleted),
    "loses producers after a restart": Broken(lambda: TamperedBacking(without_producers)),
    "restores deleted streams after a restart": Broken(lambda: TamperedBacking(without_deletes)),
    "reopens closed streams after a restart": Broken(lambda: TamperedBacking(without_closure)),
    "loses the last record after a restart": Broken(ForgetfulBacking, may_crash=True),
    "writes half of each batch": Broken(HalfBatchBacking, may_crash=True),
}
