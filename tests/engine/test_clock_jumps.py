"""Clock jumps: streams that expire by one are 404 at once, and their data is kept until the time is confirmed."""

from __future__ import annotations

import logging

import pytest

from headwater.core.errors import Refusal, StreamNotFound
from headwater.core.records import Document
from headwater.core.retention import RetentionRule
from headwater.core.rules import CreateRequest
from headwater.engine.clock_guard import DOCUMENT_KEY, JumpRule
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.sweeper import REBUILD_MAX, STALE_MIN
from headwater.storage.interface import Committed
from tests.engine.rig import TEXT, Reader, Rig, status
from tests.engine.seams import START_MS, JournalBacking, ManualClock, ManualScheduler, WatchedStorage

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
RULE = JumpRule(HOUR_MS, DAY_MS)


class RestartableRig(Rig):
    """A rig whose engine can be stopped and started again at another time."""

    def __init__(self, rule: JumpRule = RULE, retention: RetentionRule | None = None) -> None:
        self.backing = JournalBacking()
        self.rule = rule
        self.rule_of_retention = retention
        self.restart(START_MS)

    def restart(self, at_ms: int) -> None:
        self.clock = ManualClock(at_ms)
        self.scheduler = ManualScheduler(self.clock)
        self.storage = WatchedStorage(self.backing.open())
        self.engine = Engine(
            self.storage,
            self.clock,
            self.scheduler,
            EngineLimits(),
            commit="inline",
            jumps=self.rule,
            retention=self.rule_of_retention,
        )
        self.engine.start()
        self.scheduler.run_until_idle()

    def run_for(self, milliseconds: int) -> None:
        self.scheduler.advance(milliseconds)
        self.scheduler.run_until_idle()

    def answers(self, name: str = "a") -> str:
        try:
            return self.read(name).decode()
        except StreamNotFound:
            return "404"

    @property
    def kept(self) -> set[str]:
        return set(self.engine.catalog.by_name)

    def confirm(self) -> list[int]:
        counts: list[int] = []
        self.engine.confirm_expiry(counts.append)
        self.scheduler.run_until_idle()
        self.run_for(2000)
        return counts


def with_streams(rule: JumpRule = RULE) -> RestartableRig:
    rig = RestartableRig(rule)
    rig.created("a", b"ttl", ttl_secs=30 * 24 * 3600)
    rig.created("b", b"instant", expires_at_ms=START_MS + 30 * DAY_MS)
    rig.created("forever", b"forever")
    rig.run_for(5000)
    return rig


def jump(rig: RestartableRig, how: str, by_ms: int = 40 * DAY_MS) -> None:
    if how == "restart":
        rig.restart(rig.clock.at_ms + by_ms)
    else:
        rig.clock.ahead_ms = by_ms
    rig.run_for(3000)


HOW = pytest.mark.parametrize("how", ["restart", "while running"])


