"""Retention of many streams that are due together does not hold the event loop."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.core.retention import RetentionRule
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.retention import CHECKED_MAX, INTERVAL_S
from tests.engine.rig import Rig
from tests.engine.seams import ManualScheduler, MemoryBacking

AGE_MS = 3_600_000
STREAMS = 4_000
DROP_S = 15e-6
"""What dropping the messages of one stream takes."""
DROPS_MAX = 1_000
"""Drops in one iteration of the loop: 15 milliseconds. The write of their records takes as long again."""


class RetentionRig(Rig):
    def open(self) -> None:
        assert isinstance(self.backing, MemoryBacking)
        self.storage: Any = self.backing.open()
        rule = RetentionRule(max_age_ms=AGE_MS, may_drop=True)
        self.engine = Engine(self.storage, self.clock, self.scheduler, EngineLimits(), retention=rule)
        self.engine.start()


def test_streams_that_are_due_together_are_dropped_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A regression: retention of 20,000 streams by age held the loop for 30 to 80 ms."""
    assert STREAMS < CHECKED_MAX
    rig = RetentionRig(disk=False)
    names = [f"s{number}" for number in range(STREAMS)]
    for name in names:
        rig.put(name, b"old")
    rig.scheduler.run_until_idle()
    rig.scheduler.advance(round(INTERVAL_S * 1000))
    rig.scheduler.run_until_idle()
    dropped = 0
    retain = rig.engine.retain

    def counted(*arguments: Any) -> None:
        nonlocal dropped
        dropped += 1
        retain(*arguments)

    monkeypatch.setattr(rig.engine, "retain", counted)
    monkeypatch.setattr(ManualScheduler, "timer_s", lambda _: dropped * DROP_S)
    rig.clock.at_ms += AGE_MS
    most = 0
    for _ in range(1_000):
        before = dropped
        rig.scheduler.advance(1)
        rig.scheduler.tick()
        most = max(most, dropped - before)
    assert dropped == STREAMS
    assert most <= DROPS_MAX
    assert all(rig.engine.look_up(name).durable_retained_index == 1 for name in names)
    rig.engine.stop()


def test_server_that_stops_during_retention_drops_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = RetentionRig(disk=False)
    for number in range(100):
        rig.put(f"s{number}", b"old")
    rig.scheduler.run_until_idle()
    rig.clock.at_ms += AGE_MS
    rig.scheduler.advance(round(INTERVAL_S * 1000))
    assert not rig.scheduler.quiet, "the check is about to begin"
    rig.engine.stop()
    monkeypatch.setattr(rig.engine, "retain", lambda *_: pytest.fail("dropped after the stop"))
    rig.scheduler.run_until_idle()
