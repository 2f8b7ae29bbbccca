"""An engine with subscriptions but without an event loop or a network, which can crash at any record and restart.

Tests control the time, the ticks and the answers of webhook receivers. A crash is a write that stops after a number of
records; the restarted server has the records written before, and requests without an answer never get one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headwater.core.catalog import Catalog
from headwater.core.errors import Refusal
from headwater.core.offsets import Offset
from headwater.core.rules import CreateRequest
from headwater.core.subscriptions import Config, make_config
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.stream import LiveStream
from headwater.engine.subscription import Subscription
from headwater.engine.subscriptions import Subscriptions
from headwater.engine.webhooks import Answer, Compose, OnAnswer, OnVetted
from headwater.storage.interface import Committed, StorageError
from tests.engine.seams import JournalStorage, ManualClock, ManualScheduler

LEASE_MS = 5_000
WAKE = "wake"


class TearableStorage(JournalStorage):
    """A journal in a list that can fail in the middle of a write."""

    tear: int | None = None

    def write(self, batch: Sequence[Committed]) -> None:
        if self.tear is None:
            super().write(batch)
            return
        super().write(batch[: self.tear])
        raise StorageError("torn")


@dataclass(slots=True)
class Delivery:
    """A webhook call in progress, as its receiver sees it."""

    subscription_id: str
    wake_id: str
    generation: int
    token: str
    reported_tails: dict[int, str]
    """The tail offset of each stream with work, by incarnation."""
    done: OnAnswer


class Receiver:
    """A webhook receiver that keeps every call open until the test answers it."""

    def __init__(self, catalog: Catalog[LiveStream]) -> None:
        self._catalog = catalog
        self.calls: list[Delivery] = []

    def vet(self, url: str, done: OnVetted) -> None:
        done(None)

    def call(self, url: str, compose: Compose, timeout_s: float, done: OnAnswer) -> None:
        outgoing = compose()
        if outgoing is None:
            return
        body = msgspec.json.decode(outgoing.body)
        with_work = [stream for stream in body["streams"] if stream["has_pending"]]
        reported_tails = {self._catalog.by_name[stream["path"]].id: stream["tail_offset"] for stream in with_work}
        self.calls.append(
            Delivery(
                body["subscription_id"],
                body["wake_id"],
                body["generation"],
                body["callback_token"],
                reported_tails,
                done,
            )
        )

    def answer(self, delivery: Delivery, answer: Answer) -> None:
        self.calls.remove(delivery)
        delivery.done(answer)

    async def stop(self) -> None: ...


class SimulatedServer:
    def __init__(self, make: Callable[..., Subscriptions] = Subscriptions) -> None:
        self._make = make
        self._journal: list[tuple[bytes, tuple[int, ...]]] = []
        self.clock = ManualClock()
        self.open()

    def open(self) -> None:
        """Start on the records in the journal."""
        self.scheduler = ManualScheduler(self.clock)
        self.storage = TearableStorage(self._journal)
        self.engine = Engine(self.storage, self.clock, self.scheduler, EngineLimits(), commit="inline")
        self.engine.start()
        self.receiver = Receiver(self.engine.catalog)
        self.subscriptions = self._make(self.engine, self.scheduler, self.receiver, timeout_s=30.0, jitter=lambda: 0.0)
        self.subscriptions.start()
        self.subscriptions.begin()

    def run_until_idle(self) -> None:
        self.scheduler.run_until_idle()

    def crash(self, ticks: int, torn_after: int) -> None:
        """Run for some ticks, crash in the middle of the next write, and start again."""
        for _ in range(ticks):
            self.scheduler.tick()
        self.storage.tear = torn_after
        self.scheduler.tick()
        self.open()
        # Timers that came due during the crash fire in the first millisecond.
        self.scheduler.advance(1)
        self.run_until_idle()

    # -- client requests; each returns a list that holds the answer once there is one

    def create(self, name: str, body: bytes = b"") -> list[Any]:
        content_type = "application/json" if name == WAKE else "text/plain"
        request = CreateRequest(name, content_type, None, None, False, body)
        return self._ask(lambda done: self.engine.create(request, done))

    def append(self, name: str, body: bytes) -> list[Any]:
        return self._ask(
            lambda done: self.engine.append(name, "text/plain", body, None, None, False, done),
        )

    def delete(self, name: str) -> list[Any]:
        return self._ask(lambda done: self.engine.delete(name, done))

    def put(self, id_: str, config: Config) -> list[Any]:
        return self._ask(lambda done: self.subscriptions.put(id_, config, "http://server", done))

    def do(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self._ask(lambda done: self.subscriptions.run(lambda: work(*arguments), done))

    def _ask(self, ask: Callable[[Callable[[Any], None]], None]) -> list[Any]:
        answers: list[Any] = []
        try:
            ask(answers.append)
        except Refusal as refusal:
            answers.append(refusal)
        return answers

    # -- state that tests inspect

    @property
    def alive(self) -> dict[str, Subscription]:
        return self.subscriptions._by_id

    def stream(self, name: str) -> LiveStream | None:
        stream = self.engine.catalog.by_name.get(name)
        return stream if stream is not None and not stream.deleted else None

    def wake_events(self) -> list[dict[str, Any]]:
        stream = self.stream(WAKE)
        if stream is None:
            return []
        chunk = self.engine.reader.chunk(stream, Offset(0, 0), 10**9)
        data = b"".join(self.engine.reader.buffers(chunk))
        events: list[dict[str, Any]] = msgspec.json.decode(b"[" + data[:-1] + b"]")
        return events


def pull(pattern: str | None = "events/*", streams: Sequence[str] = ()) -> Config:
    return make_config("pull-wake", pattern, streams, None, WAKE, LEASE_MS, None, 1024)


def webhook(pattern: str | None = "events/*", streams: Sequence[str] = ()) -> Config:
    return make_config("webhook", pattern, streams, "https://hook.example/", None, LEASE_MS, None, 1024)
