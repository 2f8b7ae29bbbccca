"""Run small queries over streams in this process with DuckDB instead of Spark.

Spark takes ten seconds or more to start. A query is small if its streams hold little data, and simple if its text uses
only words that both engines interpret in the same way. Invariant: a query that is not certainly both is rejected with
`NotSimpleError` and runs in Spark, so the result does not depend on the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from headwater.client import BEGINNING, Client
from headwater.pipeline.table_calls import TableCall, rewritten

BYTES_MAX: Final = 64 * 1024 * 1024
"""The most bytes that the streams of a query may hold."""

_TOKEN: Final = re.compile(r"\s+|'(?:[^'\\]|'')*'|\d+(?:\.\d+)?|[A-Za-z_]\w*|<>|!=|<=|>=|[=<>+\-*(),.]")
_FUNCTIONS: Final = frozenset(("count", "sum", "min", "max", "avg", "lower", "upper", "length", "coalesce", "abs"))
"""Functions that both engines have, with the same meaning."""
_BEFORE_PARENTHESIS: Final = frozenset(("in", "and", "or", "not", "where", "by", "having", "select", "as"))
_OTHERS: Final = frozenset(
    ("join", "union", "intersect", "except", "with", "over", "lateral", "exists", "case", "cast", "like", "values")
)
"""Words whose meaning differs between the engines, or that make a query complex."""
_COLUMNS: Final = {
    **dict.fromkeys(("stream", "offset"), "VARCHAR"),
    "position": "BIGINT",
    **dict.fromkeys(("value", "content_type"), "VARCHAR"),
}
"""Columns of a stream without a schema, with their types."""
_BUCKETS: Final = "/ds/"


class NotSimpleError(Exception):
    """The query needs Spark; the message says why."""


@dataclass(frozen=True, slots=True)
class QueryAnswer:
    columns: list[str]
    rows: list[tuple[Any, ...]]


def answer(text: str, client: Client, limit: int) -> QueryAnswer:
    """Run a simple query. Raises `NotSimpleError` for any other."""
    try:
        import duckdb  # noqa: PLC0415 - optional
    except ImportError:
        raise NotSimpleError("DuckDB is not installed") from None
    tables: dict[TableCall, str] = {}
    plain = rewritten(text, lambda call: tables.setdefault(call, f"_headwater_{len(tables)}"))
    if not tables:
        raise NotSimpleError("it does not name a stream")
    _check_words(plain, set(tables.values()))
    loader = _Loader(client)
    with duckdb.connect(":memory:", config={"threads": "2"}) as database:
        # Nulls sort as in Spark.
        database.execute("SET default_null_order='NULLS_FIRST_ON_ASC_LAST_ON_DESC'")
        for call, name in tables.items():
            # As lists: for an Arrow table DuckDB imports pandas, which takes longer than everything else.
            columns = loader.columns(call)
            selected = ", ".join(f'unnest(?::{column.type}[]) AS "{field}"' for field, column in columns.items())
            database.execute(f"CREATE TABLE {name} AS SELECT {selected}", [one.values for one in columns.values()])
        try:
            found = database.execute(f"SELECT * FROM ({plain}) LIMIT {limit}" if limit else plain)
        except duckdb.Error as error:
            raise NotSimpleError(str(error)) from None
        names = ["count(1)" if column[0] == "count_star()" else column[0] for column in found.description]
        return QueryAnswer(names, found.fetchall())


def _check_words(text: str, tables: set[str]) -> None:
    """Accept only what means the same in both engines: one SELECT with comparisons and common functions."""
    at = 0
    words: list[str] = []
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise NotSimpleError(f"{text[at]!r} is not supported without Spark")
        at = found.end()
        if not found[0].isspace():
            words.append(found[0])
    if not words or words[0].lower() != "select" or sum(word.lower() == "select" for word in words) > 1:
        raise NotSimpleError("it is not one SELECT")
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name = word.lower()
        is_name = name[0].isalpha() or name[0] == "_"
        if name in _OTHERS or (is_name and after == "(" and name not in _FUNCTIONS | _BEFORE_PARENTHESIS):
            raise NotSimpleError(f"{word} needs Spark")
        if name.startswith("_headwater_") and word not in tables:
            raise NotSimpleError(f"{word} is not a table")


@dataclass(frozen=True, slots=True)
class _Column:
    type: str
    values: list[Any]


class _Loader:
    """Read streams as columns, within the limits."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._bytes_left = BYTES_MAX

    def columns(self, call: TableCall) -> dict[str, _Column]:
        names = self._names(call)
        fields = _fields(call.arguments[1]) if len(call.arguments) > 1 else None
        types = _COLUMNS if fields is None else {name: kind.type for name, kind in fields.items()}
        columns = {name: _Column(kind, []) for name, kind in types.items()}
        for name in names:
            for row in self._rows(name):
                values = row if fields is None else _typed(row["value"], fields)
                for column, found in columns.items():
                    found.values.append(values[column])
        return columns

    def _names(self, call: TableCall) -> list[str]:
        if call.function == "stream" and 1 <= len(call.arguments) <= 2:
            return [call.arguments[0]]
        raise NotSimpleError(f"{call.function}() needs Spark")

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        stream = self._client.stream(name)
        info = stream.head()
        if info.position is None or not {"frames"} <= info.extensions:
            raise NotSimpleError("the server does not number messages")
        index = 0
        offset = info.earliest_offset or info.snapshot_offset or BEGINNING
        if offset != BEGINNING:
            index = int(offset.split("_")[0], 16)
        position, incarnation = _place(offset, info.next_offset)
        size = _place(info.next_offset, info.next_offset)[0] - position
        if size > self._bytes_left:
            raise NotSimpleError(f"{name} holds {size} bytes")
        self._bytes_left -= size
        local = name.removeprefix(_BUCKETS).partition("/")[2] if name.startswith(_BUCKETS) else name
        for message in self._client.run(stream.operations.messages_between(offset, info.next_offset)):
            position += len(message) + (1 if info.is_json else 0)
            try:
                value = message.decode()
            except UnicodeDecodeError:
                raise NotSimpleError(f"{name} does not hold text") from None
            row = {
                "stream": local,
                "offset": f"{index + 1:016x}_{position:016x}{incarnation}",
                "position": index,
                "value": value,
                "content_type": info.content_type,
            }
            index += 1
            yield row


