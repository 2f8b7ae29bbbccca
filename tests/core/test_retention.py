"""Retention by age and size: bounded, correct marks, and rules that a stream can override."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.catalog import Catalog, StreamState
from headwater.core.errors import BadRequest
from headwater.core.offsets import Offset
from headwater.core.records import AgeIndex, Append, Create, Retain, RetentionPolicy, SnapshotRef
from headwater.core.retention import MARKS_MAX, STEP_MIN_MS, AgeMarks, RetentionRule, parse_policy

T0 = 1_000_000


@settings(deadline=None)
@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=400), st.integers(0, 50_000_000))
def test_mark_never_covers_a_message_received_later(gaps: list[int], until: int) -> None:
    marks = AgeMarks(AgeIndex(STEP_MIN_MS))
    times: list[int] = []
    now = T0
    for gap in gaps:
        now += gap
        marks.note(now, times[-1] if times else T0, len(times), len(times) * 10)
        times.append(now)
        assert len(marks.saved().marks) <= MARKS_MAX
    found = marks.last_until(T0 + until)
    if found is not None:
        message_index, byte_position = found
        assert byte_position == message_index * 10
        assert all(at <= T0 + until for at in times[:message_index])


def test_marks_separate_messages_that_are_far_apart() -> None:
    marks = AgeMarks(AgeIndex(STEP_MIN_MS))
    for number in range(5):
        marks.note(T0 + number * 2000, T0 + (number - 1) * 2000, number, number)
    for number in range(4):
        assert marks.last_until(T0 + number * 2000) == (number + 1, number + 1)
        assert marks.last_until(T0 + number * 2000 - 1) == ((number, number) if number else None)


def test_many_messages_cost_few_marks_and_lag_little() -> None:
    """One message per 10 ms for two hours: there are few marks, and none lags by more than a fraction of the window."""
    marks = AgeMarks(AgeIndex(STEP_MIN_MS))
    for number in range(720_000):
        marks.note(T0 + number * 10, T0 + (number - 1) * 10, number, number)
    saved = marks.saved()
    assert len(saved.marks) <= MARKS_MAX
    window = 7_200_000
    for until in range(0, window - window // 16, 60_000):
        exact = until // 10
        found = marks.last_until(T0 + until)
        assert (exact - found[0] if found is not None else exact) * 10 <= window // 16
    again = AgeMarks(saved)
    assert again.saved() == saved


def test_marks_before_the_first_retained_message_are_removed() -> None:
    marks = AgeMarks(AgeIndex(STEP_MIN_MS, ((T0, 1, 10), (T0 + 1, 2, 20), (T0 + 2, 3, 30))))
    marks.forget(2)
    assert marks.saved().marks == ((T0 + 2, 3, 30),)


def test_stream_policy_overrides_single_fields_of_the_server_rule() -> None:
    server = RetentionRule(5000, 100, may_drop=False)
    assert server.of(None) is server
    assert server.of(RetentionPolicy(None, None, True)) == RetentionRule(5000, 100, may_drop=True)
    assert server.of(RetentionPolicy(7, 0, None)) == RetentionRule(7000, 0, may_drop=False)
    assert RetentionRule(1, 0, may_drop=True).drops
    assert RetentionRule(0, 1, may_drop=True).drops
    assert not RetentionRule(0, 0, may_drop=True).drops
    assert not RetentionRule(1, 1).drops
    assert RetentionRule(1, 0, may_drop=True).tracks_age
    assert not RetentionRule(0, 1, may_drop=True).tracks_age


@pytest.mark.parametrize("text", ["-1", "+1", "1.5", "01", "", " 1", "1e3", "99999999999999999", "x", "\u0661"])
def test_malformed_numbers_are_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        parse_policy(text, None, None)
    with pytest.raises(BadRequest):
        parse_policy(None, text, None)


def test_headers_become_a_policy() -> None:
    assert parse_policy(None, None, None) is None
    assert parse_policy("0", None, None) == RetentionPolicy(0, None, None)
    assert parse_policy("60", "9007199254740991", "Allowed") == RetentionPolicy(60, 2**53 - 1, True)
    assert parse_policy(None, None, "never") == RetentionPolicy(None, None, False)
    for text in ("", "yes", "true", "allow"):
        with pytest.raises(BadRequest):
            parse_policy(None, None, text)


def stream_with_messages(**more: object) -> tuple[Catalog[StreamState], StreamState]:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    catalog.apply(Create(1, "/ds/bucket/s", T0, "text/plain", **more))  # type: ignore[arg-type]
    for number in range(5):
        catalog.apply(Append(1, T0 + number * 2000, number, number * 10, b"x" * 10, (10,)))
    return catalog, catalog.by_id[1]


def test_snapshot_moves_the_retained_start_and_replaces_the_previous_one() -> None:
    catalog, stream = stream_with_messages()
    first, second = SnapshotRef(2, 20, "a/b", 7, 1, T0), SnapshotRef(4, 40, "c/d", 8, 1, T0)
    catalog.apply(Retain(1, T0, 2, 20, first))
    assert (stream.retained, stream.snapshot) == (Offset(2, 20), first)
    catalog.apply(Retain(1, T0 + 99_000, 4, 40, second))
    assert (stream.retained, stream.snapshot) == (Offset(4, 40), second)
    assert stream.accessed_ms == T0 + 99_000
    assert stream.written_ms == T0 + 8000


def test_dropping_messages_beyond_a_snapshot_removes_it() -> None:
    catalog, stream = stream_with_messages()
    accessed = stream.accessed_ms
    catalog.apply(Retain(1, T0 + 99_000, 2, 20, SnapshotRef(2, 20, "a/b", 7, 1, T0)))
    catalog.apply(Retain(1, T0 + 99_001, 2, 20, None, tracks_age=True))
    assert stream.image().snapshot is not None
    catalog.apply(Retain(1, T0 + 199_000, 3, 30))
    assert stream.retained == Offset(3, 30)
    assert stream.image().snapshot is None
    # Actions of the server itself do not count as use of the stream.
    assert accessed < stream.accessed_ms == T0 + 99_000


def test_a_stream_that_tracks_ages_keeps_its_marks_in_its_image() -> None:
    catalog, stream = stream_with_messages(tracks_age=True)
    assert stream.ages is not None
    assert stream.ages.last_until(T0 + 4000) == (3, 30)
    again: Catalog[StreamState] = Catalog(StreamState)
    again.apply(stream.image())
    for both in (catalog, again):
        both.apply(Append(1, T0 + 20_000, 5, 50, b"y", (1,)))
        both.apply(Retain(1, T0 + 20_000, 2, 20))
    assert again.by_id[1].image() == stream.image()
    assert stream.image().ages is not None


def test_tracking_can_begin_later() -> None:
    catalog, stream = stream_with_messages()
    assert stream.image().ages is None
    catalog.apply(Retain(1, T0 + 50_000, 0, 0, None, tracks_age=True))
    assert stream.ages is not None
    # For earlier messages it is only known that they existed at that time.
    assert stream.ages.last_until(T0 + 7999) is None
    assert stream.ages.last_until(T0 + 8000) == (5, 50)
