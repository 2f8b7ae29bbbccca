"""Describe what a setting accepts, for error messages and for the table in the documentation.

Invariant: the description is derived from the `Field` that checks the value, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headwater.config.sections import VARIABLE_PREFIX, VARIABLE_SEPARATOR, Settings


@dataclass(frozen=True, slots=True)
class Described:
    """One row of the settings table."""

    section: str
    key: str
    variable: str
    default: str
    takes: str
    description: str


def described_settings() -> Iterator[Described]:
    """Every setting, in the order of the sections."""
    for section, section_field in Settings.model_fields.items():
        model = section_field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        for key, field in model.model_fields.items():
            yield Described(
                section,
                key,
                f"{VARIABLE_PREFIX}{section.upper()}{VARIABLE_SEPARATOR}{key.upper()}",
                shown(field.default),
                takes_of(field),
                field.description or "",
            )


def takes_of(field: FieldInfo) -> str:
    """The values that `field` accepts, as a phrase that follows "it takes"."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "takes" in extra:
        return str(extra["takes"])
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        *others, last = (str(choice) for choice in get_args(annotation))
        return f"{', '.join(others)} or {last}"
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return f"a whole number{_range(field)}"
    if annotation is float:
        return f"a number{_range(field)}"
    if annotation is Path or Path in get_args(annotation):
        return "a path"
    return "text"


def shown(value: object) -> str:
    """A value as it is written in a settings file (without quotes); empty if it is unset."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _range(field: FieldInfo) -> str:
    lows = [_number(mark.ge) for mark in field.metadata if isinstance(mark, Ge)]
    above = [_number(mark.gt) for mark in field.metadata if isinstance(mark, Gt)]
    highs = [_number(mark.le) for mark in field.metadata if isinstance(mark, Le)]
    low = f" from {_plain(max(lows))}" if lows else f" above {_plain(max(above))}" if above else ""
    # Omit a bound that only guards against overflow.
    high = min(highs) if highs else None
    if high is None or high >= 2**62:
        return f"{low} up" if lows else low
    return f"{low} {'to' if lows else 'and up to'} {_plain(high)}"


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)


def _number(bound: object) -> float:
    assert isinstance(bound, int | float)
    return bound