def _place(offset: str, tail: str) -> tuple[int, str]:
    """The byte position of an offset, and its last part, which identifies the incarnation of the stream."""
    parts = tail.split("_")
    incarnation = f"_{parts[2]}" if len(parts) > 2 else ""
    return (0 if offset == BEGINNING else int(offset.split("_")[1], 16)), incarnation


@dataclass(frozen=True, slots=True)
class _ColumnType:
    """A simple type of a schema: its name in DuckDB, and how a JSON value becomes one."""

    type: str
    convert: Callable[[Any], Any]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise NotSimpleError("a value is not a whole number")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotSimpleError("a value is not a number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise NotSimpleError("a value is not a boolean")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NotSimpleError("a value is not a text")
    return value


_KINDS: Final = {
    **dict.fromkeys(("long", "bigint"), _ColumnType("BIGINT", _whole)),
    "double": _ColumnType("DOUBLE", _number),
    "boolean": _ColumnType("BOOLEAN", _flag),
    "string": _ColumnType("VARCHAR", _text),
}


def _fields(schema: str) -> dict[str, _ColumnType]:
    fields: dict[str, _ColumnType] = {}
    for part in schema.split(","):
        words = part.replace(":", " ").split()
        if len(words) != 2 or not words[0].isidentifier() or words[1].lower() not in _KINDS:
            raise NotSimpleError(f"the column {part.strip()!r} is not of a simple type")
        fields[words[0]] = _KINDS[words[1].lower()]
    return fields


def _typed(text: str, fields: dict[str, _ColumnType]) -> dict[str, Any]:
    """The fields of a message; a missing one is null. A value that does not fit exactly is left to Spark."""
    try:
        record = msgspec.json.decode(text)
    except msgspec.DecodeError:
        record = None
    if not isinstance(record, dict):
        raise NotSimpleError("a message is not a JSON object")
    return {name: None if record.get(name) is None else kind.convert(record[name]) for name, kind in fields.items()}
