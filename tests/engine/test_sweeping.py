"""Expiry: 404 for every client at once, freed soon after, and a read in time extends the TTL (T-10, T-36)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from headwater.core.errors import StreamNotFound
from headwater.engine import sweeper
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.stream import LiveStream
from headwater.engine.stream_uses import TOUCH_SHARE
from headwater.engine.sweeper import SWEEP_MAX
from tests.engine.rig import Reader, Rig, status
from tests.engine.seams import START_MS, JournalBacking, ManualClock, ManualScheduler

CALLBACKS_MAY_FAIL = True
DISK = pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])


def alive(rig: Rig, name: str = "a") -> bool:
    try:
        rig.engine.look_up(name)
    except StreamNotFound:
        return False
    return True


@DISK
def test_stream_is_404_as_soon_as_its_window_ends(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.created("a", b"x", ttl_secs=2)
    rig.clock.at_ms += 1999
    assert alive(rig)
    rig.clock.at_ms += 1
    assert not alive(rig)
    assert status(rig.post("a")) == 404
    assert status(rig.delete("a")) == 404


@DISK
def test_name_of_an_expired_stream_is_free_at_once(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.created("a", b"old", ttl_secs=2)
    rig.clock.at_ms += 2000
    rig.put("a", b"new")
    rig.scheduler.run_until_idle()
    assert rig.read("a") == b"new"


@DISK
def test_sweeper_frees_expired_streams_without_a_request(disk: bool) -> None:
    rig = Rig(disk=disk)
    for number in range(5):
        rig.created(f"n{number}", b"x" * 10, ttl_secs=2)
    rig.created("kept", b"y")
    rig.scheduler.advance(3001)
    rig.scheduler.run_until_idle()
    assert set(rig.engine.catalog.by_name) == {"kept"}
    assert rig.engine.total_bytes == rig.engine.storage_usage().payload_bytes == 1
    assert rig.engine.metrics.expired == 5


@DISK
@pytest.mark.parametrize("use", ["read", "post"])
def test_read_within_the_window_extends_the_ttl(disk: bool, use: str) -> None:
    rig = Rig(disk=disk)
    rig.created("a", b"x", ttl_secs=2)
    for _ in range(5):
        rig.scheduler.advance(1500)
        rig.read("a") if use == "read" else rig.post("a")
        rig.scheduler.run_until_idle()
    assert alive(rig)
    rig.scheduler.advance(2000)
    assert not alive(rig)


@DISK
def test_head_refusals_and_repeated_puts_do_not_extend_the_ttl(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.created("a", ttl_secs=2)
    rig.clock.at_ms += 1500
    rig.engine.look_up("a")
    assert status(rig.post("a", b"")) == 400
    assert status(rig.put("a", ttl_secs=2)) is None
    rig.clock.at_ms += 500
    assert not alive(rig)


@DISK
def test_absolute_expiry_is_not_extended(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.created("a", expires_at_ms=START_MS + 2000)
    rig.clock.at_ms = START_MS + 1999
    rig.read("a")
    rig.post("a")
    rig.clock.at_ms = START_MS + 2000
    assert not alive(rig)


@DISK
@pytest.mark.parametrize("expiry", [{"ttl_secs": 0}, {"expires_at_ms": START_MS}, {"expires_at_ms": 0}])
def test_stream_created_with_a_past_deadline_is_gone_at_once(disk: bool, expiry: dict[str, int]) -> None:
    rig = Rig(disk=disk)
    assert status(rig.put("a", b"", **expiry) or [None]) is None
    rig.scheduler.run_until_idle()
    assert not alive(rig)


def test_mass_expiry_runs_in_slices() -> None:
    rig = Rig(disk=False)
    for number in range(SWEEP_MAX + 10):
        rig.put(f"n{number}", ttl_secs=1)
    rig.put("kept")
    rig.clock.at_ms += 1000
    rig.engine.expire_due()
    assert len(rig.engine.catalog) == 11
    rig.scheduler.advance(1001)
    assert set(rig.engine.catalog.by_name) == {"kept"}


def test_tick_either_sweeps_or_rebuilds_the_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several milliseconds; together they would block the event loop for longer than a slice."""
    monkeypatch.setattr(sweeper, "STALE_MIN", 10)
    monkeypatch.setattr(sweeper, "SWEEP_MAX", 10)
    rig = Rig(disk=False)
    for number in range(100):
        rig.put(f"n{number}", ttl_secs=1)
    for number in range(100):
        rig.put(f"deleted{number}", ttl_secs=1000)
    for number in range(70):
        rig.delete(f"deleted{number}")
    swept = rig.engine._sweeper
    steps: list[str] = []
    for name in ("sweep", "_put_back_released", "_rebuild"):
        monkeypatch.setattr(swept, name, partial(record, steps, name, getattr(swept, name)))
    rig.clock.at_ms += 1000
    swept._tick()
    while steps[-1] == "sweep":
        assert steps == ["sweep"] * len(steps)
        swept._tick()
    assert len(steps) > 10
    assert set(rig.engine.catalog.by_name) == {f"deleted{number}" for number in range(70, 100)}
    assert swept.entries == 30


def record(steps: list[str], name: str, step: Callable[..., bool], *arguments: float) -> bool:
    steps.append(name)
    return step(*arguments)


def test_reads_are_saved_once_per_share_of_the_window() -> None:
    rig = Rig()
    rig.created("a", ttl_secs=16)
    before = len(rig.storage.batches)
    for _ in range(4 * TOUCH_SHARE):
        rig.clock.at_ms += 250
        rig.read("a")
        rig.scheduler.run_until_idle()
    assert len(rig.storage.batches) - before == TOUCH_SHARE


