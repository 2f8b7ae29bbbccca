"""One webhook call per subscription waits for its turn, however often its wakes come and go meanwhile."""

from __future__ import annotations

import msgspec

from headwater.engine.webhooks import Answer, Compose, OnAnswer
from tests.model.subscription_world import World, webhook


class Busy:
    """A network that keeps calls waiting until the test lets them go."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Compose, OnAnswer]] = []

    def call(self, url: str, compose: Compose, timeout_s: float, done: OnAnswer) -> None:
        self.waiting.append((compose, done))


def busy_world() -> tuple[World, Busy]:
    world = World()
    world.put("s", webhook("events/*"))
    world.settle()
    network = Busy()
    world.receiver.call = network.call  # type: ignore[method-assign]
    return world, network


def wake_and_end(world: World, count: int) -> None:
    """A client can do this as fast as it likes: each stream is work, and its deletion is the end of it."""
    for number in range(count):
        world.create(f"events/{number}", b"x")
        world.settle()
        world.delete(f"events/{number}")
        world.settle()


def test_wakes_that_end_before_their_call_leave_no_queue_behind() -> None:
    world, network = busy_world()
    wake_and_end(world, 50)
    assert world.engine.metrics.wakes["webhook"] == 50
    assert len(network.waiting) == 1
    compose, _ = network.waiting.pop()
    assert compose() is None, "there is no work any more"
    world.create("events/next", b"x")
    world.settle()
    assert len(network.waiting) == 1


def test_the_call_that_waited_delivers_the_newest_wake() -> None:
    world, network = busy_world()
    wake_and_end(world, 3)
    world.create("events/last", b"x")
    world.settle()
    compose, done = network.waiting.pop()
    outgoing = compose()
    assert outgoing is not None
    body = msgspec.json.decode(outgoing.body)
    assert body["generation"] == 4
    assert [stream["path"] for stream in body["streams"]] == ["events/last"]
    done(Answer(True, True))
    world.settle()
    assert not world.alive["s"].pending
    assert network.waiting == []
