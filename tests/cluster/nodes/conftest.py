"""One Postgres without standbys for the tests that do not depend on replication."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from headwater.cluster.nodes import schema
from headwater.cluster.nodes.schema import connect, create_tables
from headwater.stack.database import LocalPostgres
from tests.postgres.databases import database

SHARDS = 256
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _each_test_begins_without_timelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema._newest, "timeline", 0)


@pytest.fixture(scope="package")
def single() -> Iterator[LocalPostgres]:
    """One server without standbys."""
    with database() as running:
        with connect(running.url, "test") as connection:
            create_tables(connection, "test", SHARDS)
        yield running


@pytest.fixture
def shard() -> int:
    """A shard that no other test has used."""
    return next(_numbers)
