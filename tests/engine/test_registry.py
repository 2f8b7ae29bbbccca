"""The registry: corrected in slices while streams come and go, and replaced when most of its events are out of date."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.core.errors import Refusal
from headwater.core.rules import CreateRequest
from headwater.engine import registry as registry_module
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.registry import BATCH, REGISTRY_NAME, StreamRegistry
from headwater.storage.interface import CorruptError
from tests.engine.rig import TEXT, Rig
from tests.engine.seams import JournalGround, ManualClock, ManualScheduler, WatchedStorage


class World(Rig):
    """A rig that can be started again, with a registry or without."""

    def __init__(self) -> None:
        self.ground = JournalGround()
        self.restart(with_registry=False)

    def restart(self, *, with_registry: bool = True) -> None:
        self.clock = ManualClock()
        self.scheduler = ManualScheduler(self.clock)
        self.storage = WatchedStorage(self.ground.open())
        self.engine = Engine(self.storage, self.clock, self.scheduler, EngineLimits(), commit="inline")
        self.engine.start()
        self.registry = StreamRegistry(self.engine, self.scheduler)
        if with_registry:
            self.registry.start()

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(b"[" + self.read(REGISTRY_NAME)[:-1] + b"]")
        return found

    def listed(self) -> set[str]:
        """The names that the registry lists; each event must change something."""
        names: set[str] = set()
        for event in self.events():
            operation = event["headers"]["operation"]
            assert (event["key"] in names) is (operation != "insert"), event
            (names.discard if operation == "delete" else names.add)(event["key"])
        return names

    def streams(self) -> set[str]:
        return set(self.engine.catalog.by_name) - {REGISTRY_NAME}


def test_correction_takes_slices_and_others_run_between_them() -> None:
    world = World()
    for number in range(5 * BATCH):
        world.put(f"n{number}")
    world.scheduler.settle()
    world.restart()
    ticks = 0
    while world.registry.is_correcting:
        world.scheduler.tick()
        ticks += 1
        assert ticks < 100
    world.scheduler.settle()
    assert ticks >= 5
    assert world.listed() == world.streams()


@pytest.mark.parametrize("tick", range(8))
def test_streams_that_come_and_go_during_a_correction_are_listed_right(tick: int) -> None:
    world = World()
    for number in range(3 * BATCH):
        world.put(f"n{number}")
    world.scheduler.settle()
    world.restart()
    world.scheduler.settle()
    world.restart(with_registry=False)
    for number in range(BATCH):
        world.delete(f"n{number}")
        world.put(f"m{number}")
    world.scheduler.settle()
    world.restart()
    for _ in range(tick):
        world.scheduler.tick()
    for number in (BATCH - 1, BATCH, 2 * BATCH, 3 * BATCH - 1):
        world.delete(f"n{number}")
    world.delete("m5")
    world.put("m5")
    world.put("n1")
    world.put("new")
    world.scheduler.settle()
    assert world.listed() == world.streams()


def test_registry_with_mostly_stale_events_is_replaced_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "REPLACE_MIN", 100)
    world = World()
    world.restart()
    for number in range(200):
        world.there(f"n{number}")
        world.delete(f"n{number}")
    world.there("kept")
    world.scheduler.settle()
    assert len(world.events()) == 401
    world.restart()
    world.scheduler.settle()
    assert [event["key"] for event in world.events()] == ["kept"]
    before = world.engine.catalog.by_name[REGISTRY_NAME].id
    world.restart()
    world.scheduler.settle()
    assert world.engine.catalog.by_name[REGISTRY_NAME].id == before, "it is not replaced every time"


def test_registry_with_forks_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "REPLACE_MIN", 10)
    world = World()
    world.restart()
    world.scheduler.settle()
    for number in range(50):
        world.there(f"n{number}")
        world.delete(f"n{number}")
    world.scheduler.settle()
    world.there("fork", source=REGISTRY_NAME)
    world.restart()
    world.scheduler.settle()
    world.there("later")
    world.scheduler.settle()
    assert world.listed() == {"fork", "later"}


def test_damaged_registry_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.restart()
    world.there("a")
    world.scheduler.settle()
    world.restart(with_registry=False)
    world.scheduler.settle()
    inner = world.storage._inner

    def damaged(*_: Any) -> Any:
        raise CorruptError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "read", damaged)
        world.registry.start()
        world.scheduler.settle()
    assert world.listed() == {"a"}


def test_event_that_could_not_be_written_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.restart()
    world.scheduler.settle()
    world.put("a")
    with monkeypatch.context() as patch:
        world.engine.publisher.on_created.insert(
            0, lambda _: patch.setattr(world.storage, "refusal", lambda: "disk full")
        )
        world.scheduler.settle()
        assert world.listed() == set()
    world.scheduler.advance(6000)
    world.scheduler.settle()
    assert world.listed() == {"a"}
    assert not world.registry.is_correcting


@pytest.mark.parametrize("operation", ["append", "close", "create", "delete"])
def test_only_the_server_writes_to_it(operation: str) -> None:
    world = World()
    world.restart()
    world.scheduler.settle()
    engine = world.engine
    request = CreateRequest(REGISTRY_NAME, TEXT, None, None, False, b"")
    calls = {
        "append": lambda: engine.append(REGISTRY_NAME, "application/json", b"[1]", None, None, False, print),
        "close": lambda: engine.append(REGISTRY_NAME, None, b"", None, None, True, print),
        "create": lambda: engine.create(request, print),
        "delete": lambda: engine.delete(REGISTRY_NAME, print),
    }
    with pytest.raises(Refusal) as refusal:
        calls[operation]()
    assert refusal.value.status == 405
