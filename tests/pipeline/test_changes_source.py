"""The source of changes, called as Spark calls it but without Spark: offsets, batches, repeats, restarts."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headwater.pipeline import postgres_reader
from headwater.pipeline.postgres_reader import FollowedTable, PostgresReader, ReaderPlan
from headwater.postgres import slots
from headwater.postgres.connections import PostgresSetupError, connect

TABLES = (
    FollowedTable("busy", "busy", "changes"),
    FollowedTable("log", "log", "rows", operations=("insert",)),
)


class Query:
    """Does what Spark does with a source and a checkpoint; `crash` discards everything except the checkpoint.

    A checkpoint has only the ends of batches: the start of the first is requested from the source again.
    """

    def __init__(self, url: str, tables: tuple[FollowedTable, ...] = TABLES, changes_max: int = 500) -> None:
        self.url = url
        self.following = ReaderPlan("by_hand", "by_hand", tables, changes_max, 0.05, 30.0)
        self.reader = PostgresReader(url, self.following)
        self.done: dict[str, Any] | None = None
        self.planned: dict[str, Any] | None = None
        self.received: list[tuple[str, Any]] = []

    def plan(self) -> bool:
        """Record the end of the next batch; return whether there is one."""
        if self.planned is None:
            start = self.start()
            end = self.reader.latestOffset(start, ReadAllAvailable())
            if end == start:
                return False
            self.planned = json.loads(json.dumps(end))
        return True

    def start(self) -> dict[str, Any]:
        return self.done or self.reader.initialOffset()

    def read(self) -> list[tuple[str, Any]]:
        assert self.planned is not None
        rows: list[tuple[str, Any]] = []
        for task in self.reader.partitions(self.start(), self.planned):
            for batch in self.reader.read(task):
                rows += zip(batch["stream"].to_pylist(), map(json.loads, batch["value"].to_pylist()), strict=True)
        return rows

    def step(self) -> bool:
        if not self.plan():
            return False
        self.received += self.read()
        self.done, self.planned = self.planned, None
        assert self.done is not None
        self.reader.commit(self.done)
        return True

    def crash(self) -> None:
        self.reader.stop()
        self.reader = PostgresReader(self.url, self.following)

    def of(self, stream: str) -> list[Any]:
        return [value for name, value in self.received if name == stream]


def folded(messages: list[Any]) -> dict[str, Any]:
    """Fold messages to current rows by key, like any reader of the state protocol; reject inconsistent changes."""
    state: dict[str, Any] = {}
    for message in messages:
        headers = message["headers"]
        if "control" in headers:
            state = {}
        elif headers["operation"] == "delete":
            state.pop(message["key"])
        else:
            assert (message["key"] in state) == (headers["operation"] == "update"), message
            state[message["key"]] = message["value"]
    return state


@pytest.fixture
def tables(postgres_url: str) -> str:
    with psycopg.connect(postgres_url, autocommit=True) as sql:
        sql.execute("CREATE TABLE busy (id int PRIMARY KEY, n int); CREATE TABLE log (id serial PRIMARY KEY, t text)")
        sql.execute("INSERT INTO busy SELECT n, 0 FROM generate_series(1, 1200) AS n")
    return postgres_url


def writing(url: str, stop: threading.Event, seed: int) -> None:
    chance = random.Random(seed)
    with psycopg.connect(url, autocommit=True) as sql:
        while not stop.is_set():
            key = chance.randrange(1500)
            with contextlib.suppress(psycopg.errors.DeadlockDetected), sql.transaction():
                sql.execute("INSERT INTO busy VALUES (%s, 1) ON CONFLICT (id) DO UPDATE SET n = busy.n + 1", [key])
                if chance.random() < 0.3:
                    sql.execute("DELETE FROM busy WHERE id = %s", [chance.randrange(1500)])
                sql.execute("INSERT INTO log (t) VALUES (%s)", [str(key)])
            stop.wait(0.003)


@pytest.mark.parametrize("seed", [1, 2])
def test_copy_and_changes_under_concurrent_writers_and_crashes_give_the_table(tables: str, seed: int) -> None:
    stop = threading.Event()
    writers = [threading.Thread(target=writing, args=(tables, stop, seed * 10 + n)) for n in range(3)]
    for writer in writers:
        writer.start()
    query = Query(tables)
    chance = random.Random(seed)
    try:
        for _ in range(40):
            fate = chance.random()
            if fate < 0.2:
                query.plan()
                query.crash()
            elif fate < 0.4 and query.plan():
                first = query.read()
                query.crash()
                assert query.read() == first, "a batch that is read again, from the slot, is the same"
            else:
                query.step()
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    while query.step():
        pass
    with psycopg.connect(tables) as sql:
        busy = {str(id_): {"id": id_, "n": n} for id_, n in sql.execute("SELECT id, n FROM busy")}
        logged = sorted(row[0] for row in sql.execute("SELECT id FROM log"))
    assert sorted(one["id"] for one in query.of("log")) == logged, "each row of the log once"
    assert folded(query.of("busy")) == busy
    query.reader.stop()


def test_interrupted_first_batch_starts_at_the_same_position(tables: str) -> None:
    query = Query(tables, TABLES[1:])
    query.reader.latestOffset(query.start(), ReadAllAvailable())
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("INSERT INTO log (t) VALUES ('within')")
        assert query.plan()
        first = query.read()
        query.crash()
        sql.execute("INSERT INTO log (t) VALUES ('meanwhile')")
    assert [value["t"] for _, value in first] == ["within"]
    assert query.read() == first
    while query.step():
        pass
    assert [one["t"] for one in query.of("log")] == ["within", "meanwhile"]
    query.reader.stop()
    # A query that then loses its checkpoint starts again, with a new copy.
    again = Query(tables, TABLES[1:])
    while again.step():
        pass
    assert [one["t"] for one in again.of("log")] == ["within", "meanwhile"]
    again.reader.stop()


def test_table_added_later_is_copied_then_followed(tables: str) -> None:
    query = Query(tables, TABLES[:1])
    while query.step():
        pass
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("INSERT INTO log (t) VALUES ('before')")
        query.following = ReaderPlan("by_hand", "by_hand", TABLES, 500, 0.05, 30.0)
        query.crash()
        query.step()
        sql.execute("INSERT INTO log (t) VALUES ('after')")
    while query.step():
        pass
    assert [one["t"] for one in query.of("log")] == ["before", "after"]
    query.reader.stop()


def test_a_large_transaction_is_one_batch_and_is_read_by_its_task(tables: str) -> None:
    query = Query(tables, (FollowedTable("log", "log", "rows", operations=("insert",)),), changes_max=10)
    query.step()
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("INSERT INTO log (t) SELECT n::text FROM generate_series(1, 6000) AS n")
        sql.execute("INSERT INTO log (t) VALUES ('next')")
    assert query.step()
    assert len(query.of("log")) == 6000, "a transaction stays whole"
    while query.step():
        pass
    assert [one["id"] for one in query.of("log")] == list(range(1, 6002))
    query.reader.stop()


def test_writes_to_other_tables_advance_the_slot(tables: str) -> None:
    query = Query(tables, TABLES[1:])
    query.step()
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("CREATE TABLE noise AS SELECT repeat('x', 500) FROM generate_series(1, 10000)")
    assert query.step()
    assert query.of("log") == []
    with connect(tables) as connection:
        state = slots.state(connection, "by_hand")
        assert state is not None
        assert state.current_lsn - state.confirmed_lsn < 1 << 20
    query.reader.stop()


def test_slot_moved_or_dropped_by_another_program_stops_the_query(tables: str) -> None:
    query = Query(tables)
    while query.step():
        pass

    def expect(work: Callable[[], object], said: str) -> None:
        with pytest.raises(slots.SlotLostError, match=said):
            work()

    with connect(tables) as connection:
        connection.execute("INSERT INTO log (t) VALUES ('missed')")
        slots.advance(connection, "by_hand", slots.flushed_lsn(connection))
        expect(query.step, "another client advanced")
        slots.drop(connection, "by_hand")
        expect(query.step, "does not exist")
        slots.create(connection, "by_hand")
        expect(query.step, "recreated it")
    query.reader.stop()


# -- all kinds of tables -----------------------------------------------------------------------------------------------


def finish(query: Query) -> None:
    while query.step():
        pass


def follow_one(url: str, table: FollowedTable) -> Query:
    """A query that has read the first copy and waits for changes."""
    query = Query(url, (table,))
    finish(query)
    return query


def test_a_partitioned_table_is_followed_under_its_own_name(tables: str) -> None:
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute(
            "CREATE TABLE parts (id int, day date, n int, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);"
            "CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');"
            "CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM ('2026-02-01') TO ('2026-03-01')"
        )
        sql.execute("INSERT INTO parts VALUES (1, '2026-01-05', 0), (2, '2026-02-05', 0)")
        query = Query(tables, (*TABLES, FollowedTable("parts", "parts", "changes", full_rows=True)))
        finish(query)
        query.crash()
        sql.execute("INSERT INTO parts VALUES (3, '2026-02-06', 0)")
        sql.execute("UPDATE parts SET n = 1 WHERE id < 3")
        sql.execute("UPDATE parts SET day = '2026-02-07' WHERE id = 1")
        sql.execute("DELETE FROM parts WHERE id = 2")
        sql.execute("INSERT INTO log (t) VALUES ('other tables are followed')")
    finish(query)
    assert sorted((row["id"], row["day"], row["n"]) for row in folded(query.of("parts")).values()) == [
        (1, "2026-02-07", 1),
        (3, "2026-02-06", 0),
    ]
    assert [one["t"] for one in query.of("log")] == ["other tables are followed"]
    query.reader.stop()


def test_a_table_without_a_key_can_still_be_updated_by_its_application(tables: str) -> None:
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("CREATE TABLE nokey (a int, b text)")
        query = follow_one(tables, FollowedTable("nokey", "nokey", "envelopes"))
        sql.execute("INSERT INTO nokey VALUES (1, 'x'), (2, 'y')")
        sql.execute("UPDATE nokey SET b = 'z' WHERE a = 1")
        sql.execute("DELETE FROM nokey WHERE a = 2")
    finish(query)
    assert [(one["op"], one["before"], one["after"]) for one in query.of("nokey")] == [
        ("c", None, {"a": 1, "b": "x"}),
        ("c", None, {"a": 2, "b": "y"}),
        ("u", {"a": 1, "b": "x"}, {"a": 1, "b": "z"}),
        ("d", {"a": 2, "b": "y"}, None),
    ]
    query.reader.stop()
    keyed = Query(tables, (FollowedTable("nokey", "nokey", "changes"),))
    with pytest.raises(PostgresSetupError, match="has no primary key"):
        keyed.step()
    keyed.reader.stop()


def test_configured_key_is_in_every_delete_and_change_of_key(tables: str) -> None:
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("CREATE TABLE users (id int PRIMARY KEY, email text NOT NULL, name text)")
        sql.execute("INSERT INTO users VALUES (1, 'a@x', 'A'), (2, 'b@x', 'B')")
        query = follow_one(tables, FollowedTable("users", "users", "changes", key=("email",)))
        sql.execute("UPDATE users SET email = 'c@x' WHERE id = 1")
        sql.execute("DELETE FROM users WHERE id = 2")
    finish(query)
    changes = [(one["key"], one["headers"]["operation"]) for one in query.of("users")]
    assert changes[2:] == [("a@x", "delete"), ("c@x", "insert"), ("b@x", "delete")]
    query.reader.stop()


def test_generated_columns_are_in_neither_copy_nor_changes(tables: str) -> None:
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute(
            "CREATE TABLE sums (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int,"
            " twice int GENERATED ALWAYS AS (n * 2) STORED)"
        )
        sql.execute("INSERT INTO sums (n) VALUES (1)")
        query = follow_one(tables, FollowedTable("sums", "sums", "changes"))
        sql.execute("INSERT INTO sums (n) VALUES (2)")
    finish(query)
    assert [one["value"] for one in query.of("sums")] == [{"id": 1, "n": 1}, {"id": 2, "n": 2}]
    query.reader.stop()


@pytest.mark.parametrize("meanwhile", ["running", "stopped"])
def test_a_recreated_table_is_reset_copied_and_followed_again(
    tables: str, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_reader, "_CHECK_INTERVAL_S", 0.0)
    query = Query(tables)
    finish(query)
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("UPDATE busy SET n = 7 WHERE id < 10")
        if meanwhile == "stopped":
            query.crash()
        sql.execute("DROP TABLE busy")
        if meanwhile == "running":
            finish(query)
        sql.execute("INSERT INTO log (t) VALUES ('other tables are followed')")
        sql.execute("CREATE TABLE busy (id int PRIMARY KEY, n int)")
        sql.execute("INSERT INTO busy VALUES (1, 100), (2, 200)")
        finish(query)
        sql.execute("INSERT INTO busy VALUES (3, 300)")
        sql.execute("DELETE FROM busy WHERE id = 1")
        query.crash()
        finish(query)
        sql.execute("DROP TABLE busy; CREATE TABLE busy (id int PRIMARY KEY, n int)")
        finish(query)
        assert folded(query.of("busy")) == {}
        sql.execute("INSERT INTO busy VALUES (4, 400)")
    finish(query)
    assert folded(query.of("busy")) == {"4": {"id": 4, "n": 400}}
    assert [one["t"] for one in query.of("log")] == ["other tables are followed"]
    resets = [number for number, one in enumerate(query.of("busy")) if one["headers"].get("control") == "reset"]
    assert len(resets) == 2
    assert folded(query.of("busy")[: resets[1]]) == {"2": {"id": 2, "n": 200}, "3": {"id": 3, "n": 300}}
    query.reader.stop()


def test_a_large_transaction_is_read_with_little_memory(tables: str) -> None:
    query = follow_one(tables, FollowedTable("log", "log", "rows"))
    with psycopg.connect(tables, autocommit=True) as sql:
        sql.execute("INSERT INTO log (t) SELECT repeat('x', 1000) FROM generate_series(1, 60000)")
    tracemalloc.start()
    try:
        assert query.plan()
        assert query.planned is not None
        (task,) = query.reader.partitions(query.start(), query.planned)
        count = sum(len(batch) for batch in query.reader.read(task))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 60000
    assert peak < 55 << 20, f"{peak >> 20} MiB for 60 MB of changes"
    query.reader.stop()
