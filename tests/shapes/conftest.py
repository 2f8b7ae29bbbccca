"""One running Shape API for the tests of this directory; each test has its own tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from tests.shapes.serving import Shapes, shapes

TABLES = [f"t{number}" for number in range(100)]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def running() -> Iterator[Shapes]:
    """Postgres, a stream server and `headwater shapes`, for all tests that do not stop them."""
    with shapes(", ".join(TABLES)) as started:
        yield started


@pytest.fixture
def table(running: Shapes) -> Callable[[str], str]:
    """Create a table with these columns; returns its name."""

    def create(columns: str) -> str:
        name = TABLES[next(_numbers)]
        running.sql(f"CREATE TABLE {name} ({columns})")
        return name

    return create
