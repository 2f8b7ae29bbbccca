"""Encode a change as messages: a row (as the reference sync service does), a state change, or an envelope.

Invariant: a format is a pure function of the change and its transaction, so a change that is read again gives the same
bytes.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec

from headwater.postgres.lsn import lsn_to_text
from headwater.postgres.pgoutput import Relation, Row, RowChange

Format = Literal["rows", "changes", "envelopes"]

UNAVAILABLE: Final = "__debezium_unavailable_value"
"""In envelopes, the placeholder for a large value that did not change and is therefore not in the WAL."""
_KEY_HOLE: Final = "{key}"
_OP: Final = {"insert": "c", "update": "u", "delete": "d", "truncate": "t"}

log = logging.getLogger("headwater.postgres")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChangeOrigin:
    """The transaction of a change; rows of the first copy have none."""

    xid: int
    lsn: int
    committed_at: dt.datetime | None
    """None if the source does not report it."""


@dataclass(frozen=True, slots=True)
class TableFormat:
    """How the changes of one table are published, and to which stream."""

    stream: str
    """A name, or one with `{key}` for one stream per key."""
    format: Format
    key: tuple[str, ...]
    operations: frozenset[str]
    """The operations that are published; only inserts in the reference's format `rows`."""

    @property
    def per_key(self) -> bool:
        return _KEY_HOLE in self.stream

    @property
    def needs_key(self) -> bool:
        return self.per_key or self.format == "changes"


def messages_of(change: RowChange, origin: ChangeOrigin | None, how: TableFormat) -> Iterator[tuple[str, bytes]]:
    """The messages for a change, each with its stream."""
    if change.operation not in how.operations:
        return
    if change.operation == "truncate":
        # The keys of the deleted rows are unknown, so nothing can be published to streams of single keys.
        if not how.per_key:
            message = _FORMATTERS[how.format](change, origin, "")
            if message is not None:
                yield how.stream, _encode(message)
        return
    row = (change.new if change.new is not None else change.old) or {}
    if change.new is None and how.needs_key and not row.keys() >= set(how.key):
        # Deleted before the table's replica identity had the key; only the application knows which row it was.
        log.warning("a DELETE of table %s is not published: its old row has no key", change.relation.name)
        return
    key = key_text(row, how.key)
    before = key
    if change.new is not None and change.old is not None and change.old.keys() >= set(how.key):
        before = key_text(change.old, how.key)
    if before != key and (how.per_key or how.format != "rows") and "delete" in how.operations:
        # The row under the old key no longer exists; a reader that folds by key needs its deletion.
        assert change.old is not None
        gone = RowChange("delete", change.relation, None, change.old)
        message = _FORMATTERS[how.format](gone, origin, before)
        if message is not None:
            yield _target(how, before), _encode(message)
        if how.format == "changes":
            change = RowChange("insert", change.relation, change.new, None, change.unchanged)
    message = _FORMATTERS[how.format](change, origin, key)
    if message is not None:
        yield _target(how, key), _encode(message)


def key_text(row: Row, key: Sequence[str]) -> str:
    """The key as text: the value of a single column, or a JSON list of several."""
    values = [row.get(name) for name in key]
    if len(values) == 1:
        value = values[0]
        if isinstance(value, str):
            return value
        return _encode(value).decode()
    return _encode(values).decode()


def _target(how: TableFormat, key: str) -> str:
    return how.stream.replace(_KEY_HOLE, quote(key, safe="")) if how.per_key else how.stream


def _as_row(change: RowChange, _: ChangeOrigin | None, __: str) -> Any:
    return change.new


def _as_change(change: RowChange, origin: ChangeOrigin | None, key: str) -> Any:
    headers: dict[str, Any] = {}
    if change.operation == "truncate":
        headers["control"] = "reset"
    else:
        headers["operation"] = change.operation
    if origin is not None:
        headers |= _headers_of(origin)
    if change.unchanged:
        headers["unchanged"] = list(change.unchanged)
    if change.operation == "truncate":
        return {"headers": headers}
    message: dict[str, Any] = {"type": change.relation.table, "key": key}
    if change.new is not None:
        message["value"] = change.new
    if change.old is not None:
        message["old_value"] = change.old
    message["headers"] = headers
    return message


def _as_envelope(change: RowChange, origin: ChangeOrigin | None, _: str) -> Any:
    after = change.new
    if after is not None and change.unchanged:
        after = after | dict.fromkeys(change.unchanged, UNAVAILABLE)
    source: dict[str, Any] = {
        "connector": "headwater",
        "schema": change.relation.schema,
        "table": change.relation.table,
        "snapshot": origin is None,
    }
    if origin is not None:
        source |= {"txId": origin.xid, "lsn": origin.lsn, "ts_ms": _milliseconds(origin)}
    return {
        "before": change.old,
        "after": after,
        "source": source,
        "op": "r" if origin is None else _OP[change.operation],
        "ts_ms": _milliseconds(origin) if origin is not None else None,
    }


_FORMATTERS: Final[dict[Format, Callable[[RowChange, ChangeOrigin | None, str], Any]]] = {
    "rows": _as_row,
    "changes": _as_change,
    "envelopes": _as_envelope,
}


@functools.lru_cache(maxsize=4)
def _headers_of(origin: ChangeOrigin) -> dict[str, str]:
    """The headers, computed once for all changes of a transaction."""
    at = origin.committed_at
    timestamp = {} if at is None else {"timestamp": at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
    return {"txid": str(origin.xid), **timestamp, "lsn": lsn_to_text(origin.lsn)}


def _milliseconds(origin: ChangeOrigin) -> int | None:
    return None if origin.committed_at is None else int(origin.committed_at.timestamp() * 1000)


def snapshot_row(relation: Relation, row: Row) -> RowChange:
    return RowChange("insert", relation, row)
