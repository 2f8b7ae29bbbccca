"""Conditions: valid and invalid ones, and that Postgres agrees with every result."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import psycopg
import pytest

from headwater.postgres.catalog import TableName
from headwater.postgres.connections import Connection, connect
from headwater.shapes.definition import filter_of
from headwater.shapes.errors import InvalidShapeError
from headwater.shapes.snapshot import consistent_snapshot, read_rows
from headwater.shapes.table import Table, describe
from headwater.shapes.where import UnsupportedError, parse_order
from headwater.shapes.where.evaluator import _like
from tests.postgres.databases import database
from tests.shapes.conditions import COLUMNS, TABLE, Conditions, random_row

ROWS = 120
CONDITIONS = 400


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    with database() as running, connect(running.url) as opened:
        opened.execute(TABLE.format(table="things").encode())
        chance = random.Random(19)
        for number in range(ROWS):
            row = random_row(chance)
            places = ", ".join(["%s"] * (len(row) + 1))
            query = f"INSERT INTO things (id, {', '.join(row)}) VALUES ({places})"
            opened.execute(query.encode(), [number, *row.values()])
        yield opened


@pytest.fixture(scope="module")
def table(connection: Connection) -> Table:
    return describe(connection, TableName("public", "things"))


@pytest.fixture(scope="module")
def rows(connection: Connection, table: Table) -> list[dict[str, str | None]]:
    with consistent_snapshot(connection):
        return list(read_rows(connection, table.name, ["id", *COLUMNS], []))


def selected_by_postgres(connection: Connection, text: str, parameters: dict[str, str]) -> set[str]:
    """The rows that Postgres selects with the text of the condition."""

    def quoted(found: re.Match[str]) -> str:
        return "'" + parameters[found[1]].replace("'", "''") + "'"

    # ILIKE, lower() and upper() fold only ASCII letters, as with COLLATE "C", which the columns have.
    query = f"SELECT id::text FROM things WHERE {re.sub(r'[$]([0-9]+)', quoted, text)}"
    return {row[0] for row in connection.execute(query.encode())}


@pytest.mark.parametrize("seed", range(4))
def test_rendered_and_evaluated_conditions_select_what_postgres_selects(
    connection: Connection, table: Table, rows: list[dict[str, str | None]], seed: int
) -> None:
    chance = random.Random(seed)
    selective = 0
    for _ in range(CONDITIONS // 4):
        made = Conditions(chance)
        text = made.condition()
        expected = selected_by_postgres(connection, text, made.parameters)
        condition = filter_of(connection, table, text, made.parameters, "where")
        evaluated = {row["id"] for row in rows if condition.predicate(row)}
        assert evaluated == expected, text
        with consistent_snapshot(connection):
            rendered = {row["id"] for row in read_rows(connection, table.name, ["id"], [condition.rendered])}
        assert rendered == expected, text
        selective += 0 < len(expected) < ROWS
    assert selective > CONDITIONS // 10, "the conditions must not all select everything or nothing"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("id IN (SELECT 1)", "subqueries"),
        ("EXISTS (SELECT 1)", "subqueries"),
        ("id = (SELECT 1)", "subqueries"),
        ("id + 1 = 2", "unsupported syntax"),
        ("id = -number", "arithmetic"),
        ("pg_sleep(10) IS NULL", "function pg_sleep"),
        ("number = 1; DROP TABLE things", "unsupported syntax"),
        ("number = 1 -- comment", "unsupported syntax|unexpected"),
        ("nothing = 1", "unknown column nothing"),
        ("other.number = 1", "unknown table other"),
        ("number = 'x'", "invalid input syntax"),
        ("label = 1", "cannot compare text with int4"),
        ("number", "must be of type bool"),
        ("state > 'sad'", "= and <> only"),
        ("state = 'unheard of'", "invalid input value for enum"),
        ("label::int = 1", "could fail"),
        ("big::int = 1", "could fail"),
        ("number = $1", "parameter [$]1 was not provided"),
        ("label LIKE 'a\\'", "escape character"),
        ("number = 1 AND", "unexpected the end"),
        ("number = 1 = 1", "unexpected"),
        ("number::bytea = 'x'", "casts to bytea"),
        ("day = 'tomorrowish'", "invalid input syntax"),
        ("number = 99999999999999999999", ""),
        ("(" * 60 + "flag" + ")" * 60, "nested deeper"),
        (" OR ".join(["flag"] * 5000), "more than|longer than"),
        ("label = 'a\0'", "NUL"),
        ("", "unexpected the end"),
    ],
)
def test_unsupported_conditions_say_why(connection: Connection, table: Table, text: str, reason: str) -> None:
    if not reason:
        # A number beyond bigint is numeric, as in Postgres, and does not equal any integer.
        assert filter_of(connection, table, text, {}, "where").rendered.sql
        return
    with pytest.raises(InvalidShapeError, match=reason) as refused:
        filter_of(connection, table, text, {}, "where")
    assert refused.value.parameter == "where"


def test_text_of_a_parameter_is_never_sql(connection: Connection, table: Table) -> None:
    evil = "'; DROP TABLE things; --"
    condition = filter_of(connection, table, "label = $1 OR label = '''; DROP TABLE things'", {"1": evil}, "where")
    assert "DROP" not in condition.rendered.sql
    assert evil in condition.rendered.parameters
    with consistent_snapshot(connection):
        assert list(read_rows(connection, table.name, ["id"], [condition.rendered])) == []


def test_equivalent_conditions_are_the_same_shape(connection: Connection, table: Table) -> None:
    def identity(text: str, **parameters: str) -> str:
        return filter_of(connection, table, text, parameters, "where").identity

    assert identity("number=1 and \"label\"<>'x'") == identity("(NUMBER = 1)  AND things.label != 'x'")
    assert identity("day = '2024-02-29'") == identity("day = DATE '29 Feb 2024'")
    assert identity("number = 1") != identity("number = 2")


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [("%a%b", "xaxb", True), ("a%a", "a", False), ("%aa", "aaa", True), ("_%_", "ab", True), ("_%_", "a", False)],
)
def test_like_matches_pieces_from_both_ends(pattern: str, text: str, matches: bool) -> None:
    assert _like(pattern)(text) is matches


def test_a_pattern_with_many_wildcards_is_not_slow() -> None:
    assert not _like("%a" * 40 + "%b")("a" * 20_000)


def test_order_by_accepts_columns_only() -> None:
    ordered = parse_order('number DESC NULLS LAST, "Label", id asc', "things")
    assert [(one.column, one.descending, one.nulls_first) for one in ordered] == [
        ("number", True, False),
        ("Label", False, None),
        ("id", False, None),
    ]
    for text in ("number; DROP TABLE things", "lower(label)", "number USING <", ""):
        with pytest.raises(UnsupportedError):
            parse_order(text, "things")


def test_a_condition_never_fails_on_a_row(connection: Connection, table: Table) -> None:
    """A valid condition can be evaluated on every row, so that no change can break a shape."""
    with pytest.raises(psycopg.Error):
        connection.execute("SELECT 'abc'::text::int")
    with pytest.raises(InvalidShapeError):
        filter_of(connection, table, "label::int > 0", {}, "where")
