"""Folds in a Postgres table: a row per stream, type and key, updated incrementally.

    {table}(stream, type, key, value json, ds_offset)          the state
    {table}_places(stream, ds_offset, position)                the offset up to which it is folded

Rows and places change in one transaction, under a lock on the place. Invariant: the rows of a stream are the fold of
exactly the messages before its place. Messages that a repeated batch or a leftover task reads again change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from headwater.pipeline.fold.changes import Effect, Key, StateChange, change_of
from headwater.pipeline.fold.snapshot_client import FoldBase, SnapshotClient, StreamMessage, latest_snapshot
from headwater.pipeline.fold.state import FoldState, StateEntry
from headwater.spark.errors import DataGoneError, SourceRecreatedError, StreamMissingError
from headwater.spark.offsets import BEGINNING, are_of_two_streams, split_token

log = logging.getLogger("headwater.pipeline")

_NUL = "\x00"
_LOCK = 0x68777466  # "hwtf": creating tables concurrently fails in Postgres, even with IF NOT EXISTS


def connect(url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(url, application_name="headwater fold")


@dataclass(frozen=True, slots=True)
class FoldTableResult:
    streams: int
    entries: int
    ignored: int


class FoldTable:
    def __init__(self, connection: psycopg.Connection[Any], name: str) -> None:
        self._connection = connection
        schema, _, table = name.rpartition(".")
        self._table = sql.Identifier(schema, table) if schema else sql.Identifier(table)
        places = f"{table}_places"
        self._places = sql.Identifier(schema, places) if schema else sql.Identifier(places)

    def create_missing(self) -> None:
        with self._connection.transaction():
            self._connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            self._run(
                "CREATE TABLE IF NOT EXISTS {table} (stream text NOT NULL, type text NOT NULL, key text NOT NULL,"
                " value json NOT NULL, ds_offset text NOT NULL, updated_at timestamptz NOT NULL DEFAULT now(),"
                " PRIMARY KEY (stream, type, key))"
            )
            self._run(
                "CREATE TABLE IF NOT EXISTS {places} (stream text PRIMARY KEY, ds_offset text NOT NULL,"
                " position bigint NOT NULL, updated_at timestamptz NOT NULL DEFAULT now())"
            )

    def apply(self, client: SnapshotClient, batch: Mapping[str, list[StreamMessage]]) -> FoldTableResult:
        """Fold the next messages of some streams into their rows, all or nothing."""
        with self._connection.transaction():
            places = self._lock(sorted(batch))
            pending: dict[str, _PendingChanges] = {}
            for stream, rows in batch.items():
                try:
                    found = self._pending(client, stream, places[stream], rows)
                except StreamMissingError as missing:
                    log.warning("%s Its rows stay as they are.", missing)
                    continue
                if found is not None:
                    pending[stream] = found
            entries = self._write(pending) if pending else 0
        return FoldTableResult(len(pending), entries, sum(one.state.ignored for one in pending.values()))

    def seed(self, client: SnapshotClient, streams: Iterable[str]) -> FoldTableResult:
        """Write the snapshots of streams whose first messages are only in a snapshot."""
        snapshots: dict[str, list[StreamMessage]] = {}
        for stream in streams:
            offset = client.head(stream).snapshot
            if offset is not None:
                snapshots[stream] = [StreamMessage(split_token(offset)[0] - 1, offset, b"")]
        return self.apply(client, snapshots) if snapshots else FoldTableResult(0, 0, 0)

    # -- find the changes -----------------------------------------------------------------------------------------

    def _lock(self, streams: list[str]) -> dict[str, str]:
        """Lock and return the place of each stream, in order of name so that two transactions cannot deadlock."""
        self._run(
            "INSERT INTO {places} (stream, ds_offset, position)"
            " SELECT name, %s, 0 FROM unnest(%s::text[]) name ON CONFLICT DO NOTHING",
            [BEGINNING, streams],
        )
        locked = self._run(
            "SELECT stream, ds_offset FROM {places} WHERE stream = ANY(%s) ORDER BY stream FOR UPDATE", [streams]
        )
        return dict(locked.fetchall())

    def _pending(
        self, client: SnapshotClient, stream: str, place: str, rows: list[StreamMessage]
    ) -> _PendingChanges | None:
        end = rows[-1].offset
        position = split_token(place)[0]
        state = FoldState()
        if are_of_two_streams(place, end):
            if are_of_two_streams(end, client.head(stream).offset):
                log.info("stream %r was recreated: messages up to %s are of the old one", stream, end)
                return None
            log.warning(
                "stream %r was deleted and recreated after %s; its state starts from the beginning", stream, place
            )
            place, position = BEGINNING, 0
            state.was_reset = True
        elif split_token(end)[0] <= position:
            if (client.head(stream).position or 0) >= position:
                return None
            log.warning(
                "stream %r ends before %s: it was recreated, and its state starts from the beginning", stream, place
            )
            place, position = BEGINNING, 0
            state.was_reset = True
        if rows[0].position <= position:
            messages: Iterable[bytes] = (row.value for row in rows if row.position >= position)
            return _PendingChanges.of(end, state, messages)
        try:
            return _PendingChanges.of(end, state, client.messages(stream, place, end))
        except SourceRecreatedError as recreated:
            log.info("%s Its rows stay as they are until messages of the new stream arrive.", recreated)
            return None
        except DataGoneError:
            snapshot: FoldBase = latest_snapshot(client, stream)
            restored = _PendingChanges(max(end, snapshot.offset), snapshot.state)
            restored.state.was_reset = True
            restored.state.touched = set(snapshot.state.entries)
            if snapshot.position < split_token(end)[0]:
                restored.add(client.messages(stream, snapshot.offset, end))
            return restored

    # -- write them ----------------------------------------------------------------------------------------------------

    def _write(self, pending: Mapping[str, _PendingChanges]) -> int:
        self._load_bases(pending)
        reset = [stream for stream, one in pending.items() if one.resets]
        if reset:
            self._run("DELETE FROM {table} WHERE stream = ANY(%s)", [reset])
        self._run(
            "CREATE TEMPORARY TABLE fold_changes (stream text, type text, key text, value json, ds_offset text)"
            " ON COMMIT DROP"
        )
        count = 0
        with self._connection.cursor().copy("COPY fold_changes FROM STDIN") as copy:
            for stream, one in pending.items():
                one.apply()
                for key in one.state.touched:
                    if _NUL in key[0] or _NUL in key[1]:
                        # Postgres cannot store this as text. The entry is in the snapshot but not in the table.
                        one.state.ignored += 1
                        continue
                    entry = one.state.entries.get(key)
                    value = entry.value.decode() if entry is not None else None
                    copy.write_row((stream, *key, value, one.end))
                    count += 1
        self._run(
            "DELETE FROM {table} t USING fold_changes n WHERE n.value IS NULL"
            " AND (t.stream, t.type, t.key) = (n.stream, n.type, n.key)"
        )
        self._run(
            "INSERT INTO {table} AS t (stream, type, key, value, ds_offset)"
            " SELECT stream, type, key, value, ds_offset FROM fold_changes WHERE value IS NOT NULL"
            " ON CONFLICT (stream, type, key) DO UPDATE SET value = excluded.value, ds_offset = excluded.ds_offset,"
            " updated_at = now()"
        )
        self._run("DROP TABLE fold_changes")
        ends = [(one.end, split_token(one.end)[0], stream) for stream, one in pending.items()]
        self._run(
            "UPDATE {places} p SET ds_offset = n.ds_offset, position = n.position, updated_at = now()"
            " FROM unnest(%s::text[], %s::bigint[], %s::text[]) AS n (ds_offset, position, stream)"
            " WHERE p.stream = n.stream",
            [list(column) for column in zip(*ends, strict=True)],
        )
        return count

    def _load_bases(self, pending: Mapping[str, _PendingChanges]) -> None:
        """Load the current values that changes modify. All other operations replace the value."""
        wanted = [
            (stream, *key)
            for stream, one in pending.items()
            if not one.state.was_reset
            for key in one.completed
            if _NUL not in key[0] and _NUL not in key[1]
        ]
        if not wanted:
            return
        found = self._run(
            "SELECT t.stream, t.type, t.key, t.value::text FROM {table} t"
            " JOIN unnest(%s::text[], %s::text[], %s::text[]) AS n (stream, type, key)"
            " USING (stream, type, key)",
            [list(column) for column in zip(*wanted, strict=True)],
        )
        for stream, kind, key, value in found:
            pending[stream].state.entries[kind, key] = StateEntry(value.encode(), session=True)

    def _run(self, text: str, arguments: list[Any] | None = None) -> psycopg.Cursor[Any]:
        composed = sql.SQL(text).format(table=self._table, places=self._places)
        return self._connection.execute(composed, arguments)


class _PendingChanges:
    """Changes to fold into the rows of one stream."""

    def __init__(self, end: str, state: FoldState) -> None:
        self.end = end
        self.state = state
        self._changes: list[StateChange] = []

    @classmethod
    def of(cls, end: str, state: FoldState, messages: Iterable[bytes]) -> _PendingChanges:
        pending = cls(end, state)
        pending.add(messages)
        return pending

    def add(self, messages: Iterable[bytes]) -> None:
        for message in messages:
            change = change_of(message)
            if change is None:
                self.state.ignored += 1
            else:
                self._changes.append(change)

    @property
    def resets(self) -> bool:
        return self.state.was_reset or any(change.effect is Effect.RESET for change in self._changes)

    @property
    def completed(self) -> set[Key]:
        """The keys whose current values are needed: chunks are appended to them, or fields are taken from them."""
        return {change.key for change in self._changes if change.effect is Effect.APPEND or change.unchanged}

    def apply(self) -> None:
        for change in self._changes:
            self.state.change(change)
        self._changes = []
