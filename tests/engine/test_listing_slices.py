"""Listings check few streams in one iteration of the loop, also if almost none of them may be listed.

The timer of these tests counts calls, so the result does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.buckets import stream_name
from headwater.core.rules import CreateRequest
from headwater.engine.buckets import StreamPage
from headwater.engine.engine import Engine
from headwater.engine.stream_index import IndexPage
from tests.engine.rig import TEXT, Rig
from tests.engine.seams import ManualScheduler

BUCKET = "bucket"
STREAMS = 20_000
CHECKS_MAX = 5_000
"""Streams that are checked in one iteration: a check takes 2 microseconds, and the limit is 50 milliseconds."""


class Checks:
    """Counts how many streams were looked up, as the time of the scheduler: 2 microseconds each."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        seen = engine.seen

        def counted(name: str) -> Any:
            self.count += 1
            return seen(name)

        monkeypatch.setattr(engine, "seen", counted)
        monkeypatch.setattr(ManualScheduler, "timer_s", lambda _: self.count * 2e-6)


def most_in_one_tick(rig: Rig, checks: Checks, begin: Callable[[], None], until: Callable[[], object]) -> int:
    """The largest number of checks of one iteration, the one of the request included."""
    before = checks.count
    begin()
    most = checks.count - before
    for _ in range(10_000):
        if until():
            return most
        before = checks.count
        rig.scheduler.tick()
        most = max(most, checks.count - before)
    raise AssertionError("the listing does not end")


def held_streams(prefix: str, last: str) -> Rig:
    """Many expired streams that are not deleted yet, and one other stream after them."""
    rig = Rig(disk=False)
    rig.engine.buckets.create(BUCKET, lambda _: None)
    rig.scheduler.run_until_idle()
    for number in range(STREAMS):
        rig.engine.create(CreateRequest(f"{prefix}{number:05}", TEXT, 3600, None, False, b""), lambda _: None)
    rig.engine.create(CreateRequest(last, TEXT, None, None, False, b""), lambda _: None)
    rig.scheduler.run_until_idle()
    return rig


def expire(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the streams expire without deleting them, as after a clock jump."""
    monkeypatch.setattr(rig.engine.clock_guard, "holds", lambda _: True)
    rig.clock.at_ms += 3_600_000
    # All are found to be expired before the listing, which only finds them.
    while rig.engine.held_streams < STREAMS:
        rig.engine.expire_due()


def test_listing_of_a_bucket_skips_held_streams_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = held_streams(stream_name(BUCKET, ""), stream_name(BUCKET, "z"))
    expire(rig, monkeypatch)
    checks = Checks(rig.engine, monkeypatch)
    pages: list[Any] = []
    most = most_in_one_tick(
        rig, checks, lambda: rig.engine.buckets.page(BUCKET, "", None, 10, pages.append), lambda: pages
    )
    [page] = pages
    assert isinstance(page, StreamPage)
    assert [stream.name for stream in page.streams] == [stream_name(BUCKET, "z")]
    assert not page.has_more
    assert checks.count > STREAMS
    assert most <= CHECKS_MAX


def test_listing_of_all_streams_skips_held_streams_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = held_streams("held/", "z")
    built: list[object] = []
    rig.engine.index.page("", None, 10, built.append)
    rig.scheduler.run_until_idle()
    assert built
    expire(rig, monkeypatch)
    checks = Checks(rig.engine, monkeypatch)
    pages: list[Any] = []
    most = most_in_one_tick(rig, checks, lambda: rig.engine.index.page("", None, 10, pages.append), lambda: pages)
    [page] = pages
    assert isinstance(page, IndexPage)
    assert [stream.name for stream in page.streams] == ["z"]
    assert checks.count > STREAMS
    assert most <= CHECKS_MAX


def test_streams_created_and_deleted_during_a_sliced_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names before the place that the listing has reached are not found any more, later ones are."""
    rig = held_streams(stream_name(BUCKET, "m"), stream_name(BUCKET, "z"))
    expire(rig, monkeypatch)
    Checks(rig.engine, monkeypatch)
    pages: list[Any] = []
    rig.engine.buckets.page(BUCKET, "", None, 10, pages.append)
    assert not pages
    for stream_id in ("a", "y"):
        rig.engine.create(CreateRequest(stream_name(BUCKET, stream_id), TEXT, None, None, False, b""), lambda _: None)
    rig.engine.delete(stream_name(BUCKET, "z"), lambda _: None)
    for _ in range(10_000):
        rig.scheduler.tick()
    [page] = pages
    assert [stream.name for stream in page.streams] == [stream_name(BUCKET, "y")]
