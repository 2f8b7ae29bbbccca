"""Clients of the engine in the model test: requests that wait for their answer, and live readers."""

from __future__ import annotations

from typing import Protocol

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.rules import AppendOutcome
from headwater.engine.engine import Engine
from headwater.engine.results import Appended, Created, Deleted
from headwater.engine.stream import LiveStream
from tests.model.durable import stored
from tests.model.reference import Answer, Incarnation

UNAVAILABLE = 503
ENDED = {404, 410}


class Harness(Protocol):
    """The part of the state machine that a request needs to check its answer."""

    engine: Engine

    def check_durable(
        self, what: str, incarnation: Incarnation | None, depends_on: tuple[int, bool] | None, *, deleted: bool
    ) -> None: ...


class Request:
    """A pending request, with its expected answer and what must be durable before it is answered."""

    def __init__(
        self, harness: Harness, what: str, expected: Answer, incarnation: Incarnation | None, body: bytes
    ) -> None:
        self._harness = harness
        self._what = what
        self._expected = expected
        self._body = body
        self.incarnation = incarnation
        self.depends_on = (len(incarnation.log), incarnation.closed) if incarnation is not None else None
        self.answered = False

    def done(self, result: object) -> None:
        """The engine's callback."""
        self._answer(result)
        if not isinstance(result, Refusal) or result.status != UNAVAILABLE:
            self._harness.check_durable(
                self._what, self.incarnation, self.depends_on, deleted=isinstance(result, Deleted)
            )

    def refused(self, refusal: Refusal) -> None:
        """Handle a refusal that the engine raised directly."""
        self._answer(refusal)

    def _answer(self, result: object) -> None:
        assert not self.answered, f"{self._what} was answered twice"
        self.answered = True
        answer = answer_of(result, self._body)
        if self._harness.engine.failure is not None:
            changes = self._expected.change is not None
            allowed = {UNAVAILABLE} if changes else {UNAVAILABLE, self._expected.status}
            if self._expected.status in ENDED:
                # An expiry after the failure is not recorded, so forks may or may not keep the stream.
                allowed |= ENDED
            assert answer.status in allowed, f"{self._what} after a failed write: {answer}, not one of {allowed}"
            return
        assert (answer.status, answer.facts) == (self._expected.status, self._expected.facts), (
            f"{self._what} was answered with {answer}, not {self._expected}"
        )


class Tailer:
    """A live reader: it reads to the tail when it is woken, and checks what it reads."""

    def __init__(self, engine: Engine, stream: LiveStream, incarnation: Incarnation, start: int) -> None:
        self._engine = engine
        self.stream = stream
        self.incarnation = incarnation
        self._at = Offset(start, incarnation.size(start))
        self.received = start
        self.closed = False
        self.ended = False

    def wake(self) -> None:
        assert not self.ended, "a reader was woken after its stream had ended"
        reader = self._engine.reader
        while True:
            chunk = reader.chunk(self.stream, self._at, 7)
            data = b"".join(reader.buffers(chunk))
            for length in reader.lengths(chunk):
                message, data = data[:length], data[length:]
                assert message == stored(self.incarnation, self.received), "a live reader received a wrong message"
                self.received += 1
            self._at = chunk.end
            self.closed = chunk.closed
            if chunk.up_to_date:
                return

    def gone(self, refusal: Refusal) -> None:
        assert not self.ended
        assert refusal.status in ENDED
        self.ended = True
        self._engine.unfollow(self.stream, self)


def answer_of(result: object, body: bytes) -> Answer:
    """Convert a result of the engine to the answer that a client receives."""
    if isinstance(result, Created):
        facts: dict[str, object] = {
            "next": str(result.tail),
            "closed": result.closed,
            "type": result.stream.type.header,
        }
        return Answer(201 if result.is_new else 200, facts)
    if isinstance(result, Appended):
        facts = {"next": str(Offset(result.tail_index, result.tail_position)), "closed": result.closed}
        if result.producer is None:
            return Answer(204, facts)
        facts["producer"] = (result.producer.epoch, result.producer.seq)
        return Answer(200 if result.outcome is AppendOutcome.ACCEPTED and body else 204, facts)
    if isinstance(result, Deleted):
        return Answer(204)
    assert isinstance(result, Refusal), result
    headers = dict(result.headers)
    names_ = {"Stream-Next-Offset": "next", "Producer-Epoch": "epoch"}
    facts = {names_[key]: headers[key] for key in headers if key in names_}
    if "epoch" in facts:
        facts["epoch"] = int(headers["Producer-Epoch"])
    if "Stream-Closed" in headers:
        facts["closed"] = True
    if "Producer-Expected-Seq" in headers:
        facts["expected"] = int(headers["Producer-Expected-Seq"])
        facts["received"] = int(headers["Producer-Received-Seq"])
    return Answer(result.status, facts)
