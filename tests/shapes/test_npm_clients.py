"""The real clients of Electric and TanStack DB: initial sync, live changes, must-refetch, types, large values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.shapes.npm_readers import Readers, npm_readers
from tests.shapes.serving import Shapes

Table = Callable[[str], str]
ITEMS = "id int PRIMARY KEY, title text, n int"


@pytest.fixture(scope="module")
def readers() -> Iterator[Readers]:
    with npm_readers() as started:
        yield started


def filled(running: Shapes, name: str, rows: int) -> str:
    running.sql(f"INSERT INTO {name} SELECT i, 't' || i, i FROM generate_series(1, {rows}) i")
    return name


def change(running: Shapes, name: str) -> None:
    running.sql(f"INSERT INTO {name} VALUES (1001, 'new', 1001)")
    running.sql(f"UPDATE {name} SET title = 'changed' WHERE id = 1")
    running.sql(f"DELETE FROM {name} WHERE id = 2")


@pytest.mark.parametrize("sse", [False, True], ids=["long-poll", "sse"])
def test_a_shape_follows_inserts_updates_and_deletes(
    running: Shapes, readers: Readers, table: Table, sse: bool
) -> None:
    name = filled(running, table(ITEMS), 500)
    everything = f"SELECT id, title, n FROM {name}"
    readers.open(name, running.url, {"table": name}, sse=sse)
    readers.wait_for_sql(running, name, everything)
    change(running, name)
    readers.wait_for_sql(running, name, everything)
    events = readers.ask("events", id=name)
    assert events.count("must-refetch") == 0
    assert [event for event in events[-8:] if event in {"update", "delete"}] == ["update", "delete"]
    readers.ask("close", id=name)


@pytest.mark.parametrize("sse", [False, True], ids=["long-poll", "sse"])
def test_shape_with_a_condition_follows_rows_that_start_or_stop_matching(
    running: Shapes, readers: Readers, table: Table, sse: bool
) -> None:
    name = filled(running, table(ITEMS), 100)
    selected = f"SELECT id, title, n FROM {name} WHERE n > 50 AND title LIKE 't%'"
    params = {"table": name, "where": "n > $1 AND title LIKE $2", "params": ["50", "t%"]}
    readers.open(name, running.url, params, sse=sse)
    readers.wait_for_sql(running, name, selected)
    running.sql(f"UPDATE {name} SET n = 100 - n")
    readers.wait_for_sql(running, name, selected)
    readers.ask("close", id=name)


def test_must_refetch_starts_over_with_the_new_rows(running: Shapes, readers: Readers, table: Table) -> None:
    name = filled(running, table(ITEMS), 50)
    everything = f"SELECT id, title, n FROM {name}"
    for mode in ("poll", "sse"):
        readers.open(f"{name}-{mode}", running.url, {"table": name}, sse=mode == "sse")
        readers.wait_for_sql(running, f"{name}-{mode}", everything)
    running.sql(f"TRUNCATE {name}")
    running.sql(f"INSERT INTO {name} VALUES (7, 'after', 7)")
    for mode in ("poll", "sse"):
        readers.wait_for_sql(running, f"{name}-{mode}", everything)
        assert "must-refetch" in readers.ask("events", id=f"{name}-{mode}")
        readers.ask("close", id=f"{name}-{mode}")


def test_an_added_column_arrives(running: Shapes, readers: Readers, table: Table) -> None:
    name = filled(running, table(ITEMS), 5)
    readers.open(name, running.url, {"table": name}, ["id", "title", "n", "extra"])
    readers.wait([name], [[number, f"t{number}", number, None] for number in range(1, 6)])
    running.sql(f"ALTER TABLE {name} ADD COLUMN extra text DEFAULT 'd'")
    running.sql(f"UPDATE {name} SET extra = 'e' WHERE id = 1")
    readers.wait_for_sql(running, name, f"SELECT id, title, n, extra FROM {name}")
    readers.ask("close", id=name)


def test_eager_collections_of_tanstack_db(running: Shapes, readers: Readers, table: Table) -> None:
    name = filled(running, table(ITEMS), 300)
    everything = f"SELECT id, title, n FROM {name}"
    arguments: dict[str, Any] = {"url": running.url, "params": {"table": name}, "columns": ["id", "title", "n"]}
    readers.ask("collection", id=name, syncMode="eager", **arguments)
    readers.wait_for_sql(running, name, everything)
    change(running, name)
    readers.wait_for_sql(running, name, everything)
    running.sql(f"TRUNCATE {name}")
    running.sql(f"INSERT INTO {name} VALUES (7, 'after', 7)")
    readers.wait_for_sql(running, name, everything)
    readers.ask("close", id=name)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_on_demand_collections_of_tanstack_db(running: Shapes, readers: Readers, table: Table, method: str) -> None:
    """Subsets are loaded by queries, and live changes are merged into them."""
    name = filled(running, table(ITEMS), 300)
    selected = f"SELECT id, title, n FROM {name} WHERE n >= 290"
    arguments: dict[str, Any] = {"url": running.url, "params": {"table": name}, "columns": ["id", "title", "n"]}
    readers.ask("collection", id=name, syncMode="on-demand", subsetMethod=method, **arguments)
    readers.ask("query", id=f"{name}-query", of=name, at_least=290, columns=["id", "title", "n"])
    readers.wait_for_sql(running, f"{name}-query", selected)
    assert len(readers.ask("rows", id=name)) == 11, "only the requested rows were loaded"
    running.sql(f"UPDATE {name} SET title = 'changed' WHERE n > 295")
    running.sql(f"INSERT INTO {name} VALUES (1000, 'new', 1000)")
    running.sql(f"DELETE FROM {name} WHERE n = 290")
    readers.wait_for_sql(running, f"{name}-query", selected)
    # A limited query loads a few rows in order.
    readers.ask("query", id=f"{name}-first", of=name, at_least=10, columns=["id", "title", "n"], limit=5)
    readers.wait_for_sql(running, f"{name}-first", f"SELECT id, title, n FROM {name} WHERE n >= 10 ORDER BY n LIMIT 5")
    for reader in (f"{name}-first", f"{name}-query", name):
        readers.ask("close", id=reader)


TYPES = {
    # The type, the value in SQL, and the value in the client.
    "i2": ("int2", "-32768", -32768),
    "i4": ("int4", "2147483647", 2147483647),
    "i8": ("int8", "9007199254740993", "9007199254740993n"),
    "f4": ("float4", "1.5", 1.5),
    "f8": ("float8", "0.1", 0.1),
    "nan": ("float8", "NaN", None),
    "num": ("numeric", "12345678901234567890.123456789", "12345678901234567890.123456789"),
    "yes": ("bool", "true", True),
    "no": ("bool", "false", False),
    "txt": ("text", 'a "quoted" \\ line\n\u00e9\U0001f600', 'a "quoted" \\ line\n\u00e9\U0001f600'),
    "vc": ("varchar(9)", "varchar", "varchar"),
    "ch": ("char(5)", "ab", "ab   "),
    "uid": ("uuid", "F47AC10B-58CC-4372-A567-0E02B2C3D479", "f47ac10b-58cc-4372-a567-0e02b2c3d479"),
    "js": ("json", '{"a": [1, 2]}', {"a": [1, 2]}),
    "jb": ("jsonb", '{"b":  {"c": null}}', {"b": {"c": None}}),
    "d": ("date", "2024-02-29", "2024-02-29"),
    "t": ("time", "12:34:56.789", "12:34:56.789"),
    "ts": ("timestamp", "2024-02-29 12:00:00.5", "2024-02-29 12:00:00.5"),
    "tz": ("timestamptz", "2024-02-29 12:00:00+02", "2024-02-29 10:00:00+00"),
    "iv": ("interval", "1 day 02:03:04", "P1DT2H3M4S"),
    "by": ("bytea", "\\x00ff", "\\x00ff"),
    "ints": ("int4[]", "{1,NULL,3}", [1, None, 3]),
    "bigs": ("int8[]", "{9007199254740993}", ["9007199254740993n"]),
    "texts": ("text[]", '{"a,b",NULL,"NULL","q\\"q",""}', ["a,b", None, "NULL", 'q"q', ""]),
    "deep": ("int4[][]", "{{1,2},{3,4}}", [[1, 2], [3, 4]]),
    "bools": ("bool[]", "{t,f}", [True, False]),
    "none": ("text", None, None),
}


def test_every_type_is_the_same_in_the_snapshot_and_live(running: Shapes, readers: Readers, table: Table) -> None:
    columns = ", ".join(f"{column} {kind}" for column, (kind, _, _) in TYPES.items())
    name = table(f"id int PRIMARY KEY, {columns}")
    places = ", ".join(["%s"] * (len(TYPES) + 1))
    values = [value for _, value, _ in TYPES.values()]
    running.sql(f"INSERT INTO {name} VALUES ({places})", 1, *values)
    readers.open(name, running.url, {"table": name}, ["id"])
    readers.wait([name], [[1]])
    running.sql(f"INSERT INTO {name} VALUES ({places})", 2, *values)
    readers.wait([name], [[1], [2]])
    expected = {column: value for column, (_, _, value) in TYPES.items()}
    for row in readers.ask("rows", id=name):
        assert {key: value for key, value in row.items() if key != "id"} == expected
    readers.ask("close", id=name)


def test_unchanged_large_values_are_kept(running: Shapes, readers: Readers, table: Table) -> None:
    """A TOASTed value is not in the WAL of an update that does not change it."""
    name = table("id int PRIMARY KEY, title text, n int")
    running.sql(f"ALTER TABLE {name} ALTER COLUMN title SET STORAGE EXTERNAL")
    running.sql(f"INSERT INTO {name} VALUES (1, repeat('x', 3000000), 1)")
    everything = f"SELECT id, title, n FROM {name}"
    for mode in ("default", "full"):
        params = {"table": name, "replica": mode, "where": "title LIKE 'x%'"}
        readers.open(f"{name}-{mode}", running.url, params)
        readers.wait_for_sql(running, f"{name}-{mode}", everything)
    running.sql(f"UPDATE {name} SET n = 2")
    for mode in ("default", "full"):
        readers.wait_for_sql(running, f"{name}-{mode}", everything)
    running.sql(f"UPDATE {name} SET title = repeat('xy', 1000000)")
    for mode in ("default", "full"):
        readers.wait_for_sql(running, f"{name}-{mode}", everything)
        readers.ask("close", id=f"{name}-{mode}")


def test_100_000_rows(running: Shapes, readers: Readers, table: Table) -> None:
    name = filled(running, table(ITEMS), 100_000)
    readers.open(name, running.url, {"table": name})
    readers.wait_for_sql(running, name, f"SELECT id, title, n FROM {name}")
    running.sql(f"UPDATE {name} SET n = n + 1 WHERE id % 20 = 0")
    readers.wait_for_sql(running, name, f"SELECT id, title, n FROM {name}")
    readers.ask("close", id=name)


def test_rejected_shape_is_an_error_in_the_client(running: Shapes, readers: Readers) -> None:
    readers.open("refused", running.url, {"table": "unheard_of"})
    while not (errors := readers.ask("errors")):
        pass
    assert "400" in errors[-1]
    assert "shapes.tables" in json.dumps(errors)
