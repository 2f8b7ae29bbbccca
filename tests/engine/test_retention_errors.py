"""Retention of many streams: an error of one is logged and counted, and the others get theirs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from headwater.core.retention import RetentionRule
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.retention import INTERVAL_S
from headwater.storage.interface import CorruptError
from tests.engine.rig import Rig
from tests.engine.seams import JournalGround, JournalStorage, ManualClock, ManualScheduler, WatchedStorage

LOOK_MS = int(INTERVAL_S * 1000)
NAMES = ("a", "damaged", "z")


class DamagedStorage(JournalStorage):
    """A store in which the index of one stream is damaged."""

    damaged: Any = None
    trims_fail = False

    def cut(self, stream_id: int, index: int, position: int, end_index: int, max_bytes: int) -> tuple[int, int]:
        if stream_id == self.damaged:
            raise CorruptError("an index page is damaged")
        return super().cut(stream_id, index, position, end_index, max_bytes)

    def lengths(self, stream_id: int, index: int, end_index: int) -> Sequence[int]:
        if stream_id == self.damaged:
            raise CorruptError("an index page is damaged")
        return super().lengths(stream_id, index, end_index)

    def trim(self, stream_id: int, index: int, position: int) -> None:
        if stream_id == self.damaged and self.trims_fail:
            raise CorruptError("an index page is damaged")
        super().trim(stream_id, index, position)


class World(Rig):
    def __init__(self) -> None:
        self.ground = JournalGround()
        self.start(DamagedStorage(self.ground._journal))

    def start(self, storage: DamagedStorage) -> None:
        self.inner = storage
        self.clock = ManualClock()
        self.scheduler = ManualScheduler(self.clock)
        self.storage = WatchedStorage(storage)
        rule = RetentionRule(0, 100, True)
        self.engine = Engine(self.storage, self.clock, self.scheduler, EngineLimits(), commit="inline", retention=rule)
        self.engine.start()

    def grow(self) -> None:
        for name in NAMES:
            for _ in range(50):
                self.post(name, b"0123456789")
        self.scheduler.settle()

    def looks(self, times: int) -> None:
        for _ in range(times):
            self.scheduler.advance(LOOK_MS)
            self.scheduler.settle()

    def retained(self, name: str) -> int:
        return self.engine.look_up(name).durable_retained_index


def test_damaged_stream_does_not_keep_others_from_retention(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for name in NAMES:
        world.there(name)
    world.inner.damaged = world.engine.look_up("damaged").id
    with caplog.at_level(logging.ERROR, "headwater.engine"):
        world.grow()
        world.looks(2)
        assert (world.retained("a"), world.retained("damaged"), world.retained("z")) == (40, 0, 40)
        world.grow()
        world.looks(2)
    assert (world.retained("a"), world.retained("z")) == (90, 90)
    assert world.engine.retention.errors == 4
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("retention of stream 'damaged' failed") for message in messages) == 1


def test_damaged_stream_does_not_stop_the_start() -> None:
    world = World()
    for name in NAMES:
        world.there(name)
    world.grow()
    world.looks(1)
    storage = DamagedStorage(world.ground._journal)
    storage.damaged = world.engine.look_up("damaged").id
    storage.trims_fail = True
    world.start(storage)
    assert world.engine.retention.errors == 1
    assert world.engine.look_up("z").floor_index == 40
