"""The recipes of the cookbook, run in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession

from tests.serving import serve
from tests.spark.querying import wait_until
from tests.spark.session import REPOSITORY
from tests.spark.streams import Streams

PAGE = REPOSITORY / "docs" / "spark-cookbook.md"
ORDERS = [
    {"id": 1, "customer": "ada", "amount": 10.5},
    {"id": 2, "customer": "bob", "amount": 25.5},
    {"id": 3, "customer": "ada", "amount": 30.5},
    {"id": "four"},
    {"id": 5, "customer": "ada", "amount": 20},
    {"id": 6},
]


def recipes() -> list[tuple[str, str]]:
    """The title and code of each recipe."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^## (.+?)\n(.*?)^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(title, code) for title, between, code in found if "\n## " not in between]


def check_published_state(spark: SparkSession, variables: dict[str, Any]) -> None:
    """Listeners are notified shortly after the end of a query."""
    with httpx.Client(timeout=60) as http:
        streams = Streams(variables["url"], http)
        try:

            def published() -> dict[str, Any]:
                """The last state of the recipe's query; late states of other queries may be there, too."""
                events = streams.messages("__pipeline__") if streams.exists("__pipeline__") else []
                return next((event["value"] for event in reversed(events) if event["key"] == "orders-to-lake"), {})

            wait_until(lambda: published().get("status") == "stopped", "the end of the query is published")
            assert (published()["rows"], published()["target"]) == (6, "Parquet")
            page = http.get(f"http://127.0.0.1:{variables['port']}/metrics").text
            assert 'headwater_spark_rows_total{query="orders-to-lake"} 6.0' in page
        finally:
            for name in ("metrics", "published"):
                spark.streams.removeListener(variables[name])
            variables["published"].close()


STATE_STORE = "spark.sql.streaming.stateStore.providerClass"
"""Settings that a recipe changes and that are restored for the others."""

PROOFS = {"Watch a query": check_published_state}
"""Checks of effects that occur shortly after a recipe."""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A server with the streams of the page, and the variables that the recipes share."""
    with serve(DS_REGISTRY__ENABLED="true") as server, httpx.Client(timeout=60) as http:
        streams = Streams(f"{server.url}/v1/stream", http)
        streams.filled("orders", ORDERS)
        streams.filled("state", [{"key": "lamp", "value": "on"}, {"key": "lamp", "value": "off"}])
        streams.filled("visits", [{"user": "ada", "at": at} for at in (0, 60, 7200)] + [{"user": "bob", "at": 5}])
        for name in ("sensors/1", "sensors/2"):
            streams.filled(name, [1])
        yield {"url": streams.root, "work": str(tmp_path_factory.mktemp("work"))}


@pytest.mark.parametrize(("title", "code"), recipes(), ids=lambda value: value if "\n" not in value else "")
def test_recipe(spark: SparkSession, variables: dict[str, Any], title: str, code: str) -> None:
    variables["spark"] = spark
    try:
        exec(compile(code, f"{PAGE.name}: {title}", "exec"), variables)  # noqa: S102 - the page is ours
    finally:
        spark.conf.unset(STATE_STORE)
    if (proof := PROOFS.get(title)) is not None:
        proof(spark, variables)


def test_every_recipe_is_run() -> None:
    assert len(recipes()) == PAGE.read_text(encoding="utf-8").count("```python") == 16
