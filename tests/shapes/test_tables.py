"""Partitioned tables, and tables with generated columns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.postgres.databases import packaged_release
from tests.shapes.serving import Reading, Shapes, shapes

TABLES = "events,events_1,lone,lone_1,stored,virtual"


@pytest.fixture(scope="module")
def newest() -> Iterator[Shapes]:
    """Shapes on Postgres 18, which publishes generated columns."""
    with packaged_release(), shapes(TABLES) as running:
        yield running


@pytest.fixture
def events(newest: Shapes) -> Iterator[Shapes]:
    """A table with two partitions, one of which has its columns in another order."""
    newest.sql("CREATE TABLE events (id int, part int, title text, PRIMARY KEY (id, part)) PARTITION BY LIST (part)")
    newest.sql("CREATE TABLE events_1 PARTITION OF events FOR VALUES IN (1)")
    newest.sql("CREATE TABLE events_2 (title text, part int NOT NULL, id int NOT NULL, PRIMARY KEY (id, part))")
    newest.sql("ALTER TABLE events ATTACH PARTITION events_2 FOR VALUES IN (2)")
    newest.sql("INSERT INTO events VALUES (1, 1, 'a'), (2, 2, 'b')")
    yield newest
    newest.sql("DROP TABLE events")


def titles(reading: Reading) -> list[str]:
    return sorted(row["title"] for row in reading.rows.values())


def follow(reading: Reading, *expected: str) -> None:
    reading.live(lambda one: titles(one) == list(expected))


def test_a_partitioned_table_is_served_as_a_whole(events: Shapes) -> None:
    reading = events.everything(table="events")
    handle = reading.handle
    assert sorted(reading.rows) == ['"public"."events"/"1"/"1"', '"public"."events"/"2"/"2"']
    events.sql("INSERT INTO events VALUES (3, 1, 'c'), (4, 2, 'd'); UPDATE events SET title = 'bb' WHERE id = 2")
    follow(reading, "a", "bb", "c", "d")
    # A row that moves to another partition is deleted in one and inserted in the other.
    events.sql("UPDATE events SET part = 2 WHERE id = 1; DELETE FROM events WHERE id = 3")
    follow(reading, "a", "bb", "d")
    assert '"public"."events"/"1"/"2"' in reading.rows
    assert reading.handle == handle


def test_conditions_hold_across_partitions(events: Shapes) -> None:
    reading = events.everything(table="events", where="title < 'c'")
    events.sql("UPDATE events SET title = 'z' WHERE id = 2; INSERT INTO events VALUES (5, 2, 'aa')")
    follow(reading, "a", "aa")
    events.sql("UPDATE events SET title = 'b' WHERE id = 2")
    follow(reading, "a", "aa", "b")


@pytest.mark.parametrize("where", [None, "title < 'y'"])
def test_rows_of_a_new_partition_arrive(events: Shapes, where: str | None) -> None:
    reading = events.everything(table="events", **({"where": where} if where else {}))
    events.sql("CREATE TABLE events_3 PARTITION OF events FOR VALUES IN (3); INSERT INTO events VALUES (6, 3, 'x')")
    # It does not have the replica identity of its table yet, so the old row of this change is not sent.
    events.sql("UPDATE events SET title = 'xx' WHERE id = 6")
    follow(reading, "a", "b", "xx")
    events.sql("UPDATE events SET title = 'xxx' WHERE id = 6")
    follow(reading, "a", "b", "xxx")


@pytest.mark.parametrize(
    "statement",
    ["TRUNCATE events_2", "ALTER TABLE events DETACH PARTITION events_2; DROP TABLE events_2", "DROP TABLE events_2"],
)
def test_rows_of_a_removed_partition_leave_the_shape(events: Shapes, statement: str) -> None:
    reading = events.everything(table="events")
    events.sql(statement)
    follow(reading, "a")


def test_first_partition_of_a_served_table_is_followed(newest: Shapes) -> None:
    newest.sql("CREATE TABLE events (id int PRIMARY KEY, title text) PARTITION BY HASH (id)")
    reading = newest.everything(table="events")
    newest.sql("CREATE TABLE events_1 PARTITION OF events FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    newest.sql("INSERT INTO events VALUES (1, 'first')")
    follow(reading, "first")
    newest.sql("DROP TABLE events")


def test_a_partition_of_a_served_table_is_refused(events: Shapes) -> None:
    refused = events.get(table="events_1")
    assert refused.status_code == 400
    assert "partition of public.events" in refused.json()["errors"]["table"][0]


def test_a_partition_alone_is_served_unless_its_table_is_published(newest: Shapes) -> None:
    newest.sql("CREATE TABLE whole (id int PRIMARY KEY, title text) PARTITION BY RANGE (id)")
    newest.sql("CREATE TABLE lone_1 PARTITION OF whole FOR VALUES FROM (0) TO (10)")
    reading = newest.everything(table="lone_1")
    newest.sql("INSERT INTO whole VALUES (1, 'a')")
    follow(reading, "a")
    newest.http.delete(newest.url, params={"table": "lone_1", "handle": reading.handle})
    newest.sql("ALTER PUBLICATION headwater_shapes ADD TABLE whole")
    refused = newest.get(table="lone_1")
    assert refused.status_code == 400
    assert 'ALTER PUBLICATION "headwater_shapes" DROP TABLE "public"."whole";' in refused.json()["errors"]["table"][0]


def test_stored_generated_columns_are_served(newest: Shapes) -> None:
    """Postgres rejects changes of such a table with REPLICA IDENTITY FULL unless the column is published."""
    newest.sql("CREATE TABLE stored (id int PRIMARY KEY, n int, title text GENERATED ALWAYS AS (n::text) STORED)")
    newest.sql("INSERT INTO stored VALUES (1, 1), (2, 20)")
    every = newest.everything(table="stored")
    some = newest.everything(table="stored", where="title = '20'", replica="full")
    assert titles(every) == ["1", "20"]
    newest.sql("UPDATE stored SET n = 3 WHERE id = 1; UPDATE stored SET n = n + 1 WHERE id = 2")
    newest.sql("INSERT INTO stored VALUES (4, 20)")
    follow(every, "20", "21", "3")
    follow(some, "20")
    assert list(some.rows) == ['"public"."stored"/"4"']


def test_conflicting_publication_is_reported(newest: Shapes) -> None:
    newest.sql("CREATE TABLE lone (id int PRIMARY KEY, n int, title text GENERATED ALWAYS AS (n::text) STORED)")
    newest.sql("CREATE PUBLICATION other FOR TABLE lone")
    refused = newest.get(table="lone", where="n = 1")
    assert refused.status_code == 400
    statement = 'ALTER PUBLICATION "other" SET (publish_generated_columns = stored);'
    assert statement in refused.json()["errors"]["table"][0]
    newest.sql("INSERT INTO lone VALUES (1, 1); UPDATE lone SET n = 2")
    newest.sql(statement)
    reading = newest.everything(table="lone", where="n = 2")
    newest.sql("UPDATE lone SET n = 3")
    follow(reading)


def test_virtual_generated_column_does_not_break_changes(newest: Shapes) -> None:
    newest.sql("CREATE TABLE virtual (id int PRIMARY KEY, title text, twice int GENERATED ALWAYS AS (id * 2) VIRTUAL)")
    newest.sql("INSERT INTO virtual VALUES (1, 'a')")
    reading = newest.everything(table="virtual", columns="id,title")
    newest.sql("UPDATE virtual SET title = 'b'")
    follow(reading, "b")
    refused = newest.get(table="virtual", columns="id,title", where="title = 'b'")
    assert refused.status_code == 400
    assert "virtual generated column" in refused.json()["errors"]["table"][0]
    newest.sql("UPDATE virtual SET title = 'c'")
    follow(reading, "c")
