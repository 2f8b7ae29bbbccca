"""Alarms: each rings once at its deadline, wherever that has moved meanwhile."""

from __future__ import annotations

from headwater.engine.alarms import Alarms
from tests.engine.seams import ManualClock, ManualScheduler


class Owner:
    def __init__(self, at_ms: int | None) -> None:
        self.at_ms = at_ms
        self.alarm_ms: int | None = None

    def deadline_ms(self) -> int | None:
        return self.at_ms


class Belfry:
    def __init__(self) -> None:
        self.clock = ManualClock(0)
        self.scheduler = ManualScheduler(self.clock)
        self.rung: list[tuple[Owner, int]] = []
        self.alarms: Alarms[Owner] = Alarms(self.clock, self.scheduler, self._ring)

    def _ring(self, owner: Owner) -> None:
        self.rung.append((owner, self.clock.at_ms))
        owner.at_ms = None

    def set(self, at_ms: int | None) -> Owner:
        owner = Owner(at_ms)
        self.alarms.set(owner)
        return owner


def test_alarms_ring_in_the_order_of_their_deadlines() -> None:
    belfry = Belfry()
    late, early, middle = belfry.set(300), belfry.set(100), belfry.set(200)
    belfry.set(None)
    belfry.scheduler.advance(1000)
    assert belfry.rung == [(early, 100), (middle, 200), (late, 300)]
    belfry.scheduler.advance(1000)
    assert len(belfry.rung) == 3


def test_a_deadline_that_moved_back_rings_then_and_costs_one_entry() -> None:
    belfry = Belfry()
    owner = belfry.set(100)
    for at_ms in range(200, 1100, 100):
        owner.at_ms = at_ms
        belfry.alarms.set(owner)
    assert len(belfry.alarms._heap) == 1
    belfry.scheduler.advance(999)
    assert belfry.rung == []
    belfry.scheduler.advance(1)
    assert belfry.rung == [(owner, 1000)]


def test_a_deadline_that_moved_forward_rings_early() -> None:
    belfry = Belfry()
    owner = belfry.set(1000)
    owner.at_ms = 50
    belfry.alarms.set(owner)
    belfry.scheduler.advance(60)
    assert belfry.rung == [(owner, 50)]
    belfry.scheduler.advance(2000)
    assert len(belfry.rung) == 1


def test_a_deadline_that_is_no_more_does_not_ring() -> None:
    belfry = Belfry()
    owner = belfry.set(100)
    owner.at_ms = None
    belfry.scheduler.advance(200)
    assert belfry.rung == []


def test_after_stop_nothing_rings() -> None:
    belfry = Belfry()
    belfry.set(100)
    belfry.alarms.stop()
    belfry.scheduler.advance(200)
    assert belfry.rung == []