@HOW
def test_expired_streams_answer_404_and_their_data_is_kept(how: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = with_streams()
    with caplog.at_level(logging.WARNING, "headwater.engine"):
        jump(rig, how)
    assert (rig.answers("a"), rig.answers("b"), rig.answers("forever")) == ("404", "404", "forever")
    assert status(rig.post("a")) == 404
    assert status(rig.delete("b")) == 404
    assert rig.kept == {"a", "b", "forever"}
    assert rig.engine.held_streams == 2
    assert rig.engine.clock_guard.jumps == 1
    assert "the clock jumped from 2027-" in caplog.text
    assert "confirm-expiry" in caplog.text


@HOW
def test_operator_confirms_the_time_and_the_data_is_deleted(how: str) -> None:
    rig = with_streams()
    jump(rig, how)
    assert rig.confirm() == [2]
    assert rig.kept == {"forever"}
    assert rig.engine.held_streams == 0
    assert rig.engine.metrics.expired == 2
    rig.restart(rig.clock.at_ms + 1000)
    assert rig.kept == {"forever"}


@HOW
def test_after_the_grace_time_the_data_is_deleted(how: str) -> None:
    rig = with_streams()
    jump(rig, how)
    rig.run_for(DAY_MS - 10_000)
    assert rig.kept == {"a", "b", "forever"}
    rig.run_for(20_000)
    assert rig.kept == {"forever"}


@HOW
def test_streams_return_when_the_clock_is_corrected(how: str) -> None:
    rig = with_streams()
    jump(rig, how)
    assert rig.answers() == "404"
    rig.restart(START_MS + 10_000)
    assert (rig.answers("a"), rig.answers("b")) == ("ttl", "instant")
    assert rig.engine.clock_guard.jump is None
    rig.run_for(10_000)
    assert rig.kept == {"a", "b", "forever"}


@HOW
def test_hold_survives_restarts(how: str) -> None:
    rig = with_streams()
    jump(rig, how)
    for _ in range(3):
        rig.restart(rig.clock.at_ms + 60_000)
        rig.run_for(3000)
        assert rig.kept == {"a", "b", "forever"}
        assert rig.answers() == "404"
    rig.restart(START_MS + 10_000)
    assert rig.answers() == "ttl"


def test_second_jump_does_not_end_the_hold_of_the_first() -> None:
    rig = with_streams()
    jump(rig, "restart")
    jump(rig, "restart")
    jump(rig, "while running")
    assert rig.kept == {"a", "b", "forever"}
    rig.restart(START_MS + 10_000)
    assert rig.answers() == "ttl"


@HOW
def test_held_name_cannot_be_created_until_the_data_is_deleted(how: str) -> None:
    rig = with_streams()
    jump(rig, how)
    refused = rig.put("a", b"new")
    assert status(refused) == 409
    assert isinstance(refused[0], Refusal)
    assert "clock jumped" in refused[0].detail
    rig.confirm()
    rig.created("a", b"new")
    assert rig.answers() == "new"


@HOW
def test_streams_used_after_the_jump_expire_as_usual(how: str) -> None:
    rig = with_streams()
    jump(rig, how)
    rig.created("short", b"x", ttl_secs=2)
    rig.created("instant", b"x", expires_at_ms=rig.clock.at_ms + 2000)
    rig.run_for(5000)
    assert rig.kept == {"a", "b", "forever"}
    assert rig.engine.held_streams == 2


def test_stream_that_outlives_the_jump_is_held_when_it_expires_within_the_grace_time() -> None:
    rig = RestartableRig()
    rig.created("a", b"x", expires_at_ms=START_MS + 40 * DAY_MS + HOUR_MS)
    jump(rig, "restart")
    assert rig.answers() == "x"
    rig.run_for(2 * HOUR_MS)
    assert rig.answers() == "404"
    assert rig.kept == {"a"}


def test_small_clock_steps_are_followed_and_expire_streams() -> None:
    rig = RestartableRig()
    rig.created("a", ttl_secs=60)
    rig.clock.ahead_ms = HOUR_MS - 1
    rig.run_for(2000)
    assert rig.clock.ahead_ms == 0
    assert rig.kept == set()


def test_clock_set_back_is_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    rig = RestartableRig()
    rig.created("a", ttl_secs=60)
    rig.clock.ahead_ms = -DAY_MS
    rig.run_for(5000)
    assert rig.clock.at_ms == START_MS + 5000
    assert rig.engine.clock_guard.drift_ms == -DAY_MS
    assert sum("set back" in record.getMessage() for record in caplog.records) == 1


def test_downtime_below_the_jump_deletes_as_usual() -> None:
    rig = RestartableRig()
    rig.created("a", ttl_secs=60)
    rig.run_for(5000)
    rig.restart(rig.clock.at_ms + HOUR_MS // 2)
    rig.run_for(2000)
    assert rig.kept == set()


def test_idle_server_saves_the_time_so_that_a_restart_is_not_a_clock_jump() -> None:
    rig = RestartableRig()
    rig.created("a", ttl_secs=5 * 3600)
    for _ in range(10):
        rig.run_for(HOUR_MS)
        rig.read("a")
    rig.run_for(4 * HOUR_MS)
    assert DOCUMENT_KEY in rig.engine.catalog.documents
    rig.restart(rig.clock.at_ms + 1000)
    assert rig.engine.clock_guard.jump is None


def test_use_after_the_time_was_last_saved_is_before_the_jump() -> None:
    rig = RestartableRig()
    rig.run_for(HOUR_MS)
    rig.created("a", b"x", ttl_secs=60)
    rig.run_for(2000)
    rig.restart(rig.clock.at_ms + 40 * DAY_MS)
    rig.run_for(5000)
    assert rig.kept == {"a"}


def test_live_readers_of_a_held_stream_end() -> None:
    rig = with_streams()
    reader: Reader = rig.follow(rig.engine.look_up("b"))
    jump(rig, "while running")
    assert isinstance(reader.refusal, StreamNotFound)
    assert rig.kept == {"a", "b", "forever"}


def test_retention_by_age_is_held_back_after_a_jump() -> None:
    rig = RestartableRig(retention=RetentionRule(DAY_MS, 0, True))
    rig.created("a", b"kept")
    rig.run_for(5000)
    jump(rig, "restart")
    assert rig.answers() == "kept"
    rig.confirm()
    with pytest.raises(Refusal):
        rig.read("a")


@HOW
def test_guard_can_be_turned_off(how: str) -> None:
    rig = with_streams(JumpRule())
    jump(rig, how)
    assert rig.kept == {"forever"}


def test_unreadable_document_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    rig = RestartableRig()
    rig.backing.open().write([Committed(Document(DOCUMENT_KEY, b"not json"))])
    rig.restart(START_MS + 1000)
    assert "saved time" in caplog.text


def test_without_a_disk_a_jump_while_running_is_held_too() -> None:
    clock = ManualClock()
    scheduler = ManualScheduler(clock)
    rig = Rig(disk=False)
    engine = Engine(rig.storage, clock, scheduler, EngineLimits(), jumps=RULE)
    engine.start()
    engine.create(CreateRequest("a", TEXT, 60, None, False, b"x"), lambda _: None)
    clock.ahead_ms = DAY_MS
    scheduler.advance(3000)
    assert engine.held_streams == 1


# -- the sweeper's heap


def test_entries_of_deleted_streams_leave_the_heap() -> None:
    rig = Rig(disk=False)
    count = 4 * REBUILD_MAX
    for number in range(count):
        rig.put(f"n{number}", ttl_secs=30 * 24 * 3600)
        rig.delete(f"n{number}")
        if number % 500 == 0:
            rig.scheduler.advance(1000)
    rig.put("kept", ttl_secs=60)
    rig.scheduler.advance(5000)
    assert rig.engine._sweeper.entries <= 2 * STALE_MIN


def test_rebuilt_heap_loses_no_stream() -> None:
    rig = Rig(disk=False)
    for number in range(3 * REBUILD_MAX):
        rig.put(f"n{number}", ttl_secs=60 + number % 60)
    for number in range(0, 3 * REBUILD_MAX, 5):
        for other in range(number, number + 4):
            rig.delete(f"n{other}")
    rig.scheduler.advance(200)
    assert len(rig.engine.catalog) == 3 * REBUILD_MAX // 5
    rig.scheduler.advance(122_000)
    assert len(rig.engine.catalog) == 0
    assert rig.engine._sweeper.entries <= 2 * STALE_MIN
