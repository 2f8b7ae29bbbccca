"""Shapes during restarts and kills of every process, with readers that must end with the rows of a query."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest

from tests.serving import server_environment
from tests.shapes import many_readers
from tests.shapes.conditions import TABLE, Conditions, random_row
from tests.shapes.npm_readers import npm_readers
from tests.shapes.serving import Shapes, shapes

ITEMS = "id int PRIMARY KEY, title text, n int"


@pytest.fixture(scope="module")
def own() -> Iterator[Shapes]:
    """Separate processes, which these tests may kill."""
    with shapes("changing, kept, later, things", DS_SHAPES__SSE_TIMEOUT_SECS="5") as started:
        started.sql(f"CREATE TABLE kept ({ITEMS})")
        started.sql("INSERT INTO kept SELECT i, 't' || i, i FROM generate_series(1, 100) i")
        yield started


def test_logs_and_handles_survive_a_kill_of_the_shapes_process(own: Shapes) -> None:
    reading = own.everything(table="kept", where="n > 50")
    own.sql("UPDATE kept SET n = 60 WHERE id = 1")
    reading.live(lambda one: len(one.rows) == 51)
    handle, offset = reading.handle, reading.offset
    own.kill()
    own.sql("UPDATE kept SET n = 70 WHERE id = 2")
    own.start()
    reading.live(lambda one: len(one.rows) == 52)
    assert reading.handle == handle, "the log continues under its handle"
    assert int(reading.offset.split("_")[0]) > int(offset.split("_")[0])
    fresh = own.everything(table="kept", where="n > 50")
    assert fresh.handle == handle
    assert fresh.rows == reading.rows
    assert [one["key"] for one in fresh.messages if "lsn" in one["headers"]] == [
        '"public"."kept"/"1"',
        '"public"."kept"/"2"',
    ], "each change is in the log once"


def test_an_outage_of_postgres_is_503_with_retry_after(own: Shapes) -> None:
    own.sql(f"CREATE TABLE later ({ITEMS})")
    own.sql("INSERT INTO later VALUES (1, 'a', 1)")
    reading = own.everything(table="later")
    own.postgres.kill()
    health = own.url.replace("/v1/shape", "/v1/health")
    while own.http.get(health).status_code != 202:
        pass
    refused = own.get(table="later")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["cache-control"] == "no-store"
    assert set(refused.json()) == {"message"}
    own.postgres.start()
    own.sql("INSERT INTO later VALUES (2, 'b', 2)")
    while own.get(table="later").status_code == 503:
        pass
    reading.live(lambda one: len(one.rows) == 2)


def test_readers_match_sql_after_kills(own: Shapes, long: bool) -> None:
    """At full size: 200 streams over five shapes, 10,000 changes, two kills."""
    count, changes = (200, 10_000) if long else (20, 300)
    many_readers.prepare(own)
    with npm_readers() as readers:
        names = many_readers.open_readers(own, readers, count)
        many_readers.wait_for_all(own, readers, names, 300)
        writer = many_readers.Writer(own.postgres.url, changes, seed=19)
        writer.wait_for(changes // 4)
        own.kill()
        own.start()
        writer.wait_for(changes // 2)
        own.postgres.kill()
        own.postgres.start()
        writer.join()
        many_readers.wait_for_all(own, readers, names, 300)
        events = [readers.ask("events", id=name) for name in names]
    assert not any("must-refetch" in one for one in events), "no kill causes a new snapshot"


def test_conditions_hold_through_random_changes(own: Shapes) -> None:
    """Random conditions and random changes: each shape ends with the rows that Postgres selects."""
    own.sql(TABLE.format(table="things"))
    chance = random.Random(77)
    readings = []
    for _ in range(12):
        made = Conditions(chance)
        text = made.condition(2)
        parameters = {f"params[{number}]": value for number, value in made.parameters.items()}
        readings.append((own.everything(table="things", where=text, columns="id", **parameters), text, made.parameters))
    with psycopg.connect(own.postgres.url) as connection:
        for number in range(150):
            _change(connection, chance, number)
            if chance.random() < 0.5:
                connection.commit()
        connection.commit()
        for reading, text, parameters in readings:
            query = text
            for place, value in sorted(parameters.items(), key=lambda one: -int(one[0])):
                query = query.replace(f"${place}", "'" + value.replace("'", "''") + "'")
            expected = {str(row[0]) for row in connection.execute(f"SELECT id FROM things WHERE {query}".encode())}
            while {row["id"] for row in reading.rows.values()} != expected:
                reading.live()


def _change(connection: psycopg.Connection[tuple[object, ...]], chance: random.Random, number: int) -> None:
    row = random_row(chance)
    names, values = list(row), list(row.values())
    pick = chance.random()
    if pick < 0.5:
        query = f"INSERT INTO things (id, {', '.join(names)}) VALUES (%s{', %s' * len(names)})"
        connection.execute(query.encode(), [number, *values])
    elif pick < 0.9:
        assignments = ", ".join(f"{name} = %s" for name in names)
        connection.execute(f"UPDATE things SET {assignments} WHERE mod(id, 7) = {number % 7}".encode(), values)
    else:
        connection.execute(f"DELETE FROM things WHERE mod(id, 11) = {number % 11}".encode())


def test_changes_arrive_after_a_kill_of_the_stream_server(own: Shapes) -> None:
    reading = own.everything(table="kept")
    count = len(reading.rows)
    own.streams.kill()
    own.sql("INSERT INTO kept VALUES (1000, 'while it was down', 1)")
    own.streams.start()
    reading.live(lambda one: len(one.rows) == count + 1)
    fresh = own.everything(table="kept")
    assert fresh.rows == reading.rows


def test_start_without_a_list_of_tables_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "shapes"],
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "shapes.tables" in done.stderr


def test_stopped_process_exits_cleanly_and_keeps_the_slot(own: Shapes) -> None:
    assert own.stop() == 0
    assert own.sql("SELECT active FROM pg_replication_slots WHERE slot_name = 'headwater_shapes'") == [(False,)]
    own.start()
    assert own.everything(table="kept").rows
