"""Expiry: gone at once for whoever asks, gone from memory soon after, and a use in time keeps a stream (T-10, T-36)."""

from __future__ import annotations

import pytest

from headwater.core.errors import StreamNotFound
from headwater.engine.engine import TOUCH_SHARE, Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.sweeper import SWEEP_MAX
from tests.engine.rig import Reader, Rig, status
from tests.engine.seams import START_MS, JournalGround, ManualClock, ManualScheduler

DISK = pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])


def alive(rig: Rig, name: str = "a") -> bool:
    try:
        rig.engine.look_up(name)
    except StreamNotFound:
        return False
    return True


@DISK
def test_a_stream_is_gone_the_moment_its_window_is_over(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.there("a", b"x", ttl_secs=2)
    rig.clock.at_ms += 1999
    assert alive(rig)
    rig.clock.at_ms += 1
    assert not alive(rig)
    assert status(rig.post("a")) == 404
    assert status(rig.delete("a")) == 404


@DISK
def test_its_name_is_free_at_once(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.there("a", b"old", ttl_secs=2)
    rig.clock.at_ms += 2000
    rig.put("a", b"new")
    rig.scheduler.settle()
    assert rig.read("a") == b"new"


@DISK
def test_the_sweeper_frees_what_nobody_asks_for(disk: bool) -> None:
    rig = Rig(disk=disk)
    for number in range(5):
        rig.there(f"n{number}", b"x" * 10, ttl_secs=2)
    rig.there("kept", b"y")
    rig.scheduler.advance(3001)
    rig.scheduler.settle()
    assert set(rig.engine.catalog.by_name) == {"kept"}
    assert rig.engine.total_bytes == rig.engine.storage_usage().payload_bytes == 1
    assert rig.engine.metrics.expired == 5


@DISK
@pytest.mark.parametrize("use", ["read", "post"])
def test_a_use_in_time_keeps_a_stream(disk: bool, use: str) -> None:
    rig = Rig(disk=disk)
    rig.there("a", b"x", ttl_secs=2)
    for _ in range(5):
        rig.scheduler.advance(1500)
        rig.read("a") if use == "read" else rig.post("a")
        rig.scheduler.settle()
    assert alive(rig)
    rig.scheduler.advance(2000)
    assert not alive(rig)


@DISK
def test_a_look_at_metadata_a_refusal_and_a_repeated_put_keep_nothing(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.there("a", ttl_secs=2)
    rig.clock.at_ms += 1500
    rig.engine.look_up("a")
    assert status(rig.post("a", b"")) == 400
    assert status(rig.put("a", ttl_secs=2)) is None
    rig.clock.at_ms += 500
    assert not alive(rig)


@DISK
def test_an_instant_does_not_slide(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.there("a", expires_at_ms=START_MS + 2000)
    rig.clock.at_ms = START_MS + 1999
    rig.read("a")
    rig.post("a")
    rig.clock.at_ms = START_MS + 2000
    assert not alive(rig)


@DISK
@pytest.mark.parametrize("expiry", [{"ttl_secs": 0}, {"expires_at_ms": START_MS}, {"expires_at_ms": 0}])
def test_a_stream_that_is_over_when_it_begins_is_gone_at_once(disk: bool, expiry: dict[str, int]) -> None:
    rig = Rig(disk=disk)
    assert status(rig.put("a", b"", **expiry) or [None]) is None
    rig.scheduler.settle()
    assert not alive(rig)


def test_a_mass_expiry_is_taken_in_steps() -> None:
    rig = Rig(disk=False)
    for number in range(SWEEP_MAX + 10):
        rig.put(f"n{number}", ttl_secs=1)
    rig.put("kept")
    rig.clock.at_ms += 1000
    rig.engine.expire_due()
    assert len(rig.engine.catalog) == 11
    rig.scheduler.advance(1001)
    assert set(rig.engine.catalog.by_name) == {"kept"}


def test_reads_are_saved_once_per_share_of_the_window() -> None:
    rig = Rig()
    rig.there("a", ttl_secs=16)
    before = len(rig.storage.batches)
    for _ in range(4 * TOUCH_SHARE):
        rig.clock.at_ms += 250
        rig.read("a")
        rig.scheduler.settle()
    assert len(rig.storage.batches) - before == TOUCH_SHARE


def test_a_read_of_a_stream_without_a_window_writes_nothing() -> None:
    rig = Rig()
    rig.there("a")
    before = len(rig.storage.batches)
    rig.clock.at_ms += 10**9
    rig.read("a")
    rig.scheduler.settle()
    assert len(rig.storage.batches) == before


def test_a_restart_takes_no_window_away() -> None:
    """What was read and not saved is granted, and no more than a share of the window is given on top."""
    ground, clock = JournalGround(), ManualClock()
    rig = Rig()
    rig.storage._inner = ground.open()
    rig.there("a", ttl_secs=16)
    created_ms = rig.clock.at_ms
    rig.clock.at_ms += 900
    rig.read("a")
    rig.scheduler.settle()
    clock.at_ms = rig.clock.at_ms + 1
    engine = Engine(ground.open(), clock, ManualScheduler(clock), EngineLimits())
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
    stream = rig.there("a", ttl_secs=3)
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


def test_a_live_reader_does_not_hold_up_an_absolute_expiry() -> None:
    rig = Rig()
    reader = rig.follow(rig.there("a", expires_at_ms=rig.clock.at_ms + 3000))
    rig.scheduler.advance(4001)
    rig.scheduler.settle()
    assert reader.refusal is not None


def test_a_follower_that_only_waits_for_news_does_not_keep_a_stream_alive() -> None:
    """A subscription follows its streams for ever."""
    rig = Rig()
    stream = rig.there("a", ttl_secs=3)
    waiting = Reader(rig, stream, stream.tail)
    rig.engine.follow(stream, waiting, reading=False)
    rig.scheduler.advance(4001)
    rig.scheduler.settle()
    assert waiting.refusal is not None


def test_a_live_readers_window_survives_a_crash() -> None:
    """Its use is saved about once per window, so that readers find the stream again after a quick restart."""
    ground, clock = JournalGround(), ManualClock()
    rig = Rig()
    rig.storage._inner = ground.open()
    rig.follow(rig.there("a", ttl_secs=16))
    rig.scheduler.advance(100_000)
    rig.scheduler.settle()
    clock.at_ms = rig.clock.at_ms
    engine = Engine(ground.open(), clock, ManualScheduler(clock), EngineLimits())
    engine.start()
    assert engine.look_up("a").last_used_ms > clock.at_ms - 17_000


# -- forks


@DISK
def test_a_source_that_expires_keeps_its_bytes_for_its_forks(disk: bool) -> None:
    rig = Rig(disk=disk)
    rig.there("a", b"shared", ttl_secs=2)
    rig.there("b", b"own", source="a", ttl_secs=60)
    rig.scheduler.advance(4000)
    rig.scheduler.settle()
    assert status(rig.post("a")) == 410
    assert status(rig.put("a")) == 409
    assert rig.read("b") == b"sharedown"
    rig.delete("b")
    rig.scheduler.settle()
    assert len(rig.engine.catalog) == rig.engine.total_bytes == 0


@DISK
@pytest.mark.parametrize("reading", ["a", "b"])
def test_a_forks_window_is_its_own(disk: bool, reading: str) -> None:
    rig = Rig(disk=disk)
    rig.there("a", b"x", ttl_secs=2)
    rig.there("b", source="a")
    rig.scheduler.advance(1500)
    rig.read(reading)
    rig.scheduler.advance(1499)
    assert set(rig.engine.catalog.by_name) == ({"a", "b"} if reading == "b" else {"a"})
    assert rig.read(reading) == b"x"
