"""Our server, the official Node server, and a shell for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.servers import official_node

from tests.cli.shell import NODE, OURS, Shell
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve(DS_REGISTRY__ENABLED="true", DS_LIMITS__MAX_CHUNK_BYTES="4000") as server:
        yield server


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    with official_node() as running:
        yield running.url


@pytest.fixture
def shell(ours: Server, tmp_path: Path) -> Shell:
    return Shell(ours.url, tmp_path)


@pytest.fixture(params=[OURS, NODE])
def any_shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """A shell for each of both servers."""
    if request.param == OURS:
        return Shell(request.getfixturevalue("ours").url, tmp_path)
    return Shell(request.getfixturevalue("node"), tmp_path)
