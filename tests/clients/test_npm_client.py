"""The official JavaScript client, its idempotent producer and its live readers, against a real server.

Invariant: the number of tests that ran is asserted, so that a file that stops half-way fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving import serve
from tests.vitest_run import describe_failures, run_vitest

CLIENT_TESTS = Path(__file__).parent / "npm_client.test.mjs"
EXPECTED = 36


@pytest.mark.timeout(150)
def test_the_official_javascript_client_works() -> None:
    with serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="1", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1.5") as server:
        cases = run_vitest(CLIENT_TESTS, env={"CLIENT_TEST_URL": server.url}, timeout_secs=120)
        log = server.log()
    assert not [case for case in cases if case.status != "passed"], describe_failures(cases)
    assert len(cases) == EXPECTED
    assert "Traceback" not in log
