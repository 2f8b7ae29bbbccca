"""The tables of a cluster in Postgres do not grow with the number of commits."""

from __future__ import annotations

from headwater.cluster.nodes.schema import Connection, connect, create_tables
from tests.postgres.databases import database
from tests.waiting import wait_until

UPDATE = "UPDATE headwater.shard SET seq = seq + 1 WHERE id = 0"


def test_table_of_shards_keeps_its_size_when_long_transactions_hold_dead_rows() -> None:
    """Each of them moves rows to other pages. Their former pages are used again only after a vacuum."""
    with (
        database(autovacuum_naptime="1s") as running,
        connect(running.url, "test") as connection,
        connect(running.url, "long") as other,
    ):
        create_tables(connection, "test", 3)
        sizes = []
        for _ in range(2):
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT seq FROM headwater.shard").fetchall()
            for _ in range(500):
                connection.execute(UPDATE)
            other.execute("COMMIT")
            connection.execute(UPDATE)
            wait_for_vacuum(connection)
            sizes.append(one(connection, "SELECT pg_relation_size('headwater.shard')"))
        assert sizes[0] > 3 * 8192, "the long transactions did not hold any rows"
        assert sizes[-1] <= sizes[0] + 8192, f"the table grows: {sizes}"


def wait_for_vacuum(connection: Connection) -> None:
    """A vacuum that began after now."""
    counted = "SELECT autovacuum_count FROM pg_stat_user_tables WHERE relid = 'headwater.shard'::regclass"
    before = one(connection, counted)

    def is_done() -> bool:
        connection.execute(UPDATE)
        return one(connection, counted) >= before + 2

    wait_until(is_done, what="autovacuum", every_s=0.1)


def one(connection: Connection, query: str) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(str(row[0]))
