"""Convert Arrow's Python values to JSON."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any, Final

import msgspec

encode_json: Final = msgspec.json.Encoder(decimal_format="number", uuid_format="canonical").encode


def plain(value: Any) -> Any:
    """Convert Arrow's Python values to JSON values. Arrow returns a map as a list of pairs."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(one, tuple) for one in value):
            return {str(key): plain(one) for key, one in value}
        return [plain(one) for one in value]
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - NaN, which JSON does not have
        return None
    return value if not isinstance(value, dt.timedelta | decimal.Decimal) else _spelled(value)


def _spelled(value: dt.timedelta | decimal.Decimal) -> Any:
    return value.total_seconds() if isinstance(value, dt.timedelta) else value
