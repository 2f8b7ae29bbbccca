"""While storage is busy, large appends wait for a limited time, small ones are refused, and maintenance continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headwater.core.errors import StorageBusy, StorageFull, StreamNotFound
from headwater.core.rules import AppendOutcome
from headwater.engine.waiting_appends import ADMITTED_BYTES, INTERVAL_S, WAIT_S, WAITS_FROM_BYTES
from tests.engine.rig import TEXT, Rig, appended

CALLBACKS_MAY_FAIL = True
LARGE = b"x" * WAITS_FROM_BYTES
INTERVAL_MS = int(INTERVAL_S * 1000)


class BusyRig(Rig):
    """An engine whose storage is busy until the test says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.created("a")
        self.is_busy = True
        self.maintained = 0
        monkeypatch.setattr(self.storage, "busy", lambda: "Data arrives too fast." if self.is_busy else None)
        monkeypatch.setattr(self.storage, "maintain", self._maintain)

    def _maintain(self, image_of: object) -> None:
        self.maintained += 1

    def post_plain(self, name: str, body: bytes) -> list[object]:
        def append(done: Callable[[Any], None]) -> None:
            assert self.engine.append_plain(name, TEXT, body, done) is None

        return self._asked(append)

    def pass_time(self, milliseconds: int) -> None:
        self.scheduler.advance(milliseconds)
        self.scheduler.run_until_idle()


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> BusyRig:
    return BusyRig(monkeypatch)


@pytest.mark.parametrize("plain", [False, True])
def test_large_append_waits_until_storage_has_space(rig: BusyRig, plain: bool) -> None:
    answers = rig.post_plain("a", LARGE) if plain else rig.post("a", LARGE, ("p", 0, 0))
    rig.pass_time(1000)
    assert not answers
    busy_while_waiting = not rig.engine.idle
    assert rig.engine.look_up("a").message_index == 0
    rig.is_busy = False
    rig.pass_time(INTERVAL_MS)
    assert appended(answers).outcome is AppendOutcome.ACCEPTED
    assert (busy_while_waiting, rig.engine.idle) == (True, True)
    assert rig.read("a") == LARGE


@pytest.mark.parametrize("plain", [False, True])
def test_small_append_is_refused_at_once(rig: BusyRig, plain: bool) -> None:
    [refusal] = rig.post_plain("a", LARGE[1:]) if plain else rig.post("a", LARGE[1:])
    assert isinstance(refusal, StorageBusy)


def test_append_that_has_waited_too_long_is_refused(rig: BusyRig) -> None:
    answers = rig.post("a", LARGE)
    rig.pass_time(int(WAIT_S * 1000) - 100)
    assert not answers
    rig.pass_time(200)
    [refusal] = answers
    assert isinstance(refusal, StorageBusy)
    assert refusal.headers == (("Retry-After", "1"),)
    rig.is_busy = False
    rig.pass_time(1000)
    assert rig.read("a") == b""


def test_maintenance_continues_every_few_milliseconds_while_writes_are_refused(rig: BusyRig) -> None:
    """It used to continue with commits and once a second only, so nothing was written for seconds."""
    rig.post("a", b"small")
    before = rig.maintained
    rig.pass_time(100)
    assert rig.maintained - before >= 100 // INTERVAL_MS - 1
    rig.is_busy = False
    rig.pass_time(INTERVAL_MS)
    before = rig.maintained
    rig.pass_time(100)
    assert rig.maintained == before


def test_limited_number_of_bytes_is_admitted_together(rig: BusyRig) -> None:
    body = b"y" * (ADMITTED_BYTES // 4)
    answers = [rig.post("a", body) for _ in range(6)]
    rig.is_busy = False
    rig.pass_time(INTERVAL_MS)
    assert [len(each) for each in answers] == [1, 1, 1, 1, 0, 0]
    rig.pass_time(INTERVAL_MS)
    assert [len(each) for each in answers] == [1] * 6


def test_duplicate_that_waits_too_is_not_appended(rig: BusyRig) -> None:
    answers = [rig.post("a", LARGE, ("p", 0, 0)) for _ in range(2)]
    rig.is_busy = False
    rig.pass_time(INTERVAL_MS)
    assert [appended(each).outcome for each in answers] == [AppendOutcome.ACCEPTED, AppendOutcome.DUPLICATE]
    assert rig.read("a") == LARGE


def test_append_to_a_stream_that_was_deleted_meanwhile_is_refused(rig: BusyRig) -> None:
    answers = rig.post("a", LARGE)
    rig.delete("a")
    rig.scheduler.run_until_idle()
    rig.is_busy = False
    rig.pass_time(INTERVAL_MS)
    assert isinstance(answers[0], StreamNotFound)


def test_append_is_refused_when_the_disk_is_full_after_the_wait(rig: BusyRig, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = rig.post("a", LARGE)
    monkeypatch.setattr(rig.storage, "refusal", lambda: "The disk is full.")
    rig.is_busy = False
    rig.pass_time(INTERVAL_MS)
    assert isinstance(answers[0], StorageFull)


def test_failure_of_one_append_is_reported_and_does_not_affect_the_next(
    rig: BusyRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [rig.post("a", LARGE) for _ in range(2)]
    append = rig.engine._committer.submit
    calls = 0

    def fails_once(*arguments: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("the test made this fail")
        append(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.engine._committer, "submit", fails_once)
    rig.is_busy = False
    rig.pass_time(INTERVAL_MS)
    assert isinstance(answers[0][0], StorageBusy)
    assert appended(answers[1]).outcome is AppendOutcome.ACCEPTED
