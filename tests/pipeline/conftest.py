"""Fixtures of the pipeline's tests: one Spark session, one server and one Postgres for the whole run.

Invariant: tests never share a stream, a table, a slot or a checkpoint: each uses unique names, or its own database from
`fresh_database`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psycopg
import pytest
from psycopg import sql

from headwater.pipeline.job import JobEnvironment
from headwater.stack.database import LocalPostgres
from tests.pipeline.buckets import Bucket
from tests.postgres.databases import database
from tests.serving import Server
from tests.spark.streams import Streams, roomy

PIPELINE_TEST_TIMEOUT_S = 900

_counter = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the timeout of the Spark tests, plus some time for Postgres."""
    for item in items:
        if str(item.path).startswith(f"{Path(__file__).parent}/") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PIPELINE_TEST_TIMEOUT_S))


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with roomy() as running:
        yield running


@pytest.fixture
def streams(server: Server) -> Iterator[Streams]:
    with httpx.Client(timeout=60) as http:
        yield Streams(f"{server.url}/v1/stream", http)


@pytest.fixture
def bucket(server: Server, streams: Streams, stream_name: Callable[[], str]) -> Bucket:
    return Bucket(server, streams.http, stream_name().lower()[-60:].strip("-"))


@pytest.fixture
def environment(server: Server, tmp_path: Path) -> JobEnvironment:
    return JobEnvironment(f"{server.url}/v1/stream", str(tmp_path / "checkpoints"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[LocalPostgres]:
    """A running Postgres. Tests that stop it must use `tests.postgres.databases.database()` instead."""
    with database() as running:
        yield running


@pytest.fixture
def fresh_database(postgres: LocalPostgres) -> Iterator[Callable[[], str]]:
    """A function that creates a database and returns its address. They are dropped afterwards, with their slots."""
    made: list[str] = []

    def make() -> str:
        name = f"test_{next(_counter)}"
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        made.append(name)
        return postgres.url.rsplit("/", 1)[0] + f"/{name}"

    yield make
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for name in made:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", [name]
            )
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def postgres_url(fresh_database: Callable[[], str]) -> str:
    """The address of an empty database that no other test uses."""
    return fresh_database()
