"""Expiry of streams: Stream-TTL as a sliding window, Stream-Expires-At as an instant (protocol §5.1)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.core.errors import InvalidExpiry
from headwater.core.expiry import TTL_MAX_SECS, deadline_ms, format_instant, parse_expires_at, parse_ttl

NOON_MS = 1_896_091_200_000
"""2030-01-31T12:00:00Z."""
LAST_MS = 253_402_300_799_999
"""9999-12-31T23:59:59.999Z, the last instant that RFC 3339 can express."""


@given(st.integers(min_value=0, max_value=TTL_MAX_SECS))
@example(0)
@example(TTL_MAX_SECS)
def test_a_ttl_is_a_plain_decimal(seconds: int) -> None:
    assert parse_ttl(str(seconds)) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "+3600",
        "-1",
        "03600",
        "00",
        "3600.0",
        "3.6e3",
        "1e3",
        " 60",
        "60 ",
        "6 0",
        "60s",
        "0x10",
        "1_000",
        "\u0663",
        str(TTL_MAX_SECS + 1),
        "18446744073709551615",
        "18446744073709551616",
        "9" * 5000,
        "abc",
        "60, 60",
        "NaN",
    ],
)
def test_malformed_ttl_is_refused(text: str) -> None:
    with pytest.raises(InvalidExpiry):
        parse_ttl(text)


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("2030-01-31T12:00:00Z", NOON_MS),
        ("2030-01-31t12:00:00z", NOON_MS),
        ("2030-01-31 12:00:00Z", NOON_MS),
        ("  2030-01-31T12:00:00Z ", NOON_MS),
        ("2030-01-31T12:00:00+00:00", NOON_MS),
        ("2030-01-31T12:00:00-00:00", NOON_MS),
        ("2030-01-31T13:30:00+01:30", NOON_MS),
        ("2030-01-31T00:00:00-12:00", NOON_MS),
        ("2030-02-01T11:59:00+23:59", NOON_MS),
        ("2030-01-30T12:01:00-23:59", NOON_MS),
        ("2030-01-31T12:00:00.5Z", NOON_MS + 500),
        ("2030-01-31T12:00:00.123Z", NOON_MS + 123),
        ("2030-01-31T12:00:00.123456Z", NOON_MS + 123),
        ("2030-01-31T12:00:00.000000001Z", NOON_MS),
        ("2030-01-31T12:00:00.123456789Z", NOON_MS + 123),
        ("1970-01-01T00:00:00Z", 0),
        ("1969-12-31T23:59:59.999Z", -1),
        ("9999-12-31T23:59:59Z", LAST_MS - 999),
        ("9999-12-31T23:59:59.999Z", LAST_MS),
        # A leap second is the first instant of the next minute.
        ("2016-12-31T23:59:60Z", 1_483_228_800_000),
        ("2016-12-31T23:59:60.25Z", 1_483_228_800_250),
        ("2016-12-31T15:59:60-08:00", 1_483_228_800_000),
        ("2028-02-29T00:00:00Z", 1_835_395_200_000),
    ],
)
def test_an_instant_is_any_rfc_3339_time(text: str, at_ms: int) -> None:
    assert parse_expires_at(text) == at_ms


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "0",
        "1896091200",
        "1896091200000",
        "2030-01-31",
        "12:00:00Z",
        "2030-01-31T12:00:00",
        "2030-01-31T12:00Z",
        "2030-01-31T12Z",
        "2030-01-31T12:00:00.Z",
        "2030-01-31T12:00:00,5Z",
        "2030-01-31T12:00:00+0100",
        "2030-01-31T12:00:00+01",
        "2030-01-31T12:00:00+1:00",
        "2030-01-31T12:00:00+24:00",
        "2030-01-31T12:00:00+23:60",
        "2030-01-31T12:00:00 UTC",
        "2030-01-31T12:00:00Z+01:00",
        "2030-1-31T12:00:00Z",
        "30-01-31T12:00:00Z",
        "12030-01-31T12:00:00Z",
        "+2030-01-31T12:00:00Z",
        "-2030-01-31T12:00:00Z",
        "20300131T120000Z",
        "2030-031T12:00:00Z",
        "2030-W05-4T12:00:00Z",
        "2030-00-31T12:00:00Z",
        "2030-13-31T12:00:00Z",
        "2030-02-30T12:00:00Z",
        "2029-02-29T12:00:00Z",
        "2030-01-00T12:00:00Z",
        "2030-01-32T12:00:00Z",
        "2030-04-31T12:00:00Z",
        "2030-01-31T24:00:00Z",
        "2030-01-31T12:60:00Z",
        "2030-01-31T12:00:61Z",
        "0000-01-01T00:00:00Z",
        "\u0662\u0660\u0663\u0660-01-31T12:00:00Z",
        "2030-01-31T12:00:00Z\n2030-01-31T12:00:00Z",
        "Thu, 31 Jan 2030 12:00:00 GMT",
        "9999-12-31T23:59:60Z",
    ],
)
def test_malformed_instant_is_refused(text: str) -> None:
    with pytest.raises(InvalidExpiry):
        parse_expires_at(text)


@given(
    st.datetimes(min_value=datetime(1, 1, 3), max_value=datetime(9999, 12, 29)),  # noqa: DTZ001
    st.integers(min_value=-23 * 60 - 59, max_value=23 * 60 + 59),
)
def test_every_zone_names_the_same_instant(moment: datetime, zone_minutes: int) -> None:
    moment = moment.replace(microsecond=moment.microsecond // 1000 * 1000, tzinfo=UTC)
    there = moment.astimezone(timezone(timedelta(minutes=zone_minutes)))
    expected = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    assert parse_expires_at(there.isoformat()) == expected


@given(st.integers(min_value=0, max_value=LAST_MS))
@example(NOON_MS)
@example(LAST_MS)
def test_printed_instant_can_be_sent_back(at_ms: int) -> None:
    assert parse_expires_at(format_instant(at_ms)) == at_ms


@pytest.mark.parametrize(
    ("at_ms", "text"), [(NOON_MS, "2030-01-31T12:00:00Z"), (NOON_MS + 7, "2030-01-31T12:00:00.007Z")]
)
def test_instant_is_printed_in_utc_with_milliseconds_where_there_are_any(at_ms: int, text: str) -> None:
    assert format_instant(at_ms) == text


@pytest.mark.parametrize(
    "text",
    [
        "9999-12-31T23:59:59-00:01",
        "9999-12-31T23:59:59-23:59",
        "9999-12-31T23:59:59.9995Z",
        "9999-12-31T23:59:59.999999999Z",
        "0001-01-01T00:00:00+00:01",
    ],
)
def test_earliest_and_latest_instants_can_be_printed(text: str) -> None:
    """HEAD must work for every created stream, so PUT refuses instants that cannot be printed."""
    try:
        at_ms = parse_expires_at(text)
    except InvalidExpiry:
        return
    assert parse_expires_at(format_instant(at_ms)) == at_ms


def test_ttl_window_starts_at_the_last_use() -> None:
    assert deadline_ms(60, None, NOON_MS) == NOON_MS + 60_000
    assert deadline_ms(0, None, NOON_MS) == NOON_MS


def test_absolute_expiry_does_not_move() -> None:
    assert deadline_ms(None, NOON_MS, NOON_MS + 5) == NOON_MS


def test_stream_without_ttl_and_expiry_never_expires() -> None:
    assert deadline_ms(None, None, NOON_MS) is None
