"""Parse Postgres values, from the text that our sessions get, to Python values that compare in the same way.

Sessions have fixed settings (`postgres.values.SESSION_SETTINGS`), so each type has one notation. Invariant: two values
of one kind compare in Python, through `order_key`, as they compare in Postgres (text by code points, as with
COLLATE "C").
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

INTEGERS: Final = ("int2", "int4", "int8")
FLOATS: Final = ("float4", "float8")
TEXTS: Final = ("text", "varchar", "name", "bpchar")
ENUM: Final = "enum"
KINDS: Final = frozenset(
    (*INTEGERS, "numeric", *FLOATS, *TEXTS, "bool", "uuid", "date", "time", "timestamp", "timestamptz", "interval")
)

_DAY_US: Final = 86_400_000_000
_FOREVER: Final = 1 << 90
"""Represents `infinity` of dates and times: later than any of them."""
_DATE: Final = re.compile(r"(\d{4,})-(\d\d)-(\d\d)")
_TIME: Final = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_ZONE: Final = re.compile(r"([+-])(\d\d)(?::(\d\d))?(?::(\d\d))?$")
_INTERVAL: Final = re.compile(
    r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)W)?(?:(-?\d+)D)?(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?\d+(?:\.\d+)?)S)?)?"
)

Read = Callable[[str], Any]


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the proleptic Gregorian calendar, for any year (0 is 1 BC)."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


def _endless(text: str) -> int | None:
    return {"infinity": _FOREVER, "-infinity": -_FOREVER}.get(text)


def _date(text: str) -> int:
    if (endless := _endless(text)) is not None:
        return endless
    found = _DATE.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a date in Postgres's notation")
    year = int(found[1])
    return _days(1 - year if text.endswith(" BC") else year, int(found[2]), int(found[3]))


def _time(text: str) -> int:
    found = _TIME.match(text)
    if found is None:
        raise ValueError(f"{text!r} is not a time in Postgres's notation")
    seconds = int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3])
    return seconds * 1_000_000 + int((found[4] or "").ljust(6, "0"))


def _timestamp(text: str) -> int:
    if (endless := _endless(text)) is not None:
        return endless
    date, _, rest = text.partition(" ")
    return _date(date + (" BC" if rest.endswith(" BC") else "")) * _DAY_US + _time(rest)


def _timestamptz(text: str) -> int:
    if (endless := _endless(text)) is not None:
        return endless
    plain = text.removesuffix(" BC")
    zone = _ZONE.search(plain)
    if zone is None:
        raise ValueError(f"{text!r} has no time zone")
    ahead = (int(zone[2]) * 3600 + int(zone[3] or 0) * 60 + int(zone[4] or 0)) * 1_000_000
    local = _timestamp(plain[: zone.start()] + text[len(plain) :])
    return local - ahead if zone[1] == "+" else local + ahead


def _interval(text: str) -> int:
    """An interval in microseconds. A month has 30 days and a day 24 hours, as in Postgres's comparison."""
    if (endless := _endless(text)) is not None:
        return endless
    found = _INTERVAL.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not an interval in Postgres's notation")
    years, months, weeks, days, hours, minutes = (int(found[place] or 0) for place in range(1, 7))
    whole_days = (years * 12 + months) * 30 + weeks * 7 + days
    micros = int((Decimal(found[7] or 0) * 1_000_000).to_integral_value())
    return whole_days * _DAY_US + (hours * 3600 + minutes * 60) * 1_000_000 + micros


def _float4(text: str) -> float:
    """Round to single precision, so that comparisons with a double give the same result as in Postgres."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", float(text)))[0]
    except OverflowError:
        return float("-inf" if text.startswith("-") else "inf")
    return rounded


def _truth(text: str) -> bool:
    return text in {"t", "true"}


def _same(value: Any) -> Any:
    return value


READERS: Final[dict[str, Read]] = {
    **dict.fromkeys(INTEGERS, int),
    **dict.fromkeys(TEXTS, _same),
    "numeric": Decimal,
    "float4": _float4,
    "float8": float,
    "bool": _truth,
    "uuid": _same,
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "interval": _interval,
    ENUM: _same,
}


def _ordered(value: Any) -> tuple[bool, Any]:
    """NaN equals itself and is greater than everything else."""
    return (True, 0) if value != value else (False, value)  # noqa: PLR0124


def _unpadded(value: str) -> str:
    return value.rstrip(" ")


def order_key(kind: str) -> Callable[[Any], Any]:
    """The comparison key of values of a kind."""
    if kind in FLOATS or kind == "numeric":
        return _ordered
    return _unpadded if kind == "bpchar" else _same


def _decimal_of(value: int) -> Decimal:
    return Decimal(value)


def _double(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("-inf") if value < 0 else float("inf")


def _micros(days: int) -> int:
    return days if abs(days) == _FOREVER else days * _DAY_US


def _day_of(micros: int) -> int:
    return micros if abs(micros) == _FOREVER else micros // _DAY_US


def _time_of(micros: int) -> int:
    return micros % _DAY_US


CONVERSIONS: Final[dict[tuple[str, str], Callable[[Any], Any]]] = {
    # Conversions that cannot fail for a value of a row. The time zone of every session is UTC.
    ("int2", "int4"): _same,
    ("int2", "int8"): _same,
    ("int4", "int8"): _same,
    **{(kind, "numeric"): _decimal_of for kind in INTEGERS},
    **{(kind, "float8"): _double for kind in (*INTEGERS, "numeric")},
    ("float4", "float8"): _same,
    ("bool", "int4"): int,
    ("varchar", "text"): _same,
    ("name", "text"): _same,
    ("bpchar", "text"): _unpadded,
    ("date", "timestamp"): _micros,
    ("date", "timestamptz"): _micros,
    ("timestamp", "timestamptz"): _same,
    ("timestamptz", "timestamp"): _same,
    ("timestamp", "date"): _day_of,
    ("timestamptz", "date"): _day_of,
}
_ONLY_EXPLICIT: Final = frozenset(
    (("bool", "int4"), ("timestamptz", "timestamp"), ("timestamp", "date"), ("timestamptz", "date"))
)


def converts_implicitly(source: str, target: str) -> bool:
    return source == target or ((source, target) in CONVERSIONS and (source, target) not in _ONLY_EXPLICIT)


def spelled_as_text(kind: str) -> Callable[[str], str]:
    """A function from the text of the type's output function to the text of `value::text`."""
    if kind == "bool":
        return lambda text: "true" if _truth(text) else "false"
    return _unpadded if kind == "bpchar" else _same
