"""The engine against the model: a state machine that does anything a client, a disk or time can do, in any order.

`machine(ground)` makes one for any storage mode: `ground` says where a store lives and how it comes back after a
crash. Writers are judged by the pending state, so an answer is worked out when a request is made; it may be given
only when all that it rests on is durable, and readers see nothing beyond what is.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any, ClassVar
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders
from headwater.core.records import Append, Create, Delete, Record, Touch
from headwater.core.rules import CreateRequest, ForkRequest
from headwater.engine.committer import CommitMode
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.stream import LiveStream
from headwater.storage.interface import Committed
from tests.engine.seams import Ground, ManualClock, ManualScheduler, WatchedStorage
from tests.model.clients import ENDED, Request, Tailer
from tests.model.durable import DurableReference, stored
from tests.model.reference import Answer, Fork, Life

NAMES = ("a", "b", "c", "d")
TEXT, JSON, BYTES = "text/plain", "application/json", "application/octet-stream"

picks = st.integers(0, 9)
"""Which stream a step is about: mostly one that is there."""
types = st.sampled_from([TEXT, TEXT, JSON, JSON, "Text/Plain; charset=utf-8", None])
expiries = st.sampled_from(
    [(None, None)] * 5 + [(1, None), (2, None), (30, None), (0, None), (None, 900), (None, 5000)]
)
texts = st.sampled_from([b"", b"x", b"hello", b"\xe2\x82", b"\xac", b"line\nline", b"y" * 40]) | st.binary(max_size=6)
documents = st.sampled_from(
    [b"", b"[]", b"[ ]", b"1", b"[1,22,333]", b'{"a":1,"a":1.0}', b' [ "x" , 9007199254740993 ] ', b"[[],{}]"]
) | st.sampled_from([b'"\\u00e9"', b'["' + b"z" * 30 + b'",2]', b"[1,", b"\xff", b"NaN", b'["\\ud800"]'])
producers = st.none() | st.tuples(st.sampled_from(["p", "q"]), st.integers(0, 2), st.integers(0, 4))
sequences = st.none() | st.sampled_from(["1", "2", "3", "10", "", "\xe9"])
limits = st.sampled_from([1, 2, 3, 5, 8, 40, 10_000])
rarely = st.integers(0, 4).map(lambda number: number == 0)


class ProtocolMachine(RuleBasedStateMachine):
    """What may happen, as rules; what must hold, in the rules and as invariants."""

    make_ground: ClassVar[Callable[[], Ground]]
    commit: ClassVar[CommitMode] = "inline"
    make_engine: ClassVar[Callable[..., Engine]] = Engine

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.model = DurableReference(self.clock.at_ms)
        self.ground = type(self).make_ground()
        self.requests: list[Request] = []
        self.unborn: dict[str, deque[Life]] = {}
        self.lives: dict[int, Life] = {}
        self.ids: dict[Life, int] = {}
        self.saved_ms: dict[Life, int] = {}
        self.settled = deepcopy(self.model)
        self.unsettled: deque[DurableReference] = deque()
        self.tailers: list[Tailer] = []
        ids = itertools.count(1)
        # Ids that are not random, so that the same steps do the same.
        self.chance = patch.object(secrets, "randbits", lambda _: next(ids))
        self.chance.start()
        self.open()
        self.storage.on_publish = self.published

    def open(self) -> None:
        self.scheduler = ManualScheduler(self.clock)
        self.storage = WatchedStorage(self.ground.open())
        self.engine = type(self).make_engine(
            self.storage, self.clock, self.scheduler, EngineLimits(), commit=type(self).commit
        )
        self.engine.start()

    def teardown(self) -> None:
        self.chance.stop()
        self.engine.stop()
        self.ground.discard()

    # -- bookkeeping

    def published(self, committed: Committed) -> None:
        """Readers have a record from now on."""
        record, removed = committed
        if type(record) is Create:
            assert self.unborn.get(record.name), f"{record.name} was created, and the model says that it may not be"
            life = self.unborn[record.name].popleft()
            self.lives[record.id], self.ids[life] = life, record.id
            self.model.reached[life] = (
                (record.fork.message_index if record.fork is not None else 0) + len(record.lengths),
                record.closed,
            )
            self.model.by_name[record.name] = life
        elif type(record) is Append:
            life = self.lives[record.id]
            assert str(Offset(record.message_index, record.byte_position)) == life.token(record.message_index)
            reached = self.model.reached[life]
            self.model.reached[life] = (record.message_index + len(record.lengths), reached[1] or record.close)
        elif type(record) is Delete:
            for stream_id in removed:
                gone = self.lives[stream_id]
                if self.model.by_name.get(gone.name) is gone:
                    del self.model.by_name[gone.name]
            if record.id not in removed:
                self.model.buried.add(self.lives[record.id])
        if type(record) in (Create, Append, Touch):
            self.saved_ms[self.lives[record.id]] = record.at_ms  # type: ignore[union-attr]
        if changes_by_request(record) and self.ground.survives:
            self.settled = self.unsettled.popleft()

    def check_durable(self, what: str, life: Life | None, rests_on: tuple[int, bool] | None, *, deleted: bool) -> None:
        if life is None or rests_on is None:
            return
        assert life in self.ids, f"{what} was answered before its stream was durable"
        durable = self.storage.durable[self.ids[life]]
        assert durable.index >= rests_on[0], f"{what} was answered before its data was durable"
        assert durable.closed or not rests_on[1], f"{what} was answered before the closure was durable"
        assert durable.deleted or not deleted, f"{what} was answered before the end was durable"

    def submit(
        self, what: str, name: str, expected: Answer, body: bytes, call: Callable[[Callable[[Any], None]], None]
    ) -> None:
        """Make a request. What the model says is done at once to its pending state."""
        life = self.model.names.get(name)
        if expected.change is not None and self.engine.failure is None:
            expected.change()
            if what == "put":
                life = self.model.names[name]
                self.unborn.setdefault(name, deque()).append(life)
            if self.ground.survives:
                self.unsettled.append(deepcopy(self.model))
        request = Request(self, what, expected, life, body)
        self.requests.append(request)
        try:
            call(request.done)
        except Refusal as refusal:
            request.refused(refusal)

    def some(self, pick: int) -> str:
        """A name that is in use, or now and then any."""
        used = sorted(self.model.names)
        return used[pick % len(used)] if used and pick < 9 else NAMES[pick % len(NAMES)]

    def free(self, pick: int) -> str:
        """A name that is not in use, or now and then any."""
        unused = [name for name in NAMES if name not in self.model.names]
        return unused[pick % len(unused)] if unused and pick < 8 else NAMES[pick % len(NAMES)]

    # -- writers

    @initialize(plain=st.booleans(), ttl_secs=st.sampled_from([None, None, 2]))
    def begin(self, plain: bool, ttl_secs: int | None) -> None:
        """Nobody learns anything from an empty server."""
        self._put("a", TEXT if plain else JSON, ttl_secs, None, False, b"7", None)
        self._put("b", JSON if plain else TEXT, None, None, False, b"", None)
        self.scheduler.settle()

    @rule(pick=picks, content_type=types, expiry=expiries, closed=rarely, data=st.data())
    def put(
        self,
        pick: int,
        content_type: str | None,
        expiry: tuple[int | None, int | None],
        closed: bool,
        data: st.DataObject,
    ) -> None:
        body = data.draw(documents if content_type == JSON else texts)
        ttl_secs, ahead_ms = expiry
        expires_at_ms = self.clock.at_ms + ahead_ms if ahead_ms is not None else None
        self._put(self.free(pick), content_type, ttl_secs, expires_at_ms, closed, body, None)

    @precondition(lambda self: self.model.names)
    @rule(pick=picks, source_pick=picks, same_type=rarely, expiry=expiries, closed=rarely, data=st.data())
    def fork(
        self,
        pick: int,
        source_pick: int,
        same_type: bool,
        expiry: tuple[int | None, int | None],
        closed: bool,
        data: st.DataObject,
    ) -> None:
        name, source = self.free(pick), self.some(source_pick)
        life = self.model.names.get(source)
        offset = data.draw(self._offsets(life)) if data.draw(st.booleans()) else None
        sub_offset = data.draw(st.sampled_from([0, 0, 0, 1, 2, 3, 9])) if offset is not None else 0
        content_type = data.draw(types) if same_type else None
        body = data.draw(documents if life is not None and life.json else texts)
        ttl_secs, ahead_ms = expiry
        expires_at_ms = self.clock.at_ms + ahead_ms if ahead_ms is not None else None
        self._put(name, content_type, ttl_secs, expires_at_ms, closed, body, Fork(source, offset, sub_offset))

    @precondition(lambda self: self.model.names)
    @rule(pick=picks, body=texts)
    def put_again(self, pick: int, body: bytes) -> None:
        """The very same request as the one that made a stream."""
        life = self.model.names.get(self.some(pick))
        if life is not None:
            self._put(life.name, life.content_type, life.ttl_secs, life.expires_at_ms, life.closed, body, life.fork)

    def _put(
        self,
        name: str,
        content_type: str | None,
        ttl_secs: int | None,
        expires_at_ms: int | None,
        closed: bool,
        body: bytes,
        fork: Fork | None,
    ) -> None:
        expected = self.model.put(name, content_type, ttl_secs, expires_at_ms, closed, body, fork)
        asked = None
        if fork is not None:
            # A plain str: a record with the test's own kind of text cannot be written.
            offset = str(fork.offset) if fork.offset is not None else None
            asked = ForkRequest(fork.source, offset, fork.sub_offset)
        request = CreateRequest(name, content_type, ttl_secs, expires_at_ms, closed, body, asked)
        self.submit("put", name, expected, body, lambda done: self.engine.create(request, done))

    @precondition(lambda self: self.model.names)
    @rule(pick=picks, producer=producers, seq=sequences, close=rarely, wrong_type=rarely, data=st.data())
    def post(
        self,
        pick: int,
        producer: tuple[str, int, int] | None,
        seq: str | None,
        close: bool,
        wrong_type: bool,
        data: st.DataObject,
    ) -> None:
        name = self.some(pick)
        life = self.model.names.get(name)
        content_type = life.content_type if life is not None and not wrong_type else data.draw(types)
        body = data.draw(documents if life is not None and life.json else texts)
        self._post(name, content_type, body, producer, seq, close)

    @precondition(lambda self: self.model.names)
    @rule(pick=picks, body=texts.filter(bool), number=st.integers(0, 9))
    def post_more(self, pick: int, body: bytes, number: int) -> None:
        """A plain append that is right: most of what ever happens."""
        life = self.model.names.get(self.some(pick))
        if life is not None:
            body = b"[%d,%d]" % (number, number * 7) if life.json else body
            self._post(life.name, life.content_type, body, None, None, False)

    @precondition(lambda self: self.model.names)
    @rule(
        pick=picks,
        who=st.sampled_from(["p", "p", "q"]),
        step=st.sampled_from([1, 1, 1, 0, 0, -1, 2]),
        bump=st.sampled_from([0, 0, 0, 0, 1, -1]),
        close=rarely,
    )
    def post_next(self, pick: int, who: str, step: int, bump: int, close: bool) -> None:
        """A producer that goes on, repeats itself, skips one, or was taken over."""
        life = self.model.names.get(self.some(pick))
        if life is not None:
            epoch, seq = life.producers.get(who, (0, -1))
            producer = (who, max(0, epoch + bump), 0 if bump > 0 and step == 1 else max(0, seq + step))
            self._post(life.name, life.content_type, b"7", producer, None, close)

    def _post(
        self,
        name: str,
        content_type: str | None,
        body: bytes,
        producer: tuple[str, int, int] | None,
        seq: str | None,
        close: bool,
    ) -> None:
        expected = self.model.post(name, content_type, body, producer, seq, close)
        who = ProducerHeaders(*producer) if producer is not None else None
        self.submit(
            "post",
            name,
            expected,
            body,
            lambda done: self.engine.append(name, content_type, body, who, seq, close, done),
        )

    @precondition(lambda self: self.model.names)
    @rule(pick=picks, sure=rarely)
    def delete(self, pick: int, sure: bool) -> None:
        if not sure:
            return
        name = self.some(pick)
        expected = self.model.delete(name)
        self.submit("delete", name, expected, b"", lambda done: self.engine.delete(name, done))

    # -- readers

    @precondition(lambda self: self.model.by_name)
    @rule(pick=picks)
    def head(self, pick: int) -> None:
        name = self.some(pick)
        expected = self.model.head(name)
        stream = self._look_up(name, expected, touch=False)
        if stream is None:
            return
        facts = {
            "next": str(Offset(stream.durable_index, stream.durable_position)),
            "closed": stream.durable_closed,
            "type": stream.type.header,
            "ttl": stream.ttl_secs,
            "expires": stream.expires_at_ms,
        }
        assert (200, facts) == (expected.status, expected.facts)

    @precondition(lambda self: self.model.by_name)
    @rule(pick=picks, limit=limits, data=st.data())
    def get(self, pick: int, limit: int, data: st.DataObject) -> None:
        """Read from somewhere to the tail, in as many chunks as it takes."""
        name = self.some(pick)
        offset = data.draw(self._offsets(self.model.by_name.get(name)))
        for _ in range(1000):
            expected = self.model.get(name, offset, limit)
            got = self._read(name, offset, limit)
            if got.status in {404, 410}:
                assert got.status in self._statuses(name, expected), f"GET {name}: {got}, not {expected}"
                return
            assert (got.status, got.facts) == (expected.status, expected.facts), f"GET {name} from {offset}"
            if got.status != 200 or got.facts["up_to_date"]:
                return
            offset = str(got.facts["next"])
        raise AssertionError("a read that never ends")

    @precondition(lambda self: any(life.ttl_secs for life in self.model.names.values()))
    @rule(pick=picks, used=st.booleans())
    def use_in_time(self, pick: int, used: bool) -> None:
        """Most of a window passes twice, with a use in between or without one."""
        some = [life for life in self.model.names.values() if life.ttl_secs and not life.deleted]
        if some:
            life = some[pick % len(some)]
            most_ms = (life.ttl_secs or 0) * 600
            self.advance(most_ms)
            expected = self.model.get(life.name, "now", 1) if used else self.model.head(life.name)
            self._look_up(life.name, expected, touch=used)
            self.advance(most_ms)
            self._look_up(life.name, self.model.head(life.name), touch=False)

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
        """How an ended stream may be refused.

        That its time is up the clock says at once: 404; that forks keep it, 410, when that is durable. And 410 turns
        to 404 again when the last fork goes, be that durable or not.
        """
        if expected.status == 410 and self.model.names.get(name) is None:
            return ENDED
        life = self.model.by_name.get(name)
        if expected.status == 410 and life is not None and life not in self.model.buried:
            return ENDED
        return {expected.status}

    def _offsets(self, life: Life | None) -> st.SearchStrategy[str | None]:
        """Places in a stream, some of them not yet readable, and some that are none."""
        some: list[str | None] = [None, "-1", "now", str(Offset(0, 0))]
        if life is not None:
            some += [life.token(count) for count in range(len(life.log) + 1)] * 2
            index, position = len(life.log), life.size(len(life.log))
            some += [
                str(Offset(index, position + 1)),
                str(Offset(index + 1, position + 1)),
                str(Offset(1, 1)),
                "nonsense",
            ]
        return st.sampled_from(some)

    @precondition(lambda self: self.model.by_name)
    @rule(pick=picks, from_start=st.booleans())
    def follow(self, pick: int, from_start: bool) -> None:
        name = self.some(pick)
        expected = self.model.get(name, "-1" if from_start else "now", 1)
        stream = self._look_up(name, expected, touch=True)
        if stream is None:
            return
        assert expected.status == 200
        life = self.model.by_name[name]
        tailer = Tailer(self.engine, stream, life, 0 if from_start else self.model.reached[life][0])
        self.engine.follow(stream, tailer)
        life.readers += 1
        self.tailers.append(tailer)
        tailer.wake()

    @precondition(lambda self: self.tailers)
    @rule(data=st.data())
    def unfollow(self, data: st.DataObject) -> None:
        tailer = self.tailers.pop(data.draw(st.integers(0, len(self.tailers) - 1)))
        self.engine.unfollow(tailer.stream, tailer)
        if not tailer.ended:
            tailer.life.readers -= 1
            tailer.life.used_ms = self.clock.at_ms

    # -- time, the loop and the disk

    @rule(milliseconds=st.sampled_from([1, 50, 300, 999, 1000, 1500, 31_000]))
    def advance(self, milliseconds: int) -> None:
        self.scheduler.advance(milliseconds)
        self.model.now_ms = self.clock.at_ms
        if any(life.over(self.clock.at_ms) and (life.forks or life.source) for life in self.model.names.values()):
            # The model is never late. A source can be up to a sweep late: until then its forks seem to need it.
            self.engine.expire_due()

    @precondition(lambda self: self.storage.waits_for_disk)
    @rule()
    def tick(self) -> None:
        self.scheduler.tick()

    @precondition(lambda self: self.commit == "thread")
    @rule()
    def work(self) -> None:
        self.scheduler.work()

    @precondition(lambda self: self.commit == "thread")
    @rule()
    def report(self) -> None:
        self.scheduler.report()

    @rule()
    def settle(self) -> None:
        """All that is queued is committed, and the sweeper has been by: now everything can be compared."""
        self.scheduler.settle()
        assert all(request.answered for request in self.requests), "a request was never answered"
        self.requests.clear()
        if self.storage.failures:
            return
        assert self.engine.idle
        self.advance(1000)
        self.sweep()
        if not self.storage.failures:
            self.compare(self.model)

    def sweep(self) -> None:
        """Whatever is over is gone: the sweeper comes by once a second, and asking for a stream does it at once."""
        for name in NAMES:
            with suppress(Refusal):
                self.engine.look_up(name)
        self.scheduler.settle()
        self.model.expire()

    @precondition(lambda self: self.storage.waits_for_disk and not self.storage.failures)
    @rule(after=st.integers(0, 2), keeps=st.booleans(), sure=rarely)
    def break_disk(self, after: int, keeps: bool, sure: bool) -> None:
        if sure and self.storage.fails_in is None:
            self.storage.fails_in, self.storage.keeps_failed = after, keeps

    @precondition(lambda self: self.storage.waits_for_disk and not self.storage.failures and self.model.names)
    @rule(pick=picks, keeps=st.booleans(), sure=rarely)
    def fail_and_go_on(self, pick: int, keeps: bool, sure: bool) -> None:
        """The disk fails under an append; others were queued behind it, and more come later."""
        if not sure:
            return
        self.storage.fails_in, self.storage.keeps_failed = 0, keeps
        self.post_more(pick, b"fails", 1)
        self.scheduler.tick()
        self.post_more(pick, b"queued", 2)
        self.settle()
        self.post_more(pick, b"later", 3)
        self.settle()

    @precondition(lambda self: self.ground.survives)
    @rule(clean=st.booleans(), away_ms=st.sampled_from([2000, 2000, 40_000]), sure=rarely)
    def restart(self, clean: bool, away_ms: int, sure: bool) -> None:
        """The process ends, in order or not, and comes back to what was durable and perhaps some of what was not."""
        if not sure and not self.storage.failures:
            return
        if clean:
            self.scheduler.settle()
        clean = clean and not self.storage.failures
        if clean:
            self.engine.stop()
        else:
            self.ground.crash(self.storage)
        worlds = [self.settled] if clean else [self.settled, *self.unsettled]
        used_ms = {
            life.number: self.clock.at_ms if life.readers else life.used_ms
            for life in (*self.ids, *self.model.names.values())
        }
        saved_ms = {life.number: at_ms for life, at_ms in self.saved_ms.items()}
        self.clock.at_ms += away_ms
        self.open()
        self.forget()
        back_ms = self.clock.at_ms
        alive = {name for name in NAMES if self._read(name, "now", 1).status == 200}
        self.sweep()
        for world in worlds:
            if self.fits(world, alive, back_ms, used_ms, saved_ms):
                self.adopt(world)
                return
        raise AssertionError(f"of {len(worlds)} states that could have survived, the store came back with none")

    def fits(
        self, world: DurableReference, alive: set[str], back_ms: int, used_ms: dict[int, int], saved_ms: dict[int, int]
    ) -> bool:
        """Whether a world is the one that came back. Of uses that were not saved, a share of the window may be lost."""
        for life in world.names.values():
            life.readers = 0
        for life in [life for life in world.names.values() if life.ttl_secs is not None and not life.deleted]:
            window_ms = life.ttl_secs * 1000 if life.ttl_secs is not None else 0
            latest_ms = used_ms.get(life.number, life.used_ms)
            if life.name in alive:
                if back_ms >= latest_ms + window_ms + window_ms // 16:
                    return False
                life.used_ms = back_ms
            else:
                if back_ms < saved_ms.get(life.number, life.used_ms) + window_ms:
                    return False
                world.remove(life)
        world.now_ms = back_ms
        world.expire()
        world.settle()
        try:
            self.compare(world)
        except AssertionError:
            return False
        return True

    def forget(self) -> None:
        """What a process knows only while it runs."""
        self.tailers.clear()
        self.requests.clear()
        self.unborn.clear()
        self.lives.clear()
        self.ids.clear()
        self.saved_ms.clear()

    def adopt(self, world: DurableReference) -> None:
        self.model = world
        for name, life in world.names.items():
            stream_id = self.engine.catalog.by_name[name].id
            self.lives[stream_id], self.ids[life] = life, stream_id
            self.saved_ms[life] = life.used_ms
        self.settled = deepcopy(world)
        self.unsettled.clear()
        self.storage.on_publish = self.published

    def compare(self, model: DurableReference) -> None:
        """Every stream, every byte, every counter."""
        catalog = self.engine.catalog
        assert set(catalog.by_name) == set(model.names)
        own_bytes = 0
        for name, life in model.names.items():
            stream = catalog.by_name[name]
            assert stream.deleted == life.deleted
            assert stream.children == life.forks
            known = {name: (state.epoch, state.seq) for name, state in (stream.producers or {}).items()}
            assert known == life.producers
            assert (stream.stream_seq, stream.closed_by) == (life.stream_seq, life.closer)
            assert (str(stream.tail), stream.closed) == (life.token(len(life.log)), life.closed)
            assert (stream.durable_index, stream.durable_closed) == (len(life.log), life.closed)
            assert stream.in_flight == 0
            if not life.deleted:
                whole = self.engine.reader.chunk(stream, Offset(0, 0), 10**9)
                data = b"".join(self.engine.reader.buffers(whole))
                assert data == b"".join(stored(life, at) for at in range(len(life.log)))
            if not life.deleted or model.needed(life):
                own_bytes += life.size(len(life.log)) - life.inherited
        assert len(catalog) == len(model.names)
        assert self.engine.total_bytes == own_bytes
        assert self.engine.storage_usage().payload_bytes == own_bytes

    # -- what always holds

    @invariant()
    def live_readers_have_all_there_is(self) -> None:
        for tailer in self.tailers:
            over = tailer.life in self.model.buried or self.model.by_name.get(tailer.life.name) is not tailer.life
            assert tailer.ended == over, "a live reader outlives its stream, or the other way round"
            if not over:
                assert (tailer.received, tailer.closed) == self.model.reached[tailer.life], "a wake-up was missed"

    @invariant()
    def the_failure_is_known(self) -> None:
        assert self.engine.failure is None or self.storage.failures


def changes_by_request(record: Record) -> bool:
    return type(record) in (Create, Append) or (type(record) is Delete and not record.expired)


def machine(
    ground: Callable[[], Ground], commit: CommitMode = "inline", engine: Callable[..., Engine] = Engine
) -> type[ProtocolMachine]:
    """The state machine over a storage mode."""
    members = {"make_ground": staticmethod(ground), "commit": commit, "make_engine": staticmethod(engine)}
    return type("Machine", (ProtocolMachine,), members)
