"""The persistent catalog of shapes: one row for each, in the database that they read from.

A row is written before anything else of a shape exists and removed after all of it is deleted, so that a crash leaves
no streams behind. Invariant: only the process that holds the replication slot writes here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from psycopg import sql

from headwater.postgres.catalog import create_once
from headwater.postgres.connections import Connection
from headwater.postgres.lsn import lsn_from_text, lsn_to_text
from headwater.postgres.snapshots import SCHEMA, VisibleTransactions
from headwater.shapes.definition import ShapeDescription

NEW: Final = "new"
COMPLETE: Final = "complete"
DROPPED: Final = "dropped"

_descriptions: Final = msgspec.json.Decoder(ShapeDescription)

_TABLES: Final = """
CREATE SCHEMA IF NOT EXISTS headwater;
CREATE TABLE IF NOT EXISTS headwater.shapes (
    slot text NOT NULL,
    handle text PRIMARY KEY,
    state text NOT NULL,
    wanted jsonb NOT NULL,
    identity text NOT NULL,
    snapshot text,
    lsn pg_lsn,
    chunks text[] NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS headwater.shape_owners (slot text PRIMARY KEY, owner text NOT NULL)"""


@dataclass(frozen=True, slots=True)
class StoredShape:
    handle: str
    state: str
    wanted: ShapeDescription
    identity: str
    seen: VisibleTransactions | None
    chunks: tuple[str, ...]


class ShapeCatalog:
    """The shapes of one slot."""

    def __init__(self, slot: str) -> None:
        self._slot = slot

    def prepare(self, connection: Connection) -> None:
        create_once(connection, sql.SQL(_TABLES))

    def take_over(self, connection: Connection, owner: str) -> bool:
        """Record the new owner of the slot; return whether it was the owner before."""
        row = connection.execute(f"SELECT owner FROM {SCHEMA}.shape_owners WHERE slot = %s", [self._slot]).fetchone()
        connection.execute(
            f"INSERT INTO {SCHEMA}.shape_owners (slot, owner) VALUES (%s, %s)"
            " ON CONFLICT (slot) DO UPDATE SET owner = excluded.owner",
            [self._slot, owner],
        )
        return row == (owner,)

    def load(self, connection: Connection) -> list[StoredShape]:
        rows = connection.execute(
            f"SELECT handle, state, wanted::text, identity, snapshot, lsn::text, chunks FROM {SCHEMA}.shapes"
            " WHERE slot = %s ORDER BY created_at",
            [self._slot],
        ).fetchall()
        return [
            StoredShape(
                handle,
                state,
                _descriptions.decode(wanted),
                identity,
                _seen(snapshot, lsn) if snapshot is not None else None,
                tuple(chunks),
            )
            for handle, state, wanted, identity, snapshot, lsn, chunks in rows
        ]

    def add(self, connection: Connection, handle: str, wanted: ShapeDescription, identity: str) -> None:
        connection.execute(
            f"INSERT INTO {SCHEMA}.shapes (slot, handle, state, wanted, identity) VALUES (%s, %s, %s, %s, %s)"
            " ON CONFLICT (handle) DO NOTHING",
            [self._slot, handle, NEW, msgspec.json.encode(wanted).decode(), identity],
        )

    def complete(self, connection: Connection, handle: str, seen: VisibleTransactions, chunks: Sequence[str]) -> None:
        running = ",".join(map(str, sorted(seen.running)))
        connection.execute(
            f"UPDATE {SCHEMA}.shapes SET state = %s, snapshot = %s, lsn = %s, chunks = %s WHERE handle = %s",
            [COMPLETE, f"{seen.xmin}:{seen.xmax}:{running}", lsn_to_text(seen.lsn), list(chunks), handle],
        )

    def mark_dropped(self, connection: Connection, handle: str) -> None:
        connection.execute(f"UPDATE {SCHEMA}.shapes SET state = %s WHERE handle = %s", [DROPPED, handle])

    def drop_all(self, connection: Connection) -> None:
        connection.execute(f"UPDATE {SCHEMA}.shapes SET state = %s WHERE slot = %s", [DROPPED, self._slot])

    def remove(self, connection: Connection, handle: str) -> None:
        connection.execute(f"DELETE FROM {SCHEMA}.shapes WHERE handle = %s", [handle])


def _seen(snapshot: str, lsn: str) -> VisibleTransactions:
    xmin, xmax, running = snapshot.split(":")
    return VisibleTransactions(
        int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))), lsn_from_text(lsn)
    )
