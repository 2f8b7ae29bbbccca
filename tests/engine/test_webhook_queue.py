"""At most one webhook call per subscription is queued, however often its wakes change."""

from __future__ import annotations

import msgspec

from headwater.engine.webhooks import Answer, Compose, OnAnswer
from tests.model.simulated_server import SimulatedServer, webhook


class Busy:
    """A network that queues calls until the test releases them."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Compose, OnAnswer]] = []

    def call(self, url: str, compose: Compose, timeout_s: float, done: OnAnswer) -> None:
        self.waiting.append((compose, done))


def busy_server() -> tuple[SimulatedServer, Busy]:
    server = SimulatedServer()
    server.put("s", webhook("events/*"))
    server.run_until_idle()
    network = Busy()
    server.receiver.call = network.call  # type: ignore[method-assign]
    return server, network


def wake_and_delete(server: SimulatedServer, count: int) -> None:
    """Create pending work with a new stream and remove it by deleting the stream."""
    for number in range(count):
        server.create(f"events/{number}", b"x")
        server.run_until_idle()
        server.delete(f"events/{number}")
        server.run_until_idle()


def test_wakes_that_end_before_their_call_leave_no_queued_calls() -> None:
    server, network = busy_server()
    wake_and_delete(server, 50)
    assert server.engine.metrics.wakes["webhook"] == 50
    assert len(network.waiting) == 1
    compose, _ = network.waiting.pop()
    assert compose() is None, "no work is pending"
    server.create("events/next", b"x")
    server.run_until_idle()
    assert len(network.waiting) == 1


def test_queued_call_delivers_the_newest_wake() -> None:
    server, network = busy_server()
    wake_and_delete(server, 3)
    server.create("events/last", b"x")
    server.run_until_idle()
    compose, done = network.waiting.pop()
    outgoing = compose()
    assert outgoing is not None
    body = msgspec.json.decode(outgoing.body)
    assert body["generation"] == 4
    assert [stream["path"] for stream in body["streams"]] == ["events/last"]
    done(Answer(True, True))
    server.run_until_idle()
    assert not server.alive["s"].pending
    assert network.waiting == []
