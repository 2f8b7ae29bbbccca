"""Listings check few streams in one iteration of the loop, also if almost none of them may be listed.

The timer of these tests counts calls, so the result does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest

from headwater.core.buckets import stream_name
from headwater.core.rules import CreateRequest
from headwater.engine import stream_index
from headwater.engine.buckets import StreamPage
from headwater.engine.engine import Engine
from headwater.engine.stream_index import IndexPage
from tests.engine.rig import TEXT, Rig
from tests.engine.seams import ManualScheduler

BUCKET = "bucket"
STREAMS = 20_000
CHECKS_MAX = 5_000
"""Streams that are checked in one iteration: a check takes 2 microseconds, and the limit is 50 milliseconds."""


class Counter(Protocol):
    count: int


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


def most_in_one_tick(rig: Rig, checks: Counter, begin: Callable[[], None], until: Callable[[], object]) -> int:
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


class Matches:
    """Counts how many changed streams are compared with a prefix, and takes 2 microseconds for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        matches = stream_index._matches

        def counted(name: str, prefix: str) -> bool:
            self.count += 1
            return matches(name, prefix)

        monkeypatch.setattr(stream_index, "_matches", counted)
        monkeypatch.setattr(ManualScheduler, "timer_s", lambda _: self.count * 2e-6)


class Waiter:
    """A request that waits for changes."""

    def __init__(self, rig: Rig, prefix: str, on_woken: Callable[[], None]) -> None:
        self._rig = rig
        self._on_woken = on_woken
        self.prefix = prefix
        self.pages: list[Any] = []

    def wake(self, cursor: str) -> None:
        self._on_woken()
        self._rig.engine.index.changes(self.prefix, cursor, 10, self.pages.append)


def changed_streams(prefix: str) -> tuple[Rig, str]:
    """Many streams that changed after a cursor."""
    rig = Rig(disk=False)
    pages: list[Any] = []
    rig.engine.index.changes("", None, 10, pages.append)
    rig.scheduler.run_until_idle()
    for number in range(STREAMS):
        rig.put(f"{prefix}{number:05}")
    rig.scheduler.run_until_idle()
    return rig, pages[0].cursor


def test_page_of_changes_costs_its_limit_and_not_the_number_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cursor = changed_streams("a/")
    matches = Matches(monkeypatch)
    names: list[str] = []
    for _ in range(10):
        pages: list[Any] = []
        rig.engine.index.changes("", cursor, 10, pages.append)
        [page] = pages
        assert page.has_more
        names += [change.name for change in page.changes]
        cursor = page.cursor
    assert names == [f"a/{number:05}" for number in range(100)]
    assert matches.count <= 10 * 11


def test_search_for_changes_skips_other_prefixes_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, cursor = changed_streams("a/")
    rig.put("b/1")
    matches = Matches(monkeypatch)
    pages: list[Any] = []
    most = most_in_one_tick(
        rig, matches, lambda: rig.engine.index.changes("b/", cursor, 10, pages.append), lambda: pages
    )
    [page] = pages
    assert [change.name for change in page.changes] == ["b/1"]
    assert not page.has_more
    assert matches.count > STREAMS
    assert most <= CHECKS_MAX


def test_changes_compare_few_waiters_with_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiters with one prefix are compared once, not with each of the changed streams."""
    rig, _ = changed_streams("a/")
    matches = Matches(monkeypatch)
    for _ in range(3_000):
        rig.engine.index.wait(Waiter(rig, "b/", lambda: pytest.fail("woken without a change")))

    def change() -> None:
        for number in range(1_000):
            rig.post(f"a/{number:05}")

    assert most_in_one_tick(rig, matches, change, lambda: rig.scheduler.quiet) <= CHECKS_MAX


def test_many_waiters_are_woken_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them renders a response, which takes about 30 microseconds. A change during the waking wakes them too."""
    rig, _ = changed_streams("a/")
    woken = 0

    def count() -> None:
        nonlocal woken
        woken += 1

    monkeypatch.setattr(ManualScheduler, "timer_s", lambda _: woken * 30e-6)
    waiters = [Waiter(rig, "a/", count) for _ in range(2_000)] + [Waiter(rig, "b/", count) for _ in range(1_000)]
    for waiter in waiters:
        rig.engine.index.wait(waiter)
    rig.post("a/00001")
    most = 0
    for tick in range(10_000):
        before = woken
        rig.scheduler.tick()
        if tick == 2:
            rig.put("b/1")
        most = max(most, woken - before)
    assert most <= 1_000
    assert woken == len(waiters)
    for waiter in waiters:
        [page] = waiter.pages
        assert [change.name for change in page.changes] == ["a/00001" if waiter.prefix == "a/" else "b/1"]
