"""Encode rows and changes as messages of the Shape API.

Invariant: a message is a pure function of the shape and the change, so that a replayed change gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from headwater.postgres.pgoutput import Row, RowChange, Transaction
from headwater.shapes.definition import Definition
from headwater.shapes.offsets import LogOffset

encode: Final = msgspec.json.Encoder().encode

Entry = tuple[LogOffset, bytes]


class StaleRowError(Exception):
    """The shape's log is no longer valid: the table was truncated or altered."""


def key_prefix(schema: str, table: str) -> str:
    def escaped(part: str) -> str:
        return part.replace("/", "//").replace(".", "..")

    return f'"{escaped(schema)}"."{escaped(table)}"'


def key_of(prefix: str, row: Mapping[str, Any], key: Sequence[str]) -> str:
    """The key of a row: the table and the values of its key, each escaped."""
    parts = [prefix]
    for name in key:
        value = row[name]
        parts.append("_" if value is None else '"' + value.replace("/", "//") + '"')
    return "/".join(parts)


class RowWriter:
    """Encodes rows of a snapshot as messages."""

    def __init__(self, definition: Definition, headers: Mapping[str, Any] | None = None) -> None:
        name = definition.table.name
        self._prefix = key_prefix(name.schema, name.table)
        self._key = definition.table.key
        self._headers = {"operation": "insert", "relation": [name.schema, name.table], **(headers or {})}

    def message(self, row: Mapping[str, str | None]) -> bytes:
        return encode({"key": key_of(self._prefix, row, self._key), "value": row, "headers": self._headers})


def snapshot_end(xmin: int, xmax: int, running: Iterable[int]) -> bytes:
    headers = {
        "control": "snapshot-end",
        "xmin": str(xmin),
        "xmax": str(xmax),
        "xip_list": [str(one) for one in sorted(running)],
    }
    return encode({"headers": headers})


def up_to_date(lsn: int) -> bytes:
    return encode({"headers": {"control": "up-to-date", "global_last_seen_lsn": str(lsn)}})


MUST_REFETCH: Final = encode([{"headers": {"control": "must-refetch"}}])


class ChangeWriter:
    """Encodes changes of a shape's table as log entries, including rows that start or stop matching the condition."""

    def __init__(self, definition: Definition) -> None:
        table = definition.table
        self._needs_old_rows = definition.needs_old_rows
        self._table = table
        self._columns = definition.columns
        self._key = table.key
        self._prefix = key_prefix(table.name.schema, table.name.table)
        self._relation = [table.name.schema, table.name.table]
        self._matches = definition.filter.predicate if definition.filter is not None else None
        self._is_full = definition.wanted.replica == "full"

    def entries(self, transaction: Transaction) -> list[Entry]:
        """The entries of a transaction; raises `StaleRowError` if the log cannot express it."""
        drafts: list[tuple[int, dict[str, Any]]] = []
        for number, change in enumerate(transaction.changes):
            if change.relation.oid == self._table.oid:
                self._check(change)
                # Two positions per change, because a changed key needs two; clients use 0 (see `offsets`).
                for half, message in enumerate(self._messages(change)):
                    drafts.append((2 * number + 1 + half, message))
        if not drafts:
            return []
        drafts[-1][1]["headers"]["last"] = True
        common = {"lsn": str(transaction.commit_lsn), "txids": [transaction.xid], "relation": self._relation}
        entries = []
        for position, message in drafts:
            message["headers"].update(common, op_position=position)
            entries.append((LogOffset(transaction.commit_lsn, position), encode(message)))
        return entries

    def _check(self, change: RowChange) -> None:
        if change.operation == "truncate":
            raise StaleRowError("the table was truncated")
        if not self._table.matches(change.relation):
            raise StaleRowError("the table was altered")
        if self._needs_old_rows:
            if change.relation.identity != "f":
                raise StaleRowError("the table no longer has REPLICA IDENTITY FULL")
            if change.operation != "insert" and (change.old is None or len(change.old) < len(change.relation.columns)):
                raise StaleRowError("a partition does not have REPLICA IDENTITY FULL")

    def _messages(self, change: RowChange) -> Iterator[dict[str, Any]]:
        old, new = change.old, change.new
        was_in = old is not None if self._matches is None else old is not None and self._matches(old)
        is_in = new is not None if self._matches is None else new is not None and self._matches(new)
        if change.operation == "update" and self._matches is None:
            was_in = True
        if new is not None and is_in and not was_in:
            yield self._insert(new)
        elif was_in and not is_in:
            assert old is not None
            yield self._delete(old)
        elif new is not None and was_in and is_in:
            yield from self._update(old, new)

    def _insert(self, new: Row, **headers: Any) -> dict[str, Any]:
        return {
            "key": key_of(self._prefix, new, self._key),
            "value": self._cut(new),
            "headers": {"operation": "insert", **headers},
        }

    def _delete(self, old: Row, **headers: Any) -> dict[str, Any]:
        value = self._cut(old) if self._is_full else {name: old[name] for name in self._key if name in self._columns}
        return {
            "key": key_of(self._prefix, old, self._key),
            "value": value,
            "headers": {"operation": "delete", **headers},
        }

    def _update(self, old: Row | None, new: Row) -> Iterator[dict[str, Any]]:
        key = key_of(self._prefix, new, self._key)
        if old is not None:
            old_key = key_of(self._prefix, old, self._key)
            if old_key != key:
                yield self._delete(old, key_change_to=key)
                yield self._insert(new, key_change_from=old_key)
                return
        before = {} if old is None else old
        changed = [name for name in self._columns if name in new and (name not in before or before[name] != new[name])]
        if self._is_full:
            message: dict[str, Any] = {"key": key, "value": self._cut(new)}
            message["old_value"] = {name: before[name] for name in changed if name in before}
        elif not changed:
            # Only columns outside the shape changed.
            return
        else:
            kept = dict.fromkeys((*(name for name in self._key if name in self._columns), *changed))
            message = {"key": key, "value": {name: new[name] for name in kept}}
        message["headers"] = {"operation": "update"}
        yield message

    def _cut(self, row: Row) -> dict[str, Any]:
        return {name: row[name] for name in self._columns if name in row}