def test_a_read_of_a_stream_without_a_window_writes_nothing() -> None:
    rig = Rig()
    rig.created("a")
    before = len(rig.storage.batches)
    rig.clock.at_ms += 10**9
    rig.read("a")
    rig.scheduler.run_until_idle()
    assert len(rig.storage.batches) == before


def test_restart_does_not_shorten_a_ttl_window() -> None:
    """Reads that were not saved still count, and extend the window by at most a share of it."""
    backing, clock = JournalBacking(), ManualClock()
    rig = Rig()
    rig.storage._inner = backing.open()
    rig.created("a", ttl_secs=16)
    created_ms = rig.clock.at_ms
    rig.clock.at_ms += 900
    rig.read("a")
    rig.scheduler.run_until_idle()
    clock.at_ms = rig.clock.at_ms + 1
    engine = Engine(backing.open(), clock, ManualScheduler(clock), EngineLimits())
    engine.start()
    window_ms = 16_000
    clock.at_ms = created_ms + 900 + window_ms - 1
    engine.look_up("a")
    clock.at_ms = created_ms + 900 + window_ms + window_ms // TOUCH_SHARE
    with pytest.raises(StreamNotFound):
        engine.look_up("a")


# -- live readers


@DISK
def test_a_live_reader_keeps_a_sliding_window_open_until_it_leaves(disk: bool) -> None:
    rig = Rig(disk=disk)
    stream = rig.created("a", ttl_secs=3)
    reader, other = rig.follow(stream), rig.follow(stream)
    rig.scheduler.advance(10_000)
    rig.engine.unfollow(stream, other)
    rig.scheduler.advance(10_000)
    assert rig.engine.look_up("a") is stream
    assert reader.refusal is None
    rig.engine.unfollow(stream, reader)
    rig.scheduler.advance(2999)
    assert rig.engine.look_up("a") is stream
    rig.scheduler.advance(2001)
    with pytest.raises(StreamNotFound):
        rig.engine.look_up("a")


def test_live_reader_does_not_delay_an_absolute_expiry() -> None:
    rig = Rig()
    reader = rig.follow(rig.created("a", expires_at_ms=rig.clock.at_ms + 3000))
    rig.scheduler.advance(4001)
    rig.scheduler.run_until_idle()
    assert reader.refusal is not None


def test_subscription_follower_does_not_extend_the_ttl() -> None:
    """A subscription follows its streams without end."""
    rig = Rig()
    stream = rig.created("a", ttl_secs=3)
    waiting = Reader(rig, stream, stream.tail)
    rig.engine.follow(stream, waiting, reading=False)
    rig.scheduler.advance(4001)
    rig.scheduler.run_until_idle()
    assert waiting.refusal is not None


def test_a_live_readers_window_survives_a_crash() -> None:
    """The read time is saved about once per window, so that the stream still exists after a quick restart."""
    backing, clock = JournalBacking(), ManualClock()
    rig = Rig()
    rig.storage._inner = backing.open()
    rig.follow(rig.created("a", ttl_secs=16))
    rig.scheduler.advance(100_000)
    rig.scheduler.run_until_idle()
    clock.at_ms = rig.clock.at_ms
    engine = Engine(backing.open(), clock, ManualScheduler(clock), EngineLimits())
    engine.start()
    assert engine.look_up("a").last_used_ms > clock.at_ms - 17_000


# -- forks


@DISK
def test_a_source_that_expires_keeps_its_bytes_for_its_forks(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.created("a", b"shared", ttl_secs=2)
    rig.created("b", b"own", source="a", ttl_secs=60)
    rig.scheduler.advance(4000)
    rig.scheduler.run_until_idle()
    assert status(rig.post("a")) == 410
    assert status(rig.put("a")) == 409
    assert rig.read("b") == b"sharedown"
    rig.delete("b")
    rig.scheduler.run_until_idle()
    assert len(rig.engine.catalog) == rig.engine.total_bytes == 0


@DISK
@pytest.mark.parametrize("reading", ["a", "b"])
def test_fork_has_its_own_ttl_window(disk: bool, reading: str) -> None:
    rig = Rig(disk=disk)
    rig.created("a", b"x", ttl_secs=2)
    rig.created("b", source="a")
    rig.scheduler.advance(1500)
    rig.read(reading)
    rig.scheduler.advance(1499)
    assert set(rig.engine.catalog.by_name) == ({"a", "b"} if reading == "b" else {"a"})
    assert rig.read(reading) == b"x"


def test_expiry_that_fails_is_repeated_and_does_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for name in "abc":
        rig.created(name, b"x", ttl_secs=2)
    expire = rig.engine._sweeper._expire
    failed: list[str] = []

    def fails_once(stream: LiveStream) -> bool:
        if stream.name == "a" and not failed:
            failed.append(stream.name)
            raise OSError("the test made this fail")
        return expire(stream)

    monkeypatch.setattr(rig.engine._sweeper, "_expire", fails_once)
    rig.scheduler.advance(5000)
    rig.scheduler.run_until_idle()
    assert failed == ["a"]
    assert set(rig.engine.catalog.by_name) == {"a"}
    rig.scheduler.advance(sweeper.RETRY_MS + 2000)
    rig.scheduler.run_until_idle()
    assert not rig.engine.catalog.by_name


def test_maintenance_continues_after_a_report_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    maintained = 0

    def maintain(image_of: object) -> None:
        nonlocal maintained
        maintained += 1

    def fail() -> None:
        raise OSError("the test made this fail")

    monkeypatch.setattr(rig.storage, "maintain", maintain)
    monkeypatch.setattr(rig.engine._gate, "report", fail)
    rig.scheduler.advance(5000)
    assert maintained >= 4
