"""Servers that many tests use: one process each, or with --cluster three nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.serving import Server, serve


@contextmanager
def shared_server(config: pytest.Config, **settings: str) -> Iterator[Server]:
    if config.getoption("--cluster"):
        from tests.cluster.nodes.clusters import cluster_as_one_server

        with cluster_as_one_server(settings) as server:
            yield server
    else:
        with serve(**settings) as server:  # type: ignore[arg-type]
            yield server
