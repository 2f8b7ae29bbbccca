"""An engine with a manual clock and scheduler, and requests whose answers are collected in lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.producers import ProducerHeaders
from headwater.core.rules import CreateRequest, ForkRequest
from headwater.engine.commit_placement import CommitMode
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.results import Appended
from headwater.engine.stream import LiveStream
from tests.engine.seams import Backing, JournalBacking, ManualClock, ManualScheduler, MemoryBacking, WatchedStorage

TEXT = "text/plain"


class Reader:
    """A live reader as in the HTTP layer: it reads to the tail when it is woken, and leaves when the stream ends."""

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
        self.read_more()

    def read_more(self) -> None:
        reader = self._rig.engine.reader
        chunk = reader.chunk(self.stream, self.at, 1 << 20)
        self.data += b"".join(reader.buffers(chunk))
        self.at = chunk.end
        self.closed = chunk.closed

    def gone(self, refusal: Refusal) -> None:
        assert self.refusal is None, "the end was reported twice"
        self.refusal = refusal
        self._rig.engine.unfollow(self.stream, self)


class Rig:
    """The engine over a journal in a list (or over memory), with its manual clock and scheduler."""

    def __init__(self, *, disk: bool = True, commit: CommitMode = "inline", limits: EngineLimits | None = None) -> None:
        self.clock = ManualClock()
        self.scheduler = ManualScheduler(self.clock)
        self.backing: Backing = JournalBacking() if disk else MemoryBacking()
        self._commit: CommitMode = commit
        self._limits = limits or EngineLimits()
        self.open()

    def open(self) -> None:
        """Start an engine on the durable records, as a new process does."""
        self.storage = WatchedStorage(self.backing.open())
        self.engine = Engine(self.storage, self.clock, self.scheduler, self._limits, commit=self._commit)
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

    def append_in_sequence(self, name: str, stream_seq: str) -> list[object]:
        """Append with a `Stream-Seq`, and wait until that is durable."""
        answers = self._asked(lambda done: self.engine.append(name, TEXT, b"x", None, stream_seq, False, done))
        self.scheduler.run_until_idle()
        return answers

    def delete(self, name: str) -> list[object]:
        return self._asked(lambda done: self.engine.delete(name, done))

    def created(self, name: str, body: bytes = b"", **more: Any) -> LiveStream:
        """Create a stream and wait until that is durable."""
        self.put(name, body, **more)
        self.scheduler.run_until_idle()
        return self.engine.look_up(name)

    def read(self, name: str, limit: int = 1 << 20) -> bytes:
        """Read a whole stream in chunks."""
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
        """Register a reader first and then read the tail, as every live reader must."""
        start = Offset(0, 0) if from_start else Offset(stream.durable_index, stream.durable_position)
        reader = Reader(self, stream, start)
        self.engine.follow(stream, reader)
        reader.read_more()
        return reader

    def _asked(self, call: Callable[[Callable[[Any], None]], None]) -> list[object]:
        """Send a request; the returned list is empty until it is answered."""
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


def appended(answers: list[object]) -> Appended:
    [answer] = answers
    assert isinstance(answer, Appended)
    return answer
