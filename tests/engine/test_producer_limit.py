"""The limit on producers of one stream: idle ones make room for new ones at the limit, and never before."""

from __future__ import annotations

import pytest

from headwater.core.errors import TooManyProducers
from headwater.core.producers import ProducerState
from headwater.core.records import Image
from headwater.engine.clock_guard import Jump
from headwater.engine.engine import Engine
from headwater.engine.producer_limit import DAY_MS
from headwater.engine.quota import PRODUCER_BYTES, EngineLimits, stream_bytes
from tests.engine.rig import TEXT, Rig, status
from tests.engine.seams import JournalStorage, ManualClock, ManualScheduler

LIMITS = EngineLimits(max_producers=3)
DISK = pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])


def producing(rig: Rig, *producers: str, seq: int = 0) -> list[int | None]:
    answers = [rig.post("a", b"x", (producer, 0, seq)) for producer in producers]
    rig.scheduler.run_until_idle()
    return [status(answer) for answer in answers]


def known(rig: Rig) -> list[str]:
    return sorted(rig.engine.catalog.by_name["a"].producers or ())


def pass_days(rig: Rig, days: float) -> None:
    rig.clock.at_ms += int(days * DAY_MS)


@DISK
def test_producer_beyond_the_limit_is_refused_while_all_are_in_use(disk: bool) -> None:
    rig = Rig(disk=disk, limits=LIMITS)
    rig.created("a")
    assert producing(rig, "p", "q", "r") == [None, None, None]
    pass_days(rig, 6.99)
    refused = rig.post("a", b"x", ("s", 0, 0))
    assert status(refused) == 413
    assert isinstance(refused[0], TooManyProducers)
    assert "idle for 7 days" in str(refused[0])
    assert known(rig) == ["p", "q", "r"]
    assert rig.engine.metrics.evicted_producers == 0


@DISK
def test_producers_idle_for_seven_days_make_room_at_the_limit(disk: bool) -> None:
    rig = Rig(disk=disk, limits=LIMITS)
    rig.created("a")
    producing(rig, "p", "q", "r")
    pass_days(rig, 4)
    assert producing(rig, "q", seq=1) == [None]
    pass_days(rig, 3)
    assert producing(rig, "s") == [None]
    assert known(rig) == ["q", "s"]
    assert rig.engine.metrics.evicted_producers == 2
    assert rig.engine.quota.metadata_bytes == stream_bytes("a", TEXT) + 2 * PRODUCER_BYTES


@DISK
def test_refused_producer_is_accepted_as_soon_as_another_has_been_idle(disk: bool) -> None:
    rig = Rig(disk=disk, limits=LIMITS)
    rig.created("a")
    producing(rig, "p", "q", "r")
    pass_days(rig, 5)
    assert producing(rig, "s") == [413]
    pass_days(rig, 2)
    assert producing(rig, "s") == [None]


def test_idle_producers_below_the_limit_are_kept() -> None:
    rig = Rig(limits=LIMITS)
    rig.created("a")
    producing(rig, "p", "q")
    pass_days(rig, 400)
    assert producing(rig, "r") == [None]
    assert known(rig) == ["p", "q", "r"]
    assert producing(rig, "p") == [None]
    assert rig.engine.metrics.duplicates == 1


def test_time_of_last_use_and_evictions_survive_a_restart() -> None:
    rig = Rig(limits=LIMITS)
    rig.created("a")
    producing(rig, "p", "q", "r")
    pass_days(rig, 7)
    producing(rig, "s", "t")
    inner = rig.storage._inner
    assert isinstance(inner, JournalStorage)
    clock = ManualClock()
    engine = Engine(JournalStorage(inner._journal), clock, ManualScheduler(clock), LIMITS)
    engine.start()
    restarted, before = engine.catalog.by_name["a"], rig.engine.catalog.by_name["a"]
    assert restarted.producers == before.producers
    assert sorted(restarted.producers or ()) == ["s", "t"]
    assert {state.used_ms for state in (restarted.producers or {}).values()} == {rig.clock.now_ms()}


def test_state_of_an_earlier_release_counts_as_used_when_the_stream_was_last_written() -> None:
    rig = Rig(limits=LIMITS)
    earlier = {id_: ProducerState(0, 0) for id_ in ("p", "q", "r")}
    now_ms = rig.clock.now_ms()
    rig.engine.catalog.apply(
        Image(1, "a", 1, "text/plain", None, None, 3, 3, now_ms, now_ms - DAY_MS, producers=earlier)
    )
    assert {state.used_ms for state in (rig.engine.catalog.by_id[1].producers or {}).values()} == {now_ms - DAY_MS}


def test_clock_jump_evicts_nothing() -> None:
    rig = Rig(limits=LIMITS)
    rig.created("a")
    producing(rig, "p", "q", "r")
    before_ms = rig.clock.now_ms()
    pass_days(rig, 400)
    rig.engine.clock_guard.jump = Jump(before_ms, rig.clock.now_ms(), rig.clock.now_ms() + DAY_MS)
    assert producing(rig, "s") == [413]
    rig.engine.clock_guard.jump = None
    assert producing(rig, "s") == [None]
