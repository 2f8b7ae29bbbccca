"""The types of setting values, and the base class of sections.

Invariant: an accepted value needs no further check; `takes` only adds a description where type and bounds are not
enough.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

_BYTES_MAX = 2**62
_SECS_MAX = 7 * 24 * 3600.0
_WEB_ORIGIN = re.compile(r"https?://[^\s/?#@]+/?", re.IGNORECASE)


def _no_truth_value(value: object) -> object:
    # Pydantic reads `true` as 1, but `port = true` is a mistake.
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    return value


def _empty_is_unset(value: object) -> object:
    return None if value == "" else value


def _cores_or_count(value: object) -> object:
    """Read `auto` as 0, which means one per core."""
    return 0 if isinstance(value, str) and value.strip().lower() == "auto" else _no_truth_value(value)


def split(listed: str) -> tuple[str, ...]:
    """The pieces of a comma-separated list."""
    return tuple(piece.strip() for piece in listed.split(",") if piece.strip())


Count = Annotated[int, BeforeValidator(_no_truth_value)]
Bytes = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=1, le=_BYTES_MAX)]
BytesOrOff = Annotated[int, BeforeValidator(_no_truth_value), Field(ge=0, le=_BYTES_MAX)]
Seconds = Annotated[float, BeforeValidator(_no_truth_value), Field(gt=0, le=_SECS_MAX, allow_inf_nan=False)]
SecondsOrOff = Annotated[float, BeforeValidator(_no_truth_value), Field(ge=0, le=_SECS_MAX, allow_inf_nan=False)]
AgeOrOff = Annotated[float, BeforeValidator(_no_truth_value), Field(ge=0, le=1e10, allow_inf_nan=False)]
CountOrAuto = Annotated[int, BeforeValidator(_cores_or_count)]
OptionalBytes = Annotated[BytesOrOff | None, BeforeValidator(_empty_is_unset)]
OptionalBool = Annotated[bool | None, BeforeValidator(_empty_is_unset)]
OptionalPath = Annotated[Path | None, BeforeValidator(_empty_is_unset)]


def takes(sentence: str) -> dict[str, JsonValue]:
    """For `json_schema_extra`: describe the accepted values where type and bounds are not enough."""
    return {"takes": sentence}


class SettingsSection(BaseModel):
    """A table of the settings file."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, validate_default=True)


def check_web_origin(value: str) -> str:
    """Check a URL of a scheme and a host, or an empty string; a final slash is removed."""
    if value and not _WEB_ORIGIN.fullmatch(value):
        raise ValueError(f"{value!r} is not a scheme and host")
    return value.rstrip("/")
