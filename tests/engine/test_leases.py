"""Writer leases on a manual clock: an expiry ends the stream once, also across a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.errors import (
    InvalidLease,
    LeaseHeld,
    LeaseNotFound,
    Refusal,
    StreamClosed,
    StreamNotFound,
    TooManyLeases,
)
from headwater.core.leases import LeaseTerms, encode_terms
from headwater.engine.leases import LEASE_PREFIX, RETRY_MS, LeaseView
from headwater.engine.quota import EngineLimits
from tests.engine.rig import Rig, status
from tests.engine.seams import JournalBacking, ManualTimer

DISK = pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
TTL_MS = 10_000


def terms(holder: str = "w1", **more: Any) -> LeaseTerms:
    return LeaseTerms(holder, more.pop("ttl_ms", TTL_MS), more.pop("final", b"lost"), **more)


def acquire(rig: Rig, wanted: LeaseTerms, *, take_over: bool = False) -> list[LeaseView | Refusal]:
    answers: list[LeaseView | Refusal] = []
    rig.engine.leases.acquire("a", wanted, take_over=take_over, done=answers.append)
    rig.scheduler.run_until_idle()
    return answers


def restart(rig: Rig) -> None:
    rig.engine.leases.stop()
    rig.open()


def documents(rig: Rig) -> list[str]:
    return [key for key in rig.engine.catalog.documents if key.startswith(LEASE_PREFIX)]


def pass_time(rig: Rig, milliseconds: int) -> None:
    rig.scheduler.advance(milliseconds)
    rig.scheduler.run_until_idle()


@DISK
def test_expired_lease_appends_its_message_and_closes_the_stream(disk: bool) -> None:
    rig = Rig(disk=disk)
    reader = rig.follow(rig.created("a", b"x"))
    [view] = acquire(rig, terms())
    assert view == LeaseView("w1", TTL_MS, TTL_MS)
    pass_time(rig, TTL_MS - 1)
    assert not rig.engine.look_up("a").durable_closed
    pass_time(rig, 2)
    assert rig.read("a") == b"xlost"
    assert reader.data == b"lost"
    assert reader.closed
    assert status(rig.post("a")) == 409
    assert (len(rig.engine.leases), rig.engine.leases.expired, documents(rig)) == (0, 1, [])
    with pytest.raises(StreamClosed):
        rig.engine.leases.renew("a", "w1")


def test_a_renewed_lease_lasts_for_its_full_time_again() -> None:
    rig = Rig()
    rig.created("a")
    acquire(rig, terms())
    for _ in range(5):
        pass_time(rig, TTL_MS - 1)
        assert rig.engine.leases.renew("a", "w1").expires_in_ms == TTL_MS
    pass_time(rig, TTL_MS + 1)
    assert rig.read("a") == b"lost"


def test_an_expired_lease_cannot_be_renewed_before_its_timer_fires() -> None:
    rig = Rig()
    rig.created("a")
    acquire(rig, terms())
    rig.clock.at_ms += TTL_MS
    with pytest.raises(LeaseHeld):
        rig.engine.leases.renew("a", "w1")
    rig.scheduler.run_until_idle()
    assert rig.read("a") == b"lost"
    pass_time(rig, TTL_MS)
    assert rig.read("a") == b"lost", "the timer that fires later changes nothing"


def test_a_released_lease_has_no_effect() -> None:
    rig = Rig()
    rig.created("a", b"x")
    acquire(rig, terms())
    rig.engine.leases.release("a", "w1", lambda _: None)
    rig.scheduler.run_until_idle()
    with pytest.raises(LeaseNotFound):
        rig.engine.leases.show("a")
    pass_time(rig, 2 * TTL_MS)
    assert rig.read("a") == b"x"
    assert documents(rig) == []


def test_replaced_lease_sets_no_more_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.created("a")
    acquire(rig, terms())
    pass_time(rig, 1000)
    acquire(rig, terms("w2", ttl_ms=3 * TTL_MS), take_over=True)
    pass_time(rig, TTL_MS)
    delays: list[float] = []
    later = rig.scheduler.later

    def counted(delay_s: float, callback: Callable[[], None]) -> ManualTimer:
        delays.append(delay_s)
        return later(delay_s, callback)

    monkeypatch.setattr(rig.scheduler, "later", counted)
    for _ in range(1000):
        pass_time(rig, 1)
    assert len(delays) < 20, "the first lease has expired, and is not checked in every iteration of the loop"


def test_other_writer_gets_a_held_lease_only_by_takeover() -> None:
    rig = Rig()
    rig.created("a")
    acquire(rig, terms())
    with pytest.raises(LeaseHeld):
        acquire(rig, terms("w2"))
    acquire(rig, terms("w2", final=b"second"), take_over=True)
    for refused in (rig.engine.leases.renew, lambda name, holder: rig.engine.leases.release(name, holder, print)):
        with pytest.raises(LeaseHeld):
            refused("a", "w1")
    assert rig.engine.leases.show("a").holder == "w2"
    pass_time(rig, TTL_MS + 1)
    assert rig.read("a") == b"second"


def test_the_holder_may_change_its_terms() -> None:
    rig = Rig()
    rig.created("a")
    acquire(rig, terms())
    acquire(rig, terms(ttl_ms=5 * TTL_MS, final=b"later"))
    pass_time(rig, 2 * TTL_MS)
    assert rig.read("a") == b""
    pass_time(rig, 3 * TTL_MS + 1)
    assert rig.read("a") == b"later"


def test_lease_does_not_change_a_stream_that_was_closed_or_deleted() -> None:
    rig = Rig()
    rig.created("a")
    acquire(rig, terms())
    rig.post("a", b"done", close=True)
    rig.scheduler.run_until_idle()
    with pytest.raises(LeaseNotFound):
        rig.engine.leases.show("a")
    pass_time(rig, TTL_MS + 1)
    assert rig.read("a") == b"done"
    rig.created("b")
    rig.engine.leases.acquire("b", terms(), take_over=False, done=lambda _: None)
    rig.delete("b")
    rig.scheduler.run_until_idle()
    rig.created("b", b"new")
    pass_time(rig, TTL_MS + 1)
    assert rig.read("b") == b"new", "the lease belonged to the stream that was deleted"
    assert documents(rig) == []


def test_without_close_the_producer_is_fenced_and_the_stream_stays_open() -> None:
    rig = Rig()
    rig.created("a")
    rig.post("a", b"x", ("p", 7, 0))
    acquire(rig, terms(close=False, producer_id="p"))
    pass_time(rig, TTL_MS + 1)
    assert rig.read("a") == b"xlost"
    assert status(rig.post("a", b"late", ("p", 7, 1))) == 403
    rig.post("a", b"next", ("p", 9, 0))
    rig.scheduler.run_until_idle()
    assert rig.read("a") == b"xlostnext"


def test_a_lease_survives_a_restart_and_lasts_for_its_full_time_again() -> None:
    rig = Rig()
    rig.created("a", b"x")
    acquire(rig, terms())
    pass_time(rig, TTL_MS - 1)
    restart(rig)
    pass_time(rig, TTL_MS - 1)
    assert rig.engine.leases.renew("a", "w1").expires_in_ms == TTL_MS
    pass_time(rig, TTL_MS + 1)
    assert rig.read("a") == b"xlost"
    restart(rig)
    assert (len(rig.engine.leases), documents(rig)) == (0, [])


@pytest.mark.parametrize("records", range(1, 4))
def test_lease_expiry_interrupted_by_a_crash_is_written_once(records: int) -> None:
    """Cut the journal after each record of an expiry: the fencing epoch, the message, the removal of the lease."""
    rig = Rig()
    rig.created("a")
    rig.post("a", b"x", ("p", 0, 0))
    acquire(rig, terms(close=False, producer_id="p"))
    assert isinstance(rig.backing, JournalBacking)
    before = len(rig.backing.journal)
    pass_time(rig, TTL_MS + 1)
    assert len(rig.backing.journal) == before + 3
    del rig.backing.journal[before + records :]
    restart(rig)
    pass_time(rig, TTL_MS + 1)
    assert rig.read("a") == b"xlost"
    assert documents(rig) == []


def test_expiry_does_not_affect_a_writer_with_a_newer_epoch() -> None:
    rig = Rig()
    rig.created("a")
    rig.post("a", b"x", ("p", 0, 0))
    acquire(rig, terms(producer_id="p"))
    key = rig.engine.leases._by_stream[rig.engine.look_up("a").id].key
    rig.engine.put_document(key, encode_terms(terms(producer_id="p", epoch=1)), None, None)
    rig.post("a", b"y", ("p", 5, 0))
    rig.scheduler.run_until_idle()
    pass_time(rig, TTL_MS + 1)
    assert rig.read("a") == b"xy"
    assert not rig.engine.look_up("a").durable_closed


def test_lease_expiry_is_retried_when_storage_refuses_it() -> None:
    rig = Rig(disk=False, limits=EngineLimits(max_total_bytes=8_000))
    rig.created("a")
    rig.created("b")
    acquire(rig, terms(final=b"lost" * 100))
    taken = 8_000 - rig.engine.quota.content_bytes - rig.engine.quota.metadata_bytes - 10
    rig.post("b", b"x" * taken)
    rig.scheduler.run_until_idle()
    pass_time(rig, TTL_MS + 1)
    assert not rig.engine.look_up("a").durable_closed
    rig.delete("b")
    rig.scheduler.run_until_idle()
    pass_time(rig, RETRY_MS + 1)
    assert rig.read("a") == b"lost" * 100
    assert rig.engine.look_up("a").durable_closed


def test_many_leases_that_expire_at_once_are_ended_in_slices() -> None:
    rig = Rig(disk=False)
    for number in range(3000):
        rig.put(f"s{number}")
        rig.scheduler.run_until_idle()
        rig.engine.leases.acquire(f"s{number}", terms(), take_over=False, done=lambda _: None)
    rig.scheduler.run_until_idle()
    rig.scheduler.advance(TTL_MS + 1)
    rig.scheduler.tick()
    assert rig.engine.leases.expired < 3000
    rig.scheduler.run_until_idle()
    assert rig.engine.leases.expired == 3000


def test_leases_are_limited() -> None:
    rig = Rig(limits=EngineLimits(max_leases=1))
    rig.created("a")
    rig.created("b")
    acquire(rig, terms())
    acquire(rig, terms())
    with pytest.raises(TooManyLeases):
        rig.engine.leases.acquire("b", terms(), take_over=False, done=print)


@pytest.mark.parametrize(
    "wrong",
    [
        terms(""),
        terms("x" * 257),
        terms("a\nb"),
        terms(ttl_ms=999),
        terms(ttl_ms=3_600_001),
        terms(producer_id=""),
        terms(producer_id="p" * 1025),
        terms(close=False),
        terms(close=False, final=b"", producer_id="p"),
    ],
    ids=["no-holder", "long-holder", "control", "short", "long", "no-id", "long-id", "unfenced", "no-effect"],
)
def test_lease_terms_that_cannot_be_applied_are_refused(wrong: LeaseTerms) -> None:
    rig = Rig()
    rig.created("a")
    with pytest.raises(InvalidLease):
        acquire(rig, wrong)


def test_only_an_open_stream_has_a_lease() -> None:
    rig = Rig()
    with pytest.raises(StreamNotFound):
        acquire(rig, terms())
    rig.created("a", closed=True)
    with pytest.raises(StreamClosed):
        acquire(rig, terms())


@DISK
def test_last_message_is_in_memory_once(disk: bool) -> None:
    """It may have 64 KiB, and there may be 10,000 leases; the limit on memory counts it in its document."""
    rig = Rig(disk=disk)
    stream = rig.created("a")
    final = b"f" * 60_000
    acquire(rig, terms(final=final))
    assert rig.engine.leases._by_stream[stream.id].terms.final == b""
    pass_time(rig, TTL_MS)
    assert rig.read("a") == final
