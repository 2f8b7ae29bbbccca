"""StreamDB of the official npm package `@durable-streams/state`, over our streams and over the registry.

Invariant: the number of tests that ran is asserted, so that a file that stops half-way fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import serve
from tests.vitest_run import describe_failures, run_vitest

STREAMDB_TESTS = Path(__file__).parent / "state_streamdb.test.mjs"
EXPECTED = 7


@pytest.mark.timeout(120)
def test_streamdb_works() -> None:
    with serve(
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="2",
        DS_REGISTRY__ENABLED="true",
        DS_EXPIRY__SWEEP_INTERVAL_SECS="0.1",
    ) as server:
        cases = run_vitest(STREAMDB_TESTS, env={"STREAMDB_TEST_URL": server.url}, timeout_secs=100)
        log = server.log()
    assert not [case for case in cases if case.status != "passed"], describe_failures(cases)
    assert len(cases) == EXPECTED
    assert "Traceback" not in log
