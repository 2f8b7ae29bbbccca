"""Those who talk to the engine in the model test: requests that wait for their answer, and live readers."""

from __future__ import annotations

from typing import Protocol

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.rules import AppendOutcome
from headwater.engine.engine import Engine
from headwater.engine.results import Appended, Created, Deleted
from headwater.engine.stream import LiveStream
from tests.model.durable import stored
from tests.model.reference import Answer, Life

UNAVAILABLE = 503
ENDED = {404, 410}


class World(Protocol):
    """What a request must know of the state of things to judge its answer."""

    engine: Engine

    def check_durable(
        self, what: str, life: Life | None, rests_on: tuple[int, bool] | None, *, deleted: bool
    ) -> None: ...


class Request:
    """A request on its way: what it must be answered with, and what must be durable by then."""

    def __init__(self, world: World, what: str, expected: Answer, life: Life | None, body: bytes) -> None:
        self._world = world
        self._what = what
        self._expected = expected
        self._body = body
        self.life = life
        self.rests_on = (len(life.log), life.closed) if life is not None else None
        self.answered = False

    def done(self, result: object) -> None:
        """The engine's callback."""
        self._answer(result)
        if not isinstance(result, Refusal) or result.status != UNAVAILABLE:
            self._world.check_durable(self._what, self.life, self.rests_on, deleted=isinstance(result, Deleted))

    def refused(self, refusal: Refusal) -> None:
        """The engine refused at once."""
        self._answer(refusal)

    def _answer(self, result: object) -> None:
        assert not self.answered, f"{self._what} was answered twice"
        self.answered = True
        answer = answer_of(result, self._body)
        if self._world.engine.failure is not None:
            changes = self._expected.change is not None
            allowed = {UNAVAILABLE} if changes else {UNAVAILABLE, self._expected.status}
            if self._expected.status in ENDED:
                allowed |= ENDED  # What ends by the clock now is nowhere written down, nor who keeps it.
            assert answer.status in allowed, f"{self._what} after a failed write: {answer}, not one of {allowed}"
            return
        assert (answer.status, answer.facts) == (self._expected.status, self._expected.facts), (
            f"{self._what} was answered with {answer}, not {self._expected}"
        )


class Tailer:
    """A live reader: it reads on whenever it is woken, and notes what it was given."""

    def __init__(self, engine: Engine, stream: LiveStream, life: Life, start: int) -> None:
        self._engine = engine
        self.stream = stream
        self.life = life
        self._at = Offset(start, life.size(start))
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
                assert message == stored(self.life, self.received), "a live reader was given something else"
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
    """What a client would be told."""
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
    told = dict(result.headers)
    names_ = {"Stream-Next-Offset": "next", "Producer-Epoch": "epoch"}
    facts = {names_[key]: told[key] for key in told if key in names_}
    if "epoch" in facts:
        facts["epoch"] = int(told["Producer-Epoch"])
    if "Stream-Closed" in told:
        facts["closed"] = True
    if "Producer-Expected-Seq" in told:
        facts["expected"] = int(told["Producer-Expected-Seq"])
        facts["received"] = int(told["Producer-Received-Seq"])
    return Answer(result.status, facts)
