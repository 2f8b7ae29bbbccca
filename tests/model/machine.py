"""A state machine that compares the engine with the model through any order of requests, disk failures and restarts.

`machine(backing)` builds one for a storage mode; `backing` opens the store, and reopens it after a crash. Requests are
decided on the pending state, so the expected answer is computed when a request is made. The engine may answer only when
everything the answer depends on is durable, and readers see only durable data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders
from headwater.core.rules import CreateRequest, ForkRequest
from headwater.engine.commit_placement import CommitMode
from headwater.engine.engine import Engine
from tests.engine.seams import Backing
from tests.model.clients import Tailer
from tests.model.machine_state import NAMES, MachineState
from tests.model.reference import Fork

TEXT, JSON, BYTES = "text/plain", "application/json", "application/octet-stream"

picks = st.integers(0, 9)
"""The stream that a step uses: mostly an existing one."""
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


class ProtocolMachine(MachineState):
    """The steps as rules, with checks in the rules and in invariants."""

    # -- writers

    @initialize(plain=st.booleans(), ttl_secs=st.sampled_from([None, None, 2]))
    def begin(self, plain: bool, ttl_secs: int | None) -> None:
        """Start with two streams, because steps on an empty server find nothing."""
        self._put("a", TEXT if plain else JSON, ttl_secs, None, False, b"7", None)
        self._put("b", JSON if plain else TEXT, None, None, False, b"", None)
        self.scheduler.run_until_idle()

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
        incarnation = self.model.names.get(source)
        offset = data.draw(self._offsets(incarnation)) if data.draw(st.booleans()) else None
        sub_offset = data.draw(st.sampled_from([0, 0, 0, 1, 2, 3, 9])) if offset is not None else 0
        content_type = data.draw(types) if same_type else None
        body = data.draw(documents if incarnation is not None and incarnation.json else texts)
        ttl_secs, ahead_ms = expiry
        expires_at_ms = self.clock.at_ms + ahead_ms if ahead_ms is not None else None
        self._put(name, content_type, ttl_secs, expires_at_ms, closed, body, Fork(source, offset, sub_offset))

    @precondition(lambda self: self.model.names)
    @rule(pick=picks, body=texts)
    def put_again(self, pick: int, body: bytes) -> None:
        """Repeat the request that created a stream."""
        incarnation = self.model.names.get(self.some(pick))
        if incarnation is not None:
            self._put(
                incarnation.name,
                incarnation.content_type,
                incarnation.ttl_secs,
                incarnation.expires_at_ms,
                incarnation.closed,
                body,
                incarnation.fork,
            )

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
            # Convert Hypothesis's subclass to a plain str, which can be encoded in a record.
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
        incarnation = self.model.names.get(name)
        content_type = incarnation.content_type if incarnation is not None and not wrong_type else data.draw(types)
        body = data.draw(documents if incarnation is not None and incarnation.json else texts)
        self._post(name, content_type, body, producer, seq, close)

    @precondition(lambda self: self.model.names)
    @rule(pick=picks, body=texts.filter(bool), number=st.integers(0, 9))
    def post_more(self, pick: int, body: bytes, number: int) -> None:
        """Append without a producer and without an error, which is the most common request."""
        incarnation = self.model.names.get(self.some(pick))
        if incarnation is not None:
            body = b"[%d,%d]" % (number, number * 7) if incarnation.json else body
            self._post(incarnation.name, incarnation.content_type, body, None, None, False)

    @precondition(lambda self: self.model.names)
    @rule(
        pick=picks,
        who=st.sampled_from(["p", "p", "q"]),
        step=st.sampled_from([1, 1, 1, 0, 0, -1, 2]),
        bump=st.sampled_from([0, 0, 0, 0, 1, -1]),
        close=rarely,
    )
    def post_next(self, pick: int, who: str, step: int, bump: int, close: bool) -> None:
        """Append as a producer that continues, repeats a message, skips one, or was replaced."""
        incarnation = self.model.names.get(self.some(pick))
        if incarnation is not None:
            epoch, seq = incarnation.producers.get(who, (0, -1))
            producer = (who, max(0, epoch + bump), 0 if bump > 0 and step == 1 else max(0, seq + step))
            self._post(incarnation.name, incarnation.content_type, b"7", producer, None, close)

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
        """Read from some offset to the tail, chunk by chunk."""
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
        raise AssertionError("a read does not end")

    @precondition(lambda self: any(incarnation.ttl_secs for incarnation in self.model.names.values()))
    @rule(pick=picks, used=st.booleans())
    def use_in_time(self, pick: int, used: bool) -> None:
        """Let 60 % of a TTL window pass twice, with or without a read in between."""
        some = [
            incarnation for incarnation in self.model.names.values() if incarnation.ttl_secs and not incarnation.deleted
        ]
        if some:
            incarnation = some[pick % len(some)]
            most_ms = (incarnation.ttl_secs or 0) * 600
            self.advance(most_ms)
            expected = self.model.get(incarnation.name, "now", 1) if used else self.model.head(incarnation.name)
            self._look_up(incarnation.name, expected, touch=used)
            self.advance(most_ms)
            self._look_up(incarnation.name, self.model.head(incarnation.name), touch=False)

    @precondition(lambda self: self.model.by_name)
    @rule(pick=picks, from_start=st.booleans())
    def follow(self, pick: int, from_start: bool) -> None:
        name = self.some(pick)
        expected = self.model.get(name, "-1" if from_start else "now", 1)
        stream = self._look_up(name, expected, touch=True)
        if stream is None:
            return
        assert expected.status == 200
        incarnation = self.model.by_name[name]
        tailer = Tailer(self.engine, stream, incarnation, 0 if from_start else self.model.reached[incarnation][0])
        self.engine.follow(stream, tailer)
        incarnation.readers += 1
        self.tailers.append(tailer)
        tailer.wake()

    @precondition(lambda self: self.tailers)
    @rule(data=st.data())
    def unfollow(self, data: st.DataObject) -> None:
        tailer = self.tailers.pop(data.draw(st.integers(0, len(self.tailers) - 1)))
        self.engine.unfollow(tailer.stream, tailer)
        if not tailer.ended:
            tailer.incarnation.readers -= 1
            tailer.incarnation.used_ms = self.clock.at_ms

    # -- time, the loop and the disk

    @rule(milliseconds=st.sampled_from([1, 50, 300, 999, 1000, 1500, 31_000]))
    def advance(self, milliseconds: int) -> None:
        self.scheduler.advance(milliseconds)
        self.model.now_ms = self.clock.at_ms
        if any(
            incarnation.over(self.clock.at_ms) and (incarnation.forks or incarnation.source)
            for incarnation in self.model.names.values()
        ):
            # The model expires streams at once; the engine may keep a source until the next sweep.
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
    def commit_and_compare(self) -> None:
        """Commit everything that is queued and run the sweeper; then compare the engine with the model."""
        self.scheduler.run_until_idle()
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
        """Expire every due stream by looking it up, instead of waiting for the sweeper."""
        for name in NAMES:
            with suppress(Refusal):
                self.engine.look_up(name)
        self.scheduler.run_until_idle()
        self.model.expire()

    @precondition(lambda self: self.storage.waits_for_disk and not self.storage.failures)
    @rule(after=st.integers(0, 2), keeps=st.booleans(), sure=rarely)
    def break_disk(self, after: int, keeps: bool, sure: bool) -> None:
        if sure and self.storage.fails_in is None:
            self.storage.fails_in, self.storage.keeps_failed = after, keeps

    @precondition(lambda self: self.storage.waits_for_disk and not self.storage.failures and self.model.names)
    @rule(pick=picks, keeps=st.booleans(), sure=rarely)
    def fail_and_continue(self, pick: int, keeps: bool, sure: bool) -> None:
        """Fail the write of an append while others are queued after it, and send more later."""
        if not sure:
            return
        self.storage.fails_in, self.storage.keeps_failed = 0, keeps
        self.post_more(pick, b"fails", 1)
        self.scheduler.tick()
        self.post_more(pick, b"queued", 2)
        self.commit_and_compare()
        self.post_more(pick, b"later", 3)
        self.commit_and_compare()

    @precondition(lambda self: self.backing.survives)
    @rule(clean=st.booleans(), away_ms=st.sampled_from([2000, 2000, 40_000]), sure=rarely)
    def restart(self, clean: bool, away_ms: int, sure: bool) -> None:
        """Stop or crash the engine and restart it: it has what was durable, and perhaps some of what was pending."""
        if not sure and not self.storage.failures:
            return
        if clean:
            self.scheduler.run_until_idle()
        clean = clean and not self.storage.failures
        if clean:
            self.engine.stop()
        else:
            self.backing.crash(self.storage)
        candidates = [self.durable_model] if clean else [self.durable_model, *self.queued_models]
        used_ms = {
            incarnation.number: self.clock.at_ms if incarnation.readers else incarnation.used_ms
            for incarnation in (*self.ids, *self.model.names.values())
        }
        saved_ms = {incarnation.number: at_ms for incarnation, at_ms in self.saved_ms.items()}
        self.clock.at_ms += away_ms
        self.open()
        self.forget()
        back_ms = self.clock.at_ms
        alive = {name for name in NAMES if self._read(name, "now", 1).status == 200}
        self.sweep()
        for candidate in candidates:
            if self.fits(candidate, alive, back_ms, used_ms, saved_ms):
                self.adopt(candidate)
                return
        raise AssertionError(f"the state after the restart is none of the {len(candidates)} that are possible")

    # -- invariants

    @invariant()
    def live_readers_have_all_durable_messages(self) -> None:
        for tailer in self.tailers:
            over = (
                tailer.incarnation in self.model.soft_deleted
                or self.model.by_name.get(tailer.incarnation.name) is not tailer.incarnation
            )
            assert tailer.ended == over, "a live reader must end exactly when its stream does"
            if not over:
                assert (tailer.received, tailer.closed) == self.model.reached[tailer.incarnation], (
                    "a wake-up was missed"
                )

    @invariant()
    def failure_is_only_reported_after_a_failed_write(self) -> None:
        assert self.engine.failure is None or self.storage.failures


def machine(
    backing: Callable[[], Backing], commit: CommitMode = "inline", engine: Callable[..., Engine] = Engine
) -> type[ProtocolMachine]:
    """Build the state machine for a storage mode."""
    members = {"make_backing": staticmethod(backing), "commit": commit, "make_engine": staticmethod(engine)}
    return type("Machine", (ProtocolMachine,), members)
