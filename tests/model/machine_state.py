"""The state of the model test: the engine, the model, pending requests, and comparisons of the two."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from typing import Any, ClassVar
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.records import Append, Create, Delete, Record, Touch
from headwater.engine.commit_placement import CommitMode
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.stream import LiveStream
from headwater.storage.interface import Committed
from tests.engine.seams import Backing, ManualClock, ManualScheduler, WatchedStorage
from tests.model.clients import ENDED, Request, Tailer
from tests.model.durable import DurableReference, stored
from tests.model.reference import Answer, Incarnation

NAMES = ("a", "b", "c", "d")


class MachineState(RuleBasedStateMachine):
    """The engine and the model side by side: what was requested, what is durable, and how they are compared."""

    make_backing: ClassVar[Callable[[], Backing]]
    commit: ClassVar[CommitMode] = "inline"
    make_engine: ClassVar[Callable[..., Engine]] = Engine

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = DurableReference(self.clock.at_ms)
        self.backing = type(self).make_backing()
        self.requests: list[Request] = []
        self.uncreated: dict[str, deque[Incarnation]] = {}
        self.incarnations: dict[int, Incarnation] = {}
        self.ids: dict[Incarnation, int] = {}
        self.saved_ms: dict[Incarnation, int] = {}
        self.durable_model = deepcopy(self.model)
        self.queued_models: deque[DurableReference] = deque()
        self.tailers: list[Tailer] = []
        ids = itertools.count(1)
        # Predictable ids make runs repeatable.
        self.fixed_ids = patch.object(secrets, "randbits", lambda _: next(ids))
        self.fixed_ids.start()
        self.open()
        self.storage.on_publish = self.published

    def open(self) -> None:
        self.scheduler = ManualScheduler(self.clock)
        self.storage = WatchedStorage(self.backing.open())
        self.engine = type(self).make_engine(
            self.storage, self.clock, self.scheduler, EngineLimits(), commit=type(self).commit
        )
        self.engine.start()

    def teardown(self) -> None:
        self.fixed_ids.stop()
        self.engine.stop()
        self.backing.discard()

    # -- bookkeeping

    def published(self, committed: Committed) -> None:
        """Record that readers can see a record from now on."""
        record, removed = committed
        if type(record) is Create:
            assert self.uncreated.get(record.name), f"{record.name} was created, though the model refuses it"
            incarnation = self.uncreated[record.name].popleft()
            self.incarnations[record.id], self.ids[incarnation] = incarnation, record.id
            self.model.reached[incarnation] = (
                (record.fork.message_index if record.fork is not None else 0) + len(record.lengths),
                record.closed,
            )
            self.model.by_name[record.name] = incarnation
        elif type(record) is Append:
            incarnation = self.incarnations[record.id]
            assert str(Offset(record.message_index, record.byte_position)) == incarnation.token(record.message_index)
            reached = self.model.reached[incarnation]
            self.model.reached[incarnation] = (record.message_index + len(record.lengths), reached[1] or record.close)
        elif type(record) is Delete:
            for stream_id in removed:
                gone = self.incarnations[stream_id]
                if self.model.by_name.get(gone.name) is gone:
                    del self.model.by_name[gone.name]
            if record.id not in removed:
                self.model.soft_deleted.add(self.incarnations[record.id])
        if type(record) in (Create, Append, Touch):
            self.saved_ms[self.incarnations[record.id]] = record.at_ms  # type: ignore[union-attr]
        if changes_by_request(record) and self.backing.survives:
            self.durable_model = self.queued_models.popleft()

    def check_durable(
        self, what: str, incarnation: Incarnation | None, depends_on: tuple[int, bool] | None, *, deleted: bool
    ) -> None:
        if incarnation is None or depends_on is None:
            return
        assert incarnation in self.ids, f"{what} was answered before its stream was durable"
        durable = self.storage.durable[self.ids[incarnation]]
        assert durable.message_index >= depends_on[0], f"{what} was answered before its data was durable"
        assert durable.closed or not depends_on[1], f"{what} was answered before the closure was durable"
        assert durable.deleted or not deleted, f"{what} was answered before the deletion was durable"

    def submit(
        self, what: str, name: str, expected: Answer, body: bytes, call: Callable[[Callable[[Any], None]], None]
    ) -> None:
        """Send a request to the engine, and apply its expected effect to the model's pending state at once."""
        incarnation = self.model.names.get(name)
        if expected.change is not None and self.engine.failure is None:
            expected.change()
            if what == "put":
                incarnation = self.model.names[name]
                self.uncreated.setdefault(name, deque()).append(incarnation)
            if self.backing.survives:
                self.queued_models.append(deepcopy(self.model))
        request = Request(self, what, expected, incarnation, body)
        self.requests.append(request)
        try:
            call(request.done)
        except Refusal as refusal:
            request.refused(refusal)

    def some(self, pick: int) -> str:
        """Return a name that is in use, or sometimes any name."""
        used = sorted(self.model.names)
        return used[pick % len(used)] if used and pick < 9 else NAMES[pick % len(NAMES)]

    def free(self, pick: int) -> str:
        """Return a name that is not in use, or sometimes any name."""
        unused = [name for name in NAMES if name not in self.model.names]
        return unused[pick % len(unused)] if unused and pick < 8 else NAMES[pick % len(NAMES)]

    # -- reads

    def _look_up(self, name: str, expected: Answer, *, touch: bool) -> LiveStream | None:
        try:
            return self.engine.look_up(name, touch=touch)
        except Refusal as refusal:
            status = refusal.status
        assert status in self._statuses(name, expected), f"{name} is {status} to readers, not {expected}"
        return None

    def _read(self, name: str, offset: str | None, limit: int) -> Answer:
        reader = self.engine.reader
        try:
            stream = self.engine.look_up(name, touch=True)
            start = reader.resolve(stream, offset)
        except Refusal as refusal:
            return Answer(refusal.status)
        chunk = reader.chunk(stream, start, limit)
        data = b"".join(reader.buffers(chunk))
        lengths = reader.lengths(chunk)
        assert chunk.length == len(data) == sum(lengths)
        assert len(lengths) == chunk.end.message_index - chunk.start.message_index
        assert b"".join(reader.slices(chunk)) == data
        body = b"[" + data[:-1] + b"]" if stream.type.json else data
        facts = {"next": str(chunk.end), "up_to_date": chunk.up_to_date, "closed": chunk.closed, "body": body}
        return Answer(200, facts)

    def _statuses(self, name: str, expected: Answer) -> set[int]:
        """Return the statuses with which an ended stream may be refused.

        An expired stream is 404 at once, and 410 for a stream kept by forks only when that is durable. It changes back
        to 404 when the last fork ends, whether or not that is durable yet.
        """
        if expected.status == 410 and self.model.names.get(name) is None:
            return ENDED
        incarnation = self.model.by_name.get(name)
        if expected.status == 410 and incarnation is not None and incarnation not in self.model.soft_deleted:
            return ENDED
        return {expected.status}

    def _offsets(self, incarnation: Incarnation | None) -> st.SearchStrategy[str | None]:
        """Offsets of a stream: valid ones, some not yet readable, and some invalid."""
        some: list[str | None] = [None, "-1", "now", str(Offset(0, 0))]
        if incarnation is not None:
            some += [incarnation.token(count) for count in range(len(incarnation.log) + 1)] * 2
            message_index, byte_position = len(incarnation.log), incarnation.size(len(incarnation.log))
            some += [
                str(Offset(message_index, byte_position + 1)),
                str(Offset(message_index + 1, byte_position + 1)),
                str(Offset(1, 1)),
                "nonsense",
            ]
        return st.sampled_from(some)

    # -- restarts and comparison

    def fits(
        self,
        candidate: DurableReference,
        alive: set[str],
        back_ms: int,
        used_ms: dict[int, int],
        saved_ms: dict[int, int],
    ) -> bool:
        """Whether the engine's state is this candidate. Reads that were not saved may shorten a window by a share."""
        for incarnation in candidate.names.values():
            incarnation.readers = 0
        for incarnation in [
            incarnation
            for incarnation in candidate.names.values()
            if incarnation.ttl_secs is not None and not incarnation.deleted
        ]:
            window_ms = incarnation.ttl_secs * 1000 if incarnation.ttl_secs is not None else 0
            latest_ms = used_ms.get(incarnation.number, incarnation.used_ms)
            if incarnation.name in alive:
                if back_ms >= latest_ms + window_ms + window_ms // 16:
                    return False
                incarnation.used_ms = back_ms
            else:
                if back_ms < saved_ms.get(incarnation.number, incarnation.used_ms) + window_ms:
                    return False
                candidate.remove(incarnation)
        candidate.now_ms = back_ms
        candidate.expire()
        candidate.make_durable()
        try:
            self.compare(candidate)
        except AssertionError:
            return False
        return True

    def forget(self) -> None:
        """Drop the state that a restart loses."""
        self.tailers.clear()
        self.requests.clear()
        self.uncreated.clear()
        self.incarnations.clear()
        self.ids.clear()
        self.saved_ms.clear()

    def adopt(self, candidate: DurableReference) -> None:
        self.model = candidate
        for name, incarnation in candidate.names.items():
            stream_id = self.engine.catalog.by_name[name].id
            self.incarnations[stream_id], self.ids[incarnation] = incarnation, stream_id
            self.saved_ms[incarnation] = incarnation.used_ms
        self.durable_model = deepcopy(candidate)
        self.queued_models.clear()
        self.storage.on_publish = self.published

    def compare(self, model: DurableReference) -> None:
        """Compare every stream, byte and counter with the model."""
        catalog = self.engine.catalog
        assert set(catalog.by_name) == set(model.names)
        own_bytes = 0
        for name, incarnation in model.names.items():
            stream = catalog.by_name[name]
            assert stream.deleted == incarnation.deleted
            assert stream.children == incarnation.forks
            known = {name: (state.epoch, state.seq) for name, state in (stream.producers or {}).items()}
            assert known == incarnation.producers
            assert (stream.stream_seq, stream.closed_by) == (incarnation.stream_seq, incarnation.closer)
            assert (str(stream.tail), stream.closed) == (incarnation.token(len(incarnation.log)), incarnation.closed)
            assert (stream.durable_index, stream.durable_closed) == (len(incarnation.log), incarnation.closed)
            assert stream.in_flight == 0
            if not incarnation.deleted:
                whole = self.engine.reader.chunk(stream, Offset(0, 0), 10**9)
                data = b"".join(self.engine.reader.buffers(whole))
                assert data == b"".join(stored(incarnation, at) for at in range(len(incarnation.log)))
            if not incarnation.deleted or model.needed(incarnation):
                own_bytes += incarnation.size(len(incarnation.log)) - incarnation.inherited
        assert len(catalog) == len(model.names)
        assert self.engine.total_bytes == own_bytes
        assert self.engine.storage_usage().payload_bytes == own_bytes


def changes_by_request(record: Record) -> bool:
    return type(record) in (Create, Append) or (type(record) is Delete and not record.expired)
