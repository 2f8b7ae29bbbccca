"""Parse and check requests of the Shape API: the shape, the offset to continue from, and the mode.

Invariant: an invalid request raises `InvalidShapeError` with the name of the parameter, and no text of a parameter
becomes SQL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec

from headwater.shapes.definition import LogMode, Replica, ShapeDescription
from headwater.shapes.errors import InvalidShapeError
from headwater.shapes.offsets import BEFORE_ALL, LogOffset, parse_offset

_NAME: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\W\d][\w$]*))\s*')
_PARAMETER: Final = re.compile(r"params\[(\d{1,5})\]")
NAME_MAX: Final = 63
COLUMNS_MAX: Final = 1_600
SUBSET_ROWS_MAX: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Subset:
    """A query within a shape."""

    where: str | None
    params: tuple[tuple[str, str], ...]
    order_by: str | None
    limit: int | None
    offset: int | None


@dataclass(frozen=True, slots=True)
class ShapeRequest:
    wanted: ShapeDescription
    offset: LogOffset
    offset_text: str
    is_now: bool
    handle: str | None
    live: bool
    sse: bool
    cursor: str | None
    subset: Subset | None


def parse_request(query: Mapping[str, str], body: bytes | None) -> ShapeRequest:
    """Parse the parameters of a request; `body` is that of a POST."""
    offset_text = query.get("offset", "")
    if not offset_text:
        raise InvalidShapeError("offset", "can't be blank")
    is_now = offset_text == "now"
    offset = BEFORE_ALL if is_now else parse_offset(offset_text)
    if offset is None:
        raise InvalidShapeError("offset", "has invalid format")
    at_start = is_now or offset == BEFORE_ALL
    handle = query.get("handle") or None
    if at_start:
        handle = None
    elif handle is None:
        raise InvalidShapeError("handle", "can't be blank when offset != -1")
    live = _truth(query, "live")
    sse = _truth(query, "live_sse") or _truth(query, "experimental_live_sse")
    if live and at_start:
        raise InvalidShapeError(
            "live", "can't be true when offset is 'now'" if is_now else "can't be true when offset == -1"
        )
    if sse and not live:
        raise InvalidShapeError("live_sse", "can't be true unless live is also true")
    subset = _subset(query, body)
    if subset is not None and live:
        raise InvalidShapeError("live", "can't be true with a subset")
    return ShapeRequest(_wanted(query), offset, offset_text, is_now, handle, live, sse, query.get("cursor"), subset)


def _wanted(query: Mapping[str, str]) -> ShapeDescription:
    schema, table = _table(query.get("table", ""))
    replica, log = query.get("replica", "default"), query.get("log", "full")
    if replica not in {"default", "full"}:
        raise InvalidShapeError("replica", "is invalid")
    if log not in {"full", "changes_only"}:
        raise InvalidShapeError("log", "is invalid")
    columns = query.get("columns")
    return ShapeDescription(
        schema,
        table,
        query.get("where") or None,
        _params(query),
        None if columns is None else _columns(columns),
        cast("Replica", replica),
        cast("LogMode", log),
    )


def _truth(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false")
    if text in {"true", "1", ""}:
        return True
    if text in {"false", "0"}:
        return False
    raise InvalidShapeError(name, "is invalid")


def _table(text: str) -> tuple[str, str]:
    if not text:
        raise InvalidShapeError("table", "can't be blank")
    names: list[str] = []
    at = 0
    while found := _NAME.match(text, at):
        names.append(_identifier(found))
        at = found.end()
        if text[at : at + 1] != ".":
            break
        at += 1
    if at != len(text) or len(names) not in {1, 2} or any(len(name.encode()) > NAME_MAX for name in names):
        raise InvalidShapeError("table", "table name does not match expected format")
    return ("public", names[0]) if len(names) == 1 else (names[0], names[1])


def _columns(text: str) -> tuple[str, ...]:
    names: list[str] = []
    at = 0
    while (found := _NAME.match(text, at)) is not None and len(names) <= COLUMNS_MAX:
        names.append(_identifier(found))
        at = found.end()
        if text[at : at + 1] != ",":
            break
        at += 1
    if at != len(text) or not names:
        raise InvalidShapeError(
            "columns", "Invalid column list: separate names with commas, and quote names with special characters"
        )
    return tuple(names)


def _identifier(found: re.Match[str]) -> str:
    return found[1].replace('""', '"') if found[1] is not None else found[2].lower()


def _params(query: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    numbered = {found[1]: value for name, value in query.items() if (found := _PARAMETER.fullmatch(name))}
    if "params" in query:
        numbered |= _decoded_params(query["params"], "params")
    return tuple(sorted(numbered.items()))


def _decoded_params(text: Any, name: str) -> dict[str, str]:
    found = text
    if isinstance(text, str):
        try:
            found = msgspec.json.decode(text)
        except msgspec.MsgspecError:
            raise InvalidShapeError(name, "params must be valid JSON") from None
    if isinstance(found, list):
        found = {str(number): value for number, value in enumerate(found, 1)}
    if not isinstance(found, dict):
        raise InvalidShapeError(name, "params must be a JSON object")
    return {str(key): _as_text(value) for key, value in found.items()}


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidShapeError("params", "the values of params must be strings or numbers")


def _subset(query: Mapping[str, str], body: bytes | None) -> Subset | None:
    given: dict[str, Any] = {
        name.removeprefix("subset__"): value for name, value in query.items() if name.startswith("subset__")
    }
    if body:
        try:
            decoded = msgspec.json.decode(body)
        except msgspec.MsgspecError:
            raise InvalidShapeError("subset", "the body must be JSON") from None
        if not isinstance(decoded, dict):
            raise InvalidShapeError("subset", "the body must be a JSON object")
        inner = decoded.get("subset", decoded)
        if not isinstance(inner, dict):
            raise InvalidShapeError("subset", "must be a JSON object")
        given |= inner
    if not given and body is None:
        return None
    limit = _number(given, "limit", 1)
    offset = _number(given, "offset", 0)
    order_by = _optional_text(given, "order_by")
    if (limit is not None or offset is not None) and not order_by:
        raise InvalidShapeError("subset", "order_by is required when limit or offset is present")
    params = _decoded_params(given["params"], "subset") if given.get("params") is not None else {}
    return Subset(_optional_text(given, "where"), tuple(sorted(params.items())), order_by, limit, offset)


def _optional_text(given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidShapeError("subset", f"{name} must be a string")
    return value or None


def _number(given: Mapping[str, Any], name: str, least: int) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise InvalidShapeError("subset", f"{name} must be a number of at least {least}")
    return value
