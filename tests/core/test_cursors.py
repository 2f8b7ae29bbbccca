"""Cursors always advance, regardless of the cursor of the client (protocol §8.1, T-16)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.core.cursors import DIGITS_MAX, EPOCH_MS, JITTER_MAX_SECS, is_later, next_cursor

INTERVAL_SECS = 20

times = st.integers(min_value=EPOCH_MS, max_value=EPOCH_MS + 10**13)
jitters = st.floats(min_value=0, max_value=1, exclude_max=True)


def interval_at(now_ms: int, interval_secs: int = INTERVAL_SECS) -> int:
    return (now_ms - EPOCH_MS) // (interval_secs * 1000)


def test_epoch_is_that_of_the_protocol() -> None:
    assert datetime.fromtimestamp(EPOCH_MS / 1000, UTC) == datetime(2024, 10, 9, tzinfo=UTC)


@given(times, st.integers(min_value=1, max_value=3600), jitters)
def test_without_a_client_cursor_the_interval_number_is_returned(
    now_ms: int, interval_secs: int, jitter: float
) -> None:
    assert next_cursor(now_ms, interval_secs, None, jitter) == str(interval_at(now_ms, interval_secs))


@given(times, st.integers(min_value=0, max_value=10**6), jitters)
def test_older_cursor_gets_the_current_interval(now_ms: int, age: int, jitter: float) -> None:
    current = interval_at(now_ms)
    older = current - 1 - age
    if older >= 0:
        assert next_cursor(now_ms, INTERVAL_SECS, str(older), jitter) == str(current)


@given(times, st.integers(min_value=0, max_value=10**9), st.integers(min_value=1, max_value=7200), jitters)
@example(EPOCH_MS, 0, INTERVAL_SECS, 0.0)
@example(EPOCH_MS, 0, 7200, 0.999)
def test_equal_or_later_cursor_advances_by_1_to_3600_seconds(
    now_ms: int, lead: int, interval_secs: int, jitter: float
) -> None:
    held = interval_at(now_ms, interval_secs) + lead
    step = int(next_cursor(now_ms, interval_secs, str(held), jitter)) - held
    assert 1 <= step <= max(1, JITTER_MAX_SECS // interval_secs)


@given(st.lists(st.tuples(st.integers(min_value=0, max_value=60_000), jitters), max_size=30), times)
def test_a_client_that_echoes_never_sees_the_same_cursor_twice(pauses: list[tuple[int, float]], now_ms: int) -> None:
    """Two requests within one interval must differ, or a cache would return the same response."""
    held = next_cursor(now_ms, INTERVAL_SECS, None, 0.0)
    for pause_ms, jitter in pauses:
        now_ms += pause_ms
        answered = next_cursor(now_ms, INTERVAL_SECS, held, jitter)
        assert int(answered) > int(held)
        held = answered


@pytest.mark.parametrize(
    "echoed",
    [
        "",
        "abc",
        "-1",
        "+1",
        "1.0",
        "1e3",
        " 1",
        "1 ",
        "0x1",
        "1_0",
        "\u0661",
        "now",
    ],
)
def test_malformed_cursor_is_ignored(echoed: str) -> None:
    now_ms = EPOCH_MS + 12_345_678
    assert next_cursor(now_ms, INTERVAL_SECS, echoed, 0.5) == str(interval_at(now_ms))


@pytest.mark.parametrize("echoed", ["9" * DIGITS_MAX, "9" * (DIGITS_MAX + 1), "0" + "9" * 4000, "0" * 4000 + "1"])
def test_cursor_of_any_length_gets_a_greater_one(echoed: str) -> None:
    now_ms = EPOCH_MS + 12_345_678
    assert int(next_cursor(now_ms, INTERVAL_SECS, echoed, 0.5)) > int(echoed)


@given(st.integers(min_value=0, max_value=10**30), times, jitters)
@example(2**53 - 1, EPOCH_MS, 0.0)
@example(2**53, EPOCH_MS, 0.999)
@example(10**16 - 1, EPOCH_MS, 0.5)
def test_returned_cursor_is_greater_than_any_client_cursor(held: int, now_ms: int, jitter: float) -> None:
    """This is repeated, because clients echo the cursor that they receive."""
    for _ in range(5):
        answered = int(next_cursor(now_ms, INTERVAL_SECS, str(held), jitter))
        assert answered > held
        assert len(str(answered)) <= DIGITS_MAX
        held = answered


def test_leading_zeros_of_a_cursor_are_ignored() -> None:
    now_ms = EPOCH_MS + 20_000 * 7
    assert int(next_cursor(now_ms, INTERVAL_SECS, "0000007", 0.0)) > 7


def test_clock_before_the_epoch_still_gives_a_cursor() -> None:
    assert next_cursor(0, INTERVAL_SECS, None, 0.0) == "0"
    assert next_cursor(0, INTERVAL_SECS, "0", 0.0) == "1"


@given(st.integers(min_value=0), st.integers(min_value=0))
@example(9, 10)
@example(10, 10)
def test_cursors_are_compared_as_numbers(one: int, other: int) -> None:
    assert is_later(str(one), str(other)) == (one > other)


def test_cursors_of_more_digits_than_python_converts_are_compared() -> None:
    assert is_later("9" * 6_000, "1")
    assert not is_later("1", "9" * 6_000)
