"""Convert the text that Postgres writes for a value to JSON, without losing digits.

Integers and floats keep their digits, json and jsonb their text. Values that JSON numbers cannot represent (NaN,
numeric, dates, bytes) become strings that Postgres can read back. Invariant: one text always gives the same JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

Convert = Callable[[str], Any]

SESSION_SETTINGS: Final[Mapping[str, str]] = {
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "1",
}
"""Settings that fix the text of values. Every session that reads values must have them."""

_NOT_IN_JSON: Final = frozenset({"NaN", "Infinity", "-Infinity"})


@dataclass(frozen=True, slots=True)
class UserType:
    """A user-defined type: a domain, or an array."""

    base: int = 0
    """The base type of a domain."""
    element: int = 0
    """The element type of an array."""
    delimiter: str = ","


def _truth(text: str) -> bool:
    return text == "t"


def _integer(text: str) -> msgspec.Raw:
    return msgspec.Raw(text)


def _floating(text: str) -> msgspec.Raw | str:
    return text if text in _NOT_IN_JSON else msgspec.Raw(text)


def _json(text: str) -> msgspec.Raw:
    return msgspec.Raw(text)


def _text(text: str) -> str:
    return text


_SCALARS: Final[dict[int, Convert]] = {
    16: _truth,
    20: _integer,
    21: _integer,
    23: _integer,
    26: _integer,
    700: _floating,
    701: _floating,
    114: _json,
    3802: _json,
}

_ARRAYS: Final[dict[int, int]] = {
    # The built-in array types and their element types.
    1000: 16,  # bool
    1001: 17,  # bytea
    1002: 18,  # "char"
    1003: 19,  # name
    1005: 21,  # int2
    1007: 23,  # int4
    1009: 25,  # text
    1014: 1042,  # char(n)
    1015: 1043,  # varchar
    1016: 20,  # int8
    1021: 700,  # float4
    1022: 701,  # float8
    1028: 26,  # oid
    1041: 869,  # inet
    651: 650,  # cidr
    1040: 829,  # macaddr
    1115: 1114,  # timestamp
    1182: 1082,  # date
    1183: 1083,  # time
    1185: 1184,  # timestamptz
    1187: 1186,  # interval
    1231: 1700,  # numeric
    1270: 1266,  # timetz
    199: 114,  # json
    2951: 2950,  # uuid
    3807: 3802,  # jsonb
}
_BOX_ARRAY: Final = 1020


def converter(oid: int, made: Mapping[int, UserType]) -> Convert:
    """The conversion of a type to JSON. Unknown types stay text."""
    for _ in range(8):  # a domain over a domain over …
        kind = made.get(oid)
        if kind is None or not kind.base:
            break
        oid = kind.base
    if oid in _SCALARS:
        return _SCALARS[oid]
    if oid == _BOX_ARRAY:
        return lambda text: parse_array(text, _text, ";")
    if oid in _ARRAYS:
        return _array_of(_ARRAYS[oid], ",", made)
    kind = made.get(oid)
    if kind is not None and kind.element:
        return _array_of(kind.element, kind.delimiter, made)
    return _text


def _array_of(element: int, delimiter: str, made: Mapping[int, UserType]) -> Convert:
    convert = converter(element, made)
    return lambda text: parse_array(text, convert, delimiter)


def parse_array(text: str, convert: Convert, delimiter: str = ",") -> list[Any]:
    """Parse an array literal, such as `{1,NULL,"a,b"}` or `[0:1]={…}`, to nested lists."""
    at = text.index("=") + 1 if text.startswith("[") else 0
    if text[at] != "{":
        raise ValueError(f"not an array: {text!r}")
    whole: list[Any] = []
    open_lists = [whole]
    at += 1
    while open_lists:
        letter = text[at]
        if letter == "{":
            inner: list[Any] = []
            open_lists[-1].append(inner)
            open_lists.append(inner)
            at += 1
        elif letter == "}":
            open_lists.pop()
            at += 1
        elif letter == delimiter:
            at += 1
        elif letter == '"':
            value, at = _quoted(text, at + 1)
            open_lists[-1].append(convert(value))
        else:
            start = at
            while text[at] != delimiter and text[at] != "}":
                # Outside quotes, too, a backslash escapes the next character.
                at += 2 if text[at] == "\\" else 1
            value = text[start:at]
            open_lists[-1].append(None if value == "NULL" else convert(value))
    return whole


def _quoted(text: str, at: int) -> tuple[str, int]:
    """The text up to the closing quote, and the position after the quote."""
    letters: list[str] = []
    while text[at] != '"':
        if text[at] == "\\":
            at += 1
        letters.append(text[at])
        at += 1
    return "".join(letters), at + 1
