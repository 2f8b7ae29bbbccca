"""Retention of many streams: an error of one is logged and counted, and does not affect the others."""

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
from tests.engine.seams import JournalBacking, JournalStorage, ManualClock, ManualScheduler, WatchedStorage

INTERVAL_MS = int(INTERVAL_S * 1000)
NAMES = ("a", "damaged", "z")


class DamagedStorage(JournalStorage):
    """A store in which the index of one stream is damaged."""

    damaged: Any = None
    trims_fail = False

    def cut(
        self, stream_id: int, message_index: int, byte_position: int, end_index: int, max_bytes: int
    ) -> tuple[int, int]:
        if stream_id == self.damaged:
            raise CorruptError("an index page is damaged")
        return super().cut(stream_id, message_index, byte_position, end_index, max_bytes)

    def lengths(self, stream_id: int, message_index: int, end_index: int) -> Sequence[int]:
        if stream_id == self.damaged:
            raise CorruptError("an index page is damaged")
        return super().lengths(stream_id, message_index, end_index)

    def trim(self, stream_id: int, message_index: int, byte_position: int) -> None:
        if stream_id == self.damaged and self.trims_fail:
            raise CorruptError("an index page is damaged")
        super().trim(stream_id, message_index, byte_position)


class RestartableRig(Rig):
    def __init__(self) -> None:
        self.journal = JournalBacking().journal
        self.start(DamagedStorage(self.journal))

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
        self.scheduler.run_until_idle()

    def run_retention(self, times: int) -> None:
        for _ in range(times):
            self.scheduler.advance(INTERVAL_MS)
            self.scheduler.run_until_idle()

    def retained(self, name: str) -> int:
        return self.engine.look_up(name).durable_retained_index


def test_damaged_stream_does_not_keep_others_from_retention(caplog: pytest.LogCaptureFixture) -> None:
    rig = RestartableRig()
    for name in NAMES:
        rig.created(name)
    rig.inner.damaged = rig.engine.look_up("damaged").id
    with caplog.at_level(logging.ERROR, "headwater.engine"):
        rig.grow()
        rig.run_retention(2)
        assert (rig.retained("a"), rig.retained("damaged"), rig.retained("z")) == (40, 0, 40)
        rig.grow()
        rig.run_retention(2)
    assert (rig.retained("a"), rig.retained("z")) == (90, 90)
    assert rig.engine.retention.errors == 4
    messages = [record.getMessage() for record in caplog.records]
    assert sum(message.startswith("retention of stream 'damaged' failed") for message in messages) == 1


def test_damaged_stream_does_not_stop_the_start() -> None:
    rig = RestartableRig()
    for name in NAMES:
        rig.created(name)
    rig.grow()
    rig.run_retention(1)
    storage = DamagedStorage(rig.journal)
    storage.damaged = rig.engine.look_up("damaged").id
    storage.trims_fail = True
    rig.start(storage)
    assert rig.engine.retention.errors == 1
    assert rig.engine.look_up("z").floor_index == 40
