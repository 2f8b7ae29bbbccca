"""Alarms: each fires once at its current deadline."""

from __future__ import annotations

from headwater.engine.alarms import Alarms
from tests.engine.seams import ManualClock, ManualScheduler

CALLBACKS_MAY_FAIL = True


class Owner:
    def __init__(self, at_ms: int | None) -> None:
        self.at_ms = at_ms
        self.alarm_ms: int | None = None

    def deadline_ms(self) -> int | None:
        return self.at_ms


class AlarmRecorder:
    def __init__(self) -> None:
        self.clock = ManualClock(0)
        self.scheduler = ManualScheduler(self.clock)
        self.rung: list[tuple[Owner, int]] = []
        self.alarms: Alarms[Owner] = Alarms(self.clock, self.scheduler, self._record)

    def _record(self, owner: Owner) -> None:
        self.rung.append((owner, self.clock.at_ms))
        owner.at_ms = None

    def set(self, at_ms: int | None) -> Owner:
        owner = Owner(at_ms)
        self.alarms.set(owner)
        return owner


def test_alarms_fire_in_the_order_of_their_deadlines() -> None:
    recorder = AlarmRecorder()
    late, early, middle = recorder.set(300), recorder.set(100), recorder.set(200)
    recorder.set(None)
    recorder.scheduler.advance(1000)
    assert recorder.rung == [(early, 100), (middle, 200), (late, 300)]
    recorder.scheduler.advance(1000)
    assert len(recorder.rung) == 3


def test_postponed_deadline_fires_late_and_uses_one_heap_entry() -> None:
    recorder = AlarmRecorder()
    owner = recorder.set(100)
    for at_ms in range(200, 1100, 100):
        owner.at_ms = at_ms
        recorder.alarms.set(owner)
    assert len(recorder.alarms._heap) == 1
    recorder.scheduler.advance(999)
    assert recorder.rung == []
    recorder.scheduler.advance(1)
    assert recorder.rung == [(owner, 1000)]


def test_advanced_deadline_fires_early() -> None:
    recorder = AlarmRecorder()
    owner = recorder.set(1000)
    owner.at_ms = 50
    recorder.alarms.set(owner)
    recorder.scheduler.advance(60)
    assert recorder.rung == [(owner, 50)]
    recorder.scheduler.advance(2000)
    assert len(recorder.rung) == 1


def test_cancelled_deadline_does_not_fire() -> None:
    recorder = AlarmRecorder()
    owner = recorder.set(100)
    owner.at_ms = None
    recorder.scheduler.advance(200)
    assert recorder.rung == []


def test_alarms_do_not_fire_after_stop() -> None:
    recorder = AlarmRecorder()
    recorder.set(100)
    recorder.alarms.stop()
    recorder.scheduler.advance(200)
    assert recorder.rung == []


def test_alarm_that_fails_does_not_keep_later_ones_from_firing() -> None:
    class FailingRecorder(AlarmRecorder):
        def _record(self, owner: Owner) -> None:
            super()._record(owner)
            if owner is first:
                raise RuntimeError("the test made this fail")

    recorder = FailingRecorder()
    first, same_time, later = recorder.set(100), recorder.set(100), recorder.set(200)
    recorder.scheduler.advance(1000)
    assert recorder.rung == [(first, 100), (same_time, 100), (later, 200)]
