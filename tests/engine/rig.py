"""An engine on seams that a test moves by hand, with requests that keep their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders
from headwater.core.rules import CreateRequest, ForkRequest
from headwater.engine.committer import CommitMode
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.stream import LiveStream
from tests.engine.seams import JournalGround, ManualClock, ManualScheduler, MemoryGround, WatchedStorage

TEXT = "text/plain"


class Reader:
    """A live reader as the HTTP layer has them: a cursor that reads on when woken, and leaves when it is over."""

    def __init__(self, rig: Rig, stream: LiveStream, start: Offset) -> None:
        self._rig = rig
        self.stream = stream
        self.at = start
        self.data = b""
        self.wakes = 0
        self.closed = False
        self.refusal: Refusal | None = None

    def wake(self) -> None:
        self.wakes += 1
        self.read_on()

    def read_on(self) -> None:
        reader = self._rig.engine.reader
        chunk = reader.chunk(self.stream, self.at, 1 << 20)
        self.data += b"".join(reader.buffers(chunk))
        self.at = chunk.end
        self.closed = chunk.closed

    def gone(self, refusal: Refusal) -> None:
        assert self.refusal is None, "told twice that it is over"
        self.refusal = refusal
        self._rig.engine.unfollow(self.stream, self)


class Rig:
    """The engine over a disk that is a list (or over memory), and the doubles that move it."""

    def __init__(self, *, disk: bool = True, commit: CommitMode = "inline", limits: EngineLimits | None = None) -> None:
        self.clock = ManualClock()
        self.scheduler = ManualScheduler(self.clock)
        self.storage = WatchedStorage((JournalGround() if disk else MemoryGround()).open())
        self.engine = Engine(self.storage, self.clock, self.scheduler, limits or EngineLimits(), commit=commit)
        self.engine.start()

    def put(self, name: str, body: bytes = b"", **more: Any) -> list[object]:
        fork = ForkRequest(more.pop("source"), more.pop("offset", None), 0) if "source" in more else None
        request = CreateRequest(
            name,
            None if fork is not None else TEXT,
            more.pop("ttl_secs", None),
            more.pop("expires_at_ms", None),
            more.pop("closed", False),
            body,
            fork,
        )
        assert not more
        return self._asked(lambda done: self.engine.create(request, done))

    def post(
        self, name: str, body: bytes = b"x", producer: tuple[str, int, int] | None = None, close: bool = False
    ) -> list[object]:
        who = ProducerHeaders(*producer) if producer is not None else None
        return self._asked(lambda done: self.engine.append(name, TEXT, body, who, None, close, done))

    def delete(self, name: str) -> list[object]:
        return self._asked(lambda done: self.engine.delete(name, done))

    def there(self, name: str, body: bytes = b"", **more: Any) -> LiveStream:
        """A stream whose creation is durable."""
        self.put(name, body, **more)
        self.scheduler.settle()
        return self.engine.look_up(name)

    def read(self, name: str, limit: int = 1 << 20) -> bytes:
        """All that a reader of a stream gets, in chunks."""
        engine = self.engine
        stream = engine.look_up(name, touch=True)
        at, data = engine.reader.resolve(stream, "-1"), b""
        while True:
            chunk = engine.reader.chunk(stream, at, limit)
            data += b"".join(engine.reader.buffers(chunk))
            at = chunk.end
            if chunk.up_to_date:
                return data

    def follow(self, stream: LiveStream, *, from_start: bool = False) -> Reader:
        """Register first, then look at the tail again: as every live reader must."""
        start = Offset(0, 0) if from_start else Offset(stream.durable_index, stream.durable_position)
        reader = Reader(self, stream, start)
        self.engine.follow(stream, reader)
        reader.read_on()
        return reader

    def _asked(self, call: Callable[[Callable[[Any], None]], None]) -> list[object]:
        """The answers to a request: empty until it is answered."""
        answers: list[object] = []
        try:
            call(answers.append)
        except Refusal as refusal:
            answers.append(refusal)
        return answers


def status(answers: list[object]) -> int | None:
    """The status of a refusal; None for a success."""
    [answer] = answers
    return answer.status if isinstance(answer, Refusal) else None
