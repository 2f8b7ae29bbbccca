"""Read a shape of Electric or of `headwater shapes`, and convert its messages to those of a stream.

A place in a shape is its handle and an offset. Invariant: the range between two places of one handle always holds the
same messages; if it can no longer be read because the shape was deleted, `ShapeExpiredError` is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import httpx
import msgspec

from headwater.postgres.formats import ChangeOrigin, TableFormat, messages_of
from headwater.postgres.pgoutput import Relation, RelationColumn, Row, RowChange
from headwater.postgres.values import converter, parse_array

START: Final = "-1"
NOW: Final = "now"
_REQUEST_TIMEOUT_S: Final = 60.0
_REAL: Final = re.compile(r"(\d+)_(\d+|inf)")
_SCALARS: Final = {
    # The types whose values are not text in the JSON of the change feed.
    "bool": 16,
    "int8": 20,
    "int2": 21,
    "int4": 23,
    "oid": 26,
    "json": 114,
    "float4": 700,
    "float8": 701,
    "jsonb": 3802,
}


class ShapeExpiredError(Exception):
    """The shape that a place belongs to no longer exists: 409."""


class ShapeUnavailableError(Exception):
    """Electric cannot be reached, or is not ready: try again."""


class ShapeRefusedError(Exception):
    """Electric rejects the request permanently; the message says why."""


class ShapePlace(msgspec.Struct, frozen=True):
    """How far a table was read. `generation` counts how often it had to be read from the start."""

    handle: str = ""
    offset: str = START
    generation: int = 0


@dataclass(frozen=True, slots=True)
class ShapePart:
    """One response: its messages, and where to continue."""

    messages: list[dict[str, Any]]
    place: ShapePlace
    up_to_date: bool
    schema: dict[str, Any] | None


class ShapeClient:
    """One table of one server."""

    def __init__(self, url: str, table: str) -> None:
        parts = urlsplit(url)
        path = parts.path.rstrip("/")
        self._url = urlunsplit((parts.scheme, parts.netloc, path or "/v1/shape", "", ""))
        # Every change carries the whole row: formats need it.
        self._query = {**dict(parse_qsl(parts.query)), "table": table, "replica": "full"}
        self._http = httpx.Client(timeout=_REQUEST_TIMEOUT_S)

    def close(self) -> None:
        self._http.close()

    def get(self, place: ShapePlace, *, live: bool = False, cursor: str = "") -> tuple[ShapePart, str]:
        """The next part after a place, and the cursor for the next live request."""
        query = {**self._query, "offset": place.offset}
        if place.handle:
            query["handle"] = place.handle
        if live:
            query |= {"live": "true", "cursor": cursor}
        try:
            response = self._http.get(self._url, params=query)
        except httpx.TransportError as error:
            raise ShapeUnavailableError(f"Electric at {self._url} cannot be reached: {error!r}") from None
        if response.status_code == 409:
            raise ShapeExpiredError
        if response.status_code == 429 or response.status_code >= 500:
            raise ShapeUnavailableError(
                f"Electric at {self._url} answers {response.status_code}: {response.text[:300]}"
            )
        if response.status_code not in {200, 204}:
            raise ShapeRefusedError(f"Electric at {self._url} answers {response.status_code}: {response.text[:500]}")
        headers = response.headers
        reached = ShapePlace(headers["electric-handle"], headers["electric-offset"], place.generation)
        messages = response.json() if response.status_code == 200 else []
        schema = msgspec.json.decode(headers["electric-schema"]) if "electric-schema" in headers else None
        rows = [message for message in messages if "key" in message]
        part = ShapePart(rows, reached, "electric-up-to-date" in headers, schema)
        return part, headers.get("electric-cursor", cursor)

    def schema(self, place: ShapePlace) -> dict[str, Any]:
        """The columns of the shape, which live responses do not repeat."""
        part, _ = self.get(ShapePlace(place.handle, place.offset, place.generation))
        if part.place.handle != place.handle or part.schema is None:
            raise ShapeExpiredError
        return part.schema

    def between(self, start: ShapePlace, end: ShapePlace) -> Iterator[ShapePart]:
        """Read the messages after `start` and up to `end` again."""
        place = start
        last = _number(end.offset)
        while place.offset != end.offset:
            part, _ = self.get(place)
            if part.place.handle != end.handle:
                raise ShapeExpiredError
            kept = [message for message in part.messages if _position(message) <= last]
            yield ShapePart(kept, part.place, part.up_to_date, part.schema)
            if part.place.offset == place.offset or _number(part.place.offset) >= last:
                return
            place = part.place


class TableReader:
    """Convert messages of a shape to messages of a stream, in the format of the table."""

    def __init__(self, schema: Mapping[str, Mapping[str, Any]], table: str, how: TableFormat) -> None:
        namespace, _, name = table.rpartition(".")
        keyed = sorted((one["pk_index"], column) for column, one in schema.items() if "pk_index" in one)
        key = how.key or tuple(column for _, column in keyed)
        if not key:
            raise ShapeRefusedError(f"Electric does not name a key of {table}: set `key` in the table's section")
        self._how = TableFormat(how.stream, how.format, key, how.operations | {"truncate"})
        self._convert = {column: _converter(one) for column, one in schema.items()}
        columns = tuple(RelationColumn(column, 0, column in key) for column in schema)
        self._relation = Relation(0, namespace or "public", name, "d", columns, ())
        self._key = key

    def reset(self) -> Iterator[tuple[str, bytes]]:
        """The messages that make readers of the stream discard everything before."""
        if self._how.format == "rows":
            yield self._how.stream, b'{"headers":{"control":"reset"}}'
        else:
            yield from messages_of(RowChange("truncate", self._relation), None, self._how)

    def messages(self, message: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
        headers = message["headers"]
        row = self._row(message["value"])
        origin = None
        if "lsn" in headers:
            origin = ChangeOrigin(int((headers.get("txids") or [0])[0]), int(headers["lsn"]), None)
        operation = headers["operation"]
        if operation == "delete":
            change = RowChange("delete", self._relation, None, {name: row[name] for name in self._key if name in row})
        else:
            change = RowChange(operation, self._relation, row)
        yield from messages_of(change, origin, self._how)

    def _row(self, value: Mapping[str, str | None]) -> Row:
        convert = self._convert
        return {
            column: None if text is None else convert[column](text)
            for column, text in value.items()
            if column in convert
        }


def _converter(column: Mapping[str, Any]) -> Callable[[str], Any]:
    convert = converter(_SCALARS.get(column["type"], 25), {})
    if not column.get("dims"):
        return convert
    return lambda text: parse_array(text, convert, ";" if column["type"] == "box" else ",")


def _number(offset: str) -> tuple[int, float]:
    """An offset as a comparable tuple: offsets in the snapshot begin with 0, and `0_inf` is its end."""
    found = _REAL.fullmatch(offset)
    if found is None:
        return (-1, 0)
    return int(found[1]), float(found[2])


def _position(message: Mapping[str, Any]) -> tuple[int, float]:
    """The position of a message; rows of the snapshot are before every other position."""
    headers = message["headers"]
    return (int(headers["lsn"]), int(headers["op_position"])) if "lsn" in headers else (-1, 0)
