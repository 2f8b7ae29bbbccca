"""Queries without Spark: which are supported, their results, and that Spark gives the same results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from pyspark.sql import SparkSession

from headwater.client import Client, StreamNotFoundError
from headwater.pipeline import quick_query
from headwater.pipeline.quick_query import NotSimpleError, answer
from tests.pipeline.test_query import Shell
from tests.serving import Server, server_environment
from tests.spark.streams import Streams

ORDERS = [
    {"id": 1, "customer": "ann", "total": 2.5, "paid": True},
    {"id": 2, "customer": "bob", "total": 4.0},
    {"id": 3, "customer": "ann", "total": None, "paid": False, "more": [1]},
]
SCHEMA = "id long, customer string, total double, paid boolean"

QUESTIONS = [
    "SELECT count(*) FROM stream('{name}')",
    "SELECT * FROM stream('{name}') ORDER BY position DESC LIMIT 2",
    "SELECT position, value FROM stream('{name}') WHERE position >= 1 AND NOT position = 2",
    "SELECT customer, count(*) AS n, sum(total) AS s, avg(total) AS a, max(id) AS m"
    " FROM stream('{name}', '{schema}') GROUP BY customer HAVING count(*) > 0 ORDER BY customer",
    "SELECT id, total FROM stream('{name}', '{schema}') ORDER BY total, id",
    "SELECT id, upper(customer) AS c FROM stream('{name}', '{schema}') WHERE paid IS NULL OR id IN (1, 3) ORDER BY 1",
    "SELECT DISTINCT customer FROM stream('{name}', '{schema}') ORDER BY customer DESC",
]


@pytest.fixture
def orders(streams: Streams, stream_name: Callable[[], str]) -> str:
    return streams.filled(stream_name(), ORDERS)


def test_simple_queries_give_the_same_results_as_spark(
    spark: SparkSession, server: Server, orders: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(server, capsys)
    with Client(server.url) as client:
        for question in QUESTIONS:
            text = question.format(name=orders, schema=SCHEMA)
            quick = shell("query", text, "--format", "csv")
            assert quick == shell("query", text, "--format", "csv", "--engine", "spark"), text
            assert answer(text, client, 0).rows, "it does not need Spark"


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "SELECT count(*) FROM streams('a')",
        "SELECT count(*) FROM archive('/lake')",
        "SELECT id / 2 FROM stream('{name}')",
        "SELECT value LIKE 'a%' FROM stream('{name}')",
        "SELECT substring(value, 1) FROM stream('{name}')",
        "SELECT * FROM stream('{name}') a JOIN stream('{name}') b",
        "SELECT * FROM (SELECT * FROM stream('{name}'))",
        "SELECT no_such_column FROM stream('{name}')",
        "SELECT id FROM stream('{name}', 'id decimal(3,1)')",
        "SELECT id FROM stream('{name}', 'id boolean')",
        "DELETE FROM stream('{name}')",
    ],
)
def test_other_queries_are_left_to_spark(server: Server, orders: str, text: str) -> None:
    with Client(server.url) as client, pytest.raises(NotSimpleError):
        answer(text.format(name=orders), client, 0)


def test_large_streams_are_left_to_spark(server: Server, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_query, "BYTES_MAX", 10)
    with Client(server.url) as client, pytest.raises(NotSimpleError, match="bytes"):
        answer(f"SELECT count(*) FROM stream('{orders}')", client, 0)


def test_a_missing_stream_is_an_error(server: Server) -> None:
    with Client(server.url) as client, pytest.raises(StreamNotFoundError):
        answer("SELECT count(*) FROM stream('no/such')", client, 0)


def test_neither_spark_nor_pandas_is_imported(server: Server, orders: str) -> None:
    question = QUESTIONS[3].format(name=orders, schema=SCHEMA)
    script = (
        "import sys; from headwater.client import Client; from headwater.pipeline.quick_query import answer\n"
        f"with Client({server.url!r}) as client: found = answer({question!r}, client, 0)\n"
        "assert len(found.rows) == 2\n"
        "sys.exit(', '.join({'pandas', 'pyarrow', 'numpy', 'pyspark'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=server_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
