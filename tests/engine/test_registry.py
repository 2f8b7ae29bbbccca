"""The registry: it is corrected in slices while streams change, and replaced when most of its events are stale."""

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
from tests.engine.seams import JournalBacking, ManualClock, ManualScheduler, WatchedStorage


class RestartableRig(Rig):
    """A rig that can be restarted, with a registry or without."""

    def __init__(self) -> None:
        self.backing = JournalBacking()
        self.restart(with_registry=False)

    def restart(self, *, with_registry: bool = True) -> None:
        self.clock = ManualClock()
        self.scheduler = ManualScheduler(self.clock)
        self.storage = WatchedStorage(self.backing.open())
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


def test_correction_runs_in_slices_with_other_work_between() -> None:
    rig = RestartableRig()
    for number in range(5 * BATCH):
        rig.put(f"n{number}")
    rig.scheduler.run_until_idle()
    rig.restart()
    listed = []
    for _ in range(5):
        rig.scheduler.tick()
        listed.append(len(rig.listed()))
    assert listed == [number * BATCH for number in range(1, 6)], "each tick lists one batch"
    rig.scheduler.run_until_idle()
    assert rig.listed() == rig.streams()


@pytest.mark.parametrize("tick", range(8))
def test_streams_created_and_deleted_during_a_correction_are_listed_correctly(tick: int) -> None:
    rig = RestartableRig()
    for number in range(3 * BATCH):
        rig.put(f"n{number}")
    rig.scheduler.run_until_idle()
    rig.restart()
    rig.scheduler.run_until_idle()
    rig.restart(with_registry=False)
    for number in range(BATCH):
        rig.delete(f"n{number}")
        rig.put(f"m{number}")
    rig.scheduler.run_until_idle()
    rig.restart()
    for _ in range(tick):
        rig.scheduler.tick()
    for number in (BATCH - 1, BATCH, 2 * BATCH, 3 * BATCH - 1):
        rig.delete(f"n{number}")
    rig.delete("m5")
    rig.put("m5")
    rig.put("n1")
    rig.put("new")
    rig.scheduler.run_until_idle()
    assert rig.listed() == rig.streams()


def test_registry_with_mostly_stale_events_is_replaced_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "REPLACE_MIN", 100)
    rig = RestartableRig()
    rig.restart()
    for number in range(200):
        rig.created(f"n{number}")
        rig.delete(f"n{number}")
    rig.created("kept")
    rig.scheduler.run_until_idle()
    assert len(rig.events()) == 401
    rig.restart()
    rig.scheduler.run_until_idle()
    assert [event["key"] for event in rig.events()] == ["kept"]
    before = rig.engine.catalog.by_name[REGISTRY_NAME].id
    rig.restart()
    rig.scheduler.run_until_idle()
    assert rig.engine.catalog.by_name[REGISTRY_NAME].id == before, "it is not replaced every time"


def test_registry_with_forks_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "REPLACE_MIN", 10)
    rig = RestartableRig()
    rig.restart()
    rig.scheduler.run_until_idle()
    for number in range(50):
        rig.created(f"n{number}")
        rig.delete(f"n{number}")
    rig.scheduler.run_until_idle()
    rig.created("fork", source=REGISTRY_NAME)
    rig.restart()
    rig.scheduler.run_until_idle()
    rig.created("later")
    rig.scheduler.run_until_idle()
    assert rig.listed() == {"fork", "later"}


def test_damaged_registry_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RestartableRig()
    rig.restart()
    rig.created("a")
    rig.scheduler.run_until_idle()
    rig.restart(with_registry=False)
    rig.scheduler.run_until_idle()
    inner = rig.storage._inner

    def damaged(*_: Any) -> Any:
        raise CorruptError("damaged")

    with monkeypatch.context() as patch:
        patch.setattr(inner, "read", damaged)
        rig.registry.start()
        rig.scheduler.run_until_idle()
    assert rig.listed() == {"a"}


def test_event_that_could_not_be_written_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RestartableRig()
    rig.restart()
    rig.scheduler.run_until_idle()
    rig.put("a")
    with monkeypatch.context() as patch:
        rig.engine.publisher.on_created.insert(0, lambda _: patch.setattr(rig.storage, "refusal", lambda: "disk full"))
        rig.scheduler.run_until_idle()
        assert rig.listed() == set()
    rig.scheduler.advance(6000)
    rig.scheduler.run_until_idle()
    assert rig.listed() == {"a"}
    assert rig.registry._timer is None, "no further attempt is scheduled"
    assert rig.registry._correction is None


@pytest.mark.parametrize("operation", ["append", "close", "create", "delete"])
def test_clients_cannot_write_to_the_registry(operation: str) -> None:
    rig = RestartableRig()
    rig.restart()
    rig.scheduler.run_until_idle()
    engine = rig.engine
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
