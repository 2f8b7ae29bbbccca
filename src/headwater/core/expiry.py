"""Expiry: when a stream is deleted automatically.

``Stream-TTL`` is a sliding window: each read or write restarts it, HEAD does not. ``Stream-Expires-At`` is an
instant. A stream has at most one of them. Times are milliseconds since the Unix epoch, and `now` is an argument.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

from headwater.core.errors import InvalidExpiry

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
TTL_MAX_SECS: Final = 2**53 - 1
"""Largest integer that every client can hold; more than any clock needs."""

_TTL: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_RFC3339: Final = re.compile(
    r"(\d{4})-(\d{2})-(\d{2})[Tt ](\d{2}):(\d{2}):(\d{2})(?:\.(\d+))?(?:([Zz])|([+-])(\d{2}):(\d{2}))", re.ASCII
)


def parse_ttl(text: str) -> int:
    """Seconds of a Stream-TTL header: a plain decimal, no sign, no leading zero (protocol §5.1)."""
    if _TTL.fullmatch(text) is None or int(text) > TTL_MAX_SECS:
        raise InvalidExpiry(
            f"Stream-TTL must be a whole number of seconds from 0 to {TTL_MAX_SECS}, without sign or leading zeros, not"
            f" {text!r}."
        )
    return int(text)


def parse_expires_at(text: str) -> int:
    """Milliseconds since the epoch of a Stream-Expires-At header (RFC 3339)."""
    at_ms = parse_instant(text.strip())
    if at_ms is None:
        raise InvalidExpiry(f"Stream-Expires-At must be an RFC 3339 time such as 2030-01-31T12:00:00Z, not {text!r}.")
    return at_ms


def parse_instant(text: str) -> int | None:
    """Milliseconds since the epoch of an RFC 3339 time, or None if it is not one."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
    # RFC 3339 sets no limit on the digits of a fraction; beyond microseconds they are dropped.
    fraction = (match[7] or "").ljust(6, "0")[:6]
    zone: timezone = UTC
    if match[9]:
        shift = timedelta(hours=int(match[10]), minutes=int(match[11]))
        if int(match[10]) > 23 or int(match[11]) > 59:
            return None
        zone = timezone(shift if match[9] == "+" else -shift)
    try:
        # RFC 3339 allows a leap second; it is the first instant of the next minute.
        moment = datetime(year, month, day, hour, minute, min(second, 59), int(fraction), zone)
        if second == 60:
            moment += timedelta(seconds=1)
        elif second > 60:
            return None
        # Whole milliseconds, and only instants that can be formatted in UTC (years 1 to 9999).
        at_ms = (moment.astimezone(UTC) - _EPOCH) // timedelta(milliseconds=1)
        format_instant(at_ms)
    except (ValueError, OverflowError):
        return None
    return at_ms


def format_instant(at_ms: int) -> str:
    """An instant as RFC 3339 in UTC, with milliseconds only where there are any."""
    moment = _EPOCH + timedelta(milliseconds=at_ms)
    text = moment.strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{at_ms % 1000:03d}Z" if at_ms % 1000 else f"{text}Z"


def deadline_ms(ttl_secs: int | None, expires_at_ms: int | None, accessed_ms: int) -> int | None:
    """When a stream that was last used at `accessed_ms` expires; None if it never does."""
    if expires_at_ms is not None:
        return expires_at_ms
    if ttl_secs is not None:
        return accessed_ms + ttl_secs * 1000
    return None
