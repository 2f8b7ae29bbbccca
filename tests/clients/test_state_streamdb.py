"""StreamDB of the official npm package `@durable-streams/state`, over our streams and over the registry."""

from __future__ import annotations

from pathlib import Path

from tests.serving import serve
from tests.vitest_run import check_vitest

STREAMDB_TESTS = Path(__file__).parent / "state_streamdb.test.mjs"
EXPECTED = 7


def test_streamdb_works() -> None:
    with serve(
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="2",
        DS_REGISTRY__ENABLED="true",
        DS_EXPIRY__SWEEP_INTERVAL_SECS="0.1",
    ) as server:
        check_vitest(STREAMDB_TESTS, EXPECTED, server, env={"STREAMDB_TEST_URL": server.url}, timeout_secs=280)
