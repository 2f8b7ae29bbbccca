"""The last changes of streams: searches find what a plain list finds, also while streams change."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.engine import change_log
from headwater.engine.change_log import ChangeLog, ChangeSearch

NAMES = [f"{prefix}{number}" for prefix in "ab" for number in range(6)]
names = st.sampled_from(NAMES)


@pytest.fixture(autouse=True)
def _small_blocks_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "_BLOCK", 4)
    monkeypatch.setattr(change_log, "STEP_CHANGES", 3)


def wanted(name: str) -> bool:
    return name.startswith("a")


def last_changes(changed: list[str]) -> dict[str, int]:
    """The number of the last change of each stream, in ascending order."""
    found: dict[str, int] = {}
    for number, name in enumerate(changed, 1):
        found.pop(name, None)
        found[name] = number
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(names, max_size=60), st.integers(1, 12), st.integers(1, 8), st.data())
def test_search_finds_the_first_streams_that_changed_after_a_number(
    changed: list[str], most: int, limit: int, data: st.DataObject
) -> None:
    log = ChangeLog(most)
    for name in changed:
        log.add(name)
    kept = list(last_changes(changed).items())[-most:]
    assert log.count == len(changed)
    assert [(number, name) for name, number in kept] == list(log.after(0))
    since = data.draw(st.integers(log.floor, log.count))
    search = ChangeSearch(log, since, limit, wanted)
    for _ in search.steps():
        pass
    assert search.is_complete
    matching = [(name, number) for name, number in kept if number > since and wanted(name)]
    assert list(search.found.items()) == matching[:limit]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(names, min_size=1, max_size=30), st.lists(st.lists(names, max_size=8), max_size=8), st.integers(1, 20))
def test_search_during_changes_misses_none_up_to_the_last_that_it_found(
    changed: list[str], meanwhile: list[list[str]], limit: int
) -> None:
    log = ChangeLog(8)
    for name in changed:
        log.add(name)
    since = log.floor
    all_changes = list(changed)
    search = ChangeSearch(log, since, limit, wanted)
    steps = search.steps()
    for step in meanwhile:
        if not list(islice(steps, 1)):
            break
        for name in step:
            log.add(name)
            all_changes.append(name)
    for _ in steps:
        pass
    numbers = list(search.found.values())
    assert numbers == sorted(numbers)
    if not search.is_complete:
        return
    until = numbers[-1] if len(numbers) == limit else log.count
    for name, number in last_changes(all_changes).items():
        if since < number <= until and wanted(name):
            assert search.found[name] == number


def test_search_that_changes_overtake_is_not_complete() -> None:
    log = ChangeLog(8)
    for number in range(8):
        log.add(f"b{number}")
    search = ChangeSearch(log, 0, 1, wanted)
    steps = search.steps()
    next(steps)
    for number in range(8):
        log.add(f"c{number}")
    assert list(steps) == []
    assert not search.is_complete


def test_space_of_earlier_changes_is_freed() -> None:
    """One stream of each block is left, and the blocks are as small as that."""
    log = ChangeLog(100_000)
    for number in range(1_000):
        log.add("busy")
        log.add("busy")
        log.add("busy")
        log.add(f"once-{number}")
    assert len(list(log.after(0))) == 1_001
    assert len(log._blocks) <= 1_002
