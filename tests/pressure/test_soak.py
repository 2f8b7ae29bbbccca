"""Under steady load nothing grows, and idle connections cost little."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pressure import evidence, many_connections, soak

READER_COST_MIB = 2.0
"""The memory that a reader that never reads may cost: its response in progress and its socket buffers."""


def samples(**growth: float) -> list[dict[str, float]]:
    """One hour of samples, one per minute, with these metrics growing by so much per minute."""
    flat = {"rss_mib": 60.0, "descriptors": 40.0, "cpu_ms": 0.3, "p50_ms": 3.0, "p99_ms": 20.0}
    flat |= {"echo_p50_ms": 1.0, "echo_p99_ms": 10.0}
    return [
        {"minute": float(minute), **{key: value + growth.get(key, 0.0) * minute for key, value in flat.items()}}
        for minute in range(60)
    ]


def test_steady_numbers_do_not_count_as_growth() -> None:
    assert soak.judge(samples())[1] == []
    assert soak.judge(samples(rss_mib=0.05, descriptors=0.1, p50_ms=0.01))[1] == []


def test_slower_machine_does_not_count_as_growth() -> None:
    assert soak.judge(samples(p50_ms=3.0, echo_p50_ms=1.0, p99_ms=20.0, echo_p99_ms=10.0))[1] == []
    assert len(soak.judge(samples(p50_ms=1.0, echo_p50_ms=0.05))[1]) == 1


@pytest.mark.parametrize(
    ("number", "per_minute"),
    [("rss_mib", 0.5), ("descriptors", 0.5), ("cpu_ms", 0.01), ("p50_ms", 0.1), ("p99_ms", 2.0)],
)
def test_growing_metric_is_reported(number: str, per_minute: float) -> None:
    found, growing = soak.judge(samples(**{number: per_minute}))
    assert len(growing) == 1
    assert growing[0].startswith(number.removesuffix("_ms"))
    assert found[number]["per_minute"] == pytest.approx(per_minute, rel=0.01)


def test_short_soak_leaks_no_descriptors() -> None:
    found = soak.run(0.08)
    assert found["cycles"] > 0
    assert found["polls"] > 0
    assert found["events"] > 0
    assert found["numbers"]["descriptors"]["growth"] <= soak.DESCRIPTORS_MAX, found


@pytest.mark.long
def test_soak_detects_a_leak() -> None:
    growing = soak.run(0.08, program=("tests.pressure.faults", "leaks_with_every_append"))["growing"]
    assert any(each.startswith("rss_mib") for each in growing), growing
    assert any(each.startswith("descriptors") for each in growing), growing


@pytest.mark.long
def test_soak_detects_a_slowdown() -> None:
    growing = soak.run(0.12, program=("tests.pressure.faults", "slows_with_every_append"))["growing"]
    assert any(each.startswith("cpu_ms") for each in growing), growing


def test_slopes_of_a_soak_are_kept_when_one_of_them_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, growing = soak.judge(samples(rss_mib=0.5))
    monkeypatch.setattr(soak, "run", lambda *_: {"minutes": 60, "numbers": numbers, "growing": growing})
    entry = evidence.run("soak", 60, 1, "file-durable")
    assert "rss_mib grew" in entry["found"][0]
    assert entry["counts"]["numbers"] == numbers


def judge_silent_readers(program: tuple[str, ...], readers: int = 100) -> None:
    found = many_connections.silent_readers(readers, rounds=50, program=program)
    assert found["during_mib"] - found["before_mib"] < readers * READER_COST_MIB, found
    assert found["after_mib"] - found["before_mib"] < 20, f"memory is not returned: {found}"


def test_readers_that_never_read_cost_bounded_memory(long: bool) -> None:
    judge_silent_readers(("headwater",), 100 if long else 30)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["buffers_for_silent_readers", "keeps_freed_memory"])
def test_memory_kept_for_silent_readers_is_detected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_connections, "PATIENCE_S", 8.0)
    monkeypatch.setattr(many_connections, "RETURN_S", 4.0)
    with pytest.raises(AssertionError):
        judge_silent_readers(("tests.pressure.faults", fault))


def test_idle_connections_cost_a_few_kilobytes_each(long: bool) -> None:
    found = judge_idle_connections(10_000 if long else 500, ("headwater",))
    if long:
        assert found["kib_per_connection"] < 3, found
        assert found["after_second_mib"] < found["after_mib"] + 3, "a second crowd needs no more memory"


def test_expensive_connections_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_connections, "RETURN_S", 1.0)
    with pytest.raises(AssertionError):
        judge_idle_connections(500, ("tests.pressure.faults", "keeps_something_for_every_connection"))


def judge_idle_connections(count: int, program: tuple[str, ...]) -> dict[str, Any]:
    found = many_connections.idle_connections(count, rounds=50, program=program)
    assert found["kib_per_connection"] < 40.0, found
    return found
