"""How a change is told in a stream: as a row (like the reference sync service), a state change, or an envelope.

Invariant: a format is a pure function of the change and its transaction, so that a change that is read again is told
in the same bytes.
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
from headwater.postgres.pgoutput import Change, Relation, Row

Format = Literal["rows", "changes", "envelopes"]

UNAVAILABLE: Final = "__debezium_unavailable_value"
"""What envelopes have in place of a large value that did not change and is not in the log."""
_KEY_HOLE: Final = "{key}"
_OP: Final = {"insert": "c", "update": "u", "delete": "d", "truncate": "t"}

log = logging.getLogger("headwater.postgres")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Origin:
    """Which transaction a change came with; none for rows of the snapshot."""

    xid: int
    lsn: int
    committed_at: dt.datetime


@dataclass(frozen=True, slots=True)
class TableFormat:
    """How the changes of one table are told, and where."""

    stream: str
    """A name, or one with `{key}` for a stream for each key."""
    format: Format
    key: tuple[str, ...]
    operations: frozenset[str]
    """What is told; inserts alone, for the reference's rows."""

    @property
    def per_key(self) -> bool:
        return _KEY_HOLE in self.stream

    @property
    def needs_key(self) -> bool:
        return self.per_key or self.format == "changes"


def told(change: Change, origin: Origin | None, how: TableFormat) -> Iterator[tuple[str, bytes]]:
    """The messages for a change, each with its stream."""
    if change.operation not in how.operations:
        return
    if change.operation == "truncate":
        # Which keys there were nobody knows, so streams of single keys cannot be told.
        if not how.per_key:
            message = _TELL[how.format](change, origin, "")
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
        # The row under the old key is gone; whoever folds by key must hear of it.
        assert change.old is not None
        gone = Change("delete", change.relation, None, change.old)
        message = _TELL[how.format](gone, origin, before)
        if message is not None:
            yield _target(how, before), _encode(message)
        if how.format == "changes":
            change = Change("insert", change.relation, change.new, None, change.unchanged)
    message = _TELL[how.format](change, origin, key)
    if message is not None:
        yield _target(how, key), _encode(message)


def key_text(row: Row, key: Sequence[str]) -> str:
    """A single column as its text, several as a JSON list."""
    values = [row.get(name) for name in key]
    if len(values) == 1:
        value = values[0]
        if isinstance(value, str):
            return value
        return _encode(value).decode()
    return _encode(values).decode()


def _target(how: TableFormat, key: str) -> str:
    return how.stream.replace(_KEY_HOLE, quote(key, safe="")) if how.per_key else how.stream


def _as_row(change: Change, _: Origin | None, __: str) -> Any:
    return change.new


def _as_change(change: Change, origin: Origin | None, key: str) -> Any:
    headers: dict[str, Any] = {}
    if change.operation == "truncate":
        headers["control"] = "reset"
    else:
        headers["operation"] = change.operation
    if origin is not None:
        headers |= _spelled(origin)
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


def _as_envelope(change: Change, origin: Origin | None, _: str) -> Any:
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


_TELL: Final[dict[Format, Callable[[Change, Origin | None, str], Any]]] = {
    "rows": _as_row,
    "changes": _as_change,
    "envelopes": _as_envelope,
}


@functools.lru_cache(maxsize=4)
def _spelled(origin: Origin) -> dict[str, str]:
    """Spelled once for all changes of a transaction."""
    return {
        "txid": str(origin.xid),
        "timestamp": origin.committed_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "lsn": lsn_to_text(origin.lsn),
    }


def _milliseconds(origin: Origin) -> int:
    return int(origin.committed_at.timestamp() * 1000)


def snapshot_row(relation: Relation, row: Row) -> Change:
    return Change("insert", relation, row)
