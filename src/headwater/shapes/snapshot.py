"""Read the rows of a table from one consistent snapshot, as the text that replication would send for them.

Everything is read in one REPEATABLE READ transaction whose snapshot is recorded, so that each change is known to be in
it or after it. Invariant: memory use is bounded by the size of a chunk and of a row, not by the size of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from headwater.postgres.catalog import TableName
from headwater.postgres.connections import Connection
from headwater.postgres.lsn import lsn_from_text
from headwater.postgres.snapshots import VisibleTransactions
from headwater.shapes.where.rendering import Rendered, quoted

_FETCH_BYTES: Final = 512 << 10
_FETCH_ROWS_FIRST: Final = 50
_FETCH_ROWS_MAX: Final = 2_000


@contextmanager
def consistent_snapshot(connection: Connection) -> Iterator[VisibleTransactions]:
    """A read-only transaction with a fixed snapshot; yields the transactions that it sees."""
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        row = connection.execute("SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        xmin, xmax, running = row[0].split(":")
        yield VisibleTransactions(
            int(xmin), int(xmax), frozenset(map(int, filter(None, running.split(",")))), lsn_from_text(row[1])
        )


def read_rows(
    connection: Connection,
    table: TableName,
    columns: Sequence[str],
    conditions: Sequence[Rendered],
    ending: str = "",
) -> Iterator[dict[str, str | None]]:
    """The rows that match all conditions, within the open transaction. `ending` is ORDER BY and LIMIT."""
    query = f"SELECT {', '.join(map(quoted, columns))} FROM {quoted(table.schema)}.{quoted(table.table)}"
    if conditions:
        query += " WHERE " + " AND ".join(one.sql for one in conditions)
    parameters = [value for one in conditions for value in one.parameters]
    cursor = connection.cursor()
    # Every name in the query is quoted and every value is bound.
    cursor.execute(f"DECLARE shape_rows NO SCROLL CURSOR FOR {query}{ending}".encode(), parameters)
    count = _FETCH_ROWS_FIRST
    while True:
        cursor.execute(f"FETCH FORWARD {count} FROM shape_rows".encode())
        result = cursor.pgresult
        assert result is not None
        size = 0
        for number in range(result.ntuples):
            values = [result.get_value(number, place) for place in range(len(columns))]
            size += sum(len(value) for value in values if value is not None)
            yield {name: None if value is None else value.decode() for name, value in zip(columns, values, strict=True)}
        if result.ntuples < count:
            break
        # Fetch fewer rows at a time if they are wide.
        count = max(1, min(_FETCH_ROWS_MAX, _FETCH_BYTES * count // max(1, size)))
    cursor.execute("CLOSE shape_rows")
