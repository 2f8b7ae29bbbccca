"""The official JavaScript transports for AI, unchanged, with `durable_response` in Python behind them.

Invariant: the number of tests that ran is asserted, so that a file that stops half-way fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ai.app import serving
from tests.serving import serve
from tests.vitest_run import describe_failures, run_vitest

TRANSPORT_TESTS = Path(__file__).parent / "transports.test.mjs"
EXPECTED = 6


@pytest.mark.timeout(120)
def test_the_official_transports_work_with_python() -> None:
    with serve(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1") as server, serving(f"{server.url}/v1/stream") as app:
        environment = {"AI_TEST_APP": app, "AI_TEST_STREAMS": f"{server.url}/v1/stream"}
        cases = run_vitest(TRANSPORT_TESTS, env=environment, timeout_secs=100)
        log = server.log()
    assert not [case for case in cases if case.status != "passed"], describe_failures(cases)
    assert len(cases) == EXPECTED
    assert "Traceback" not in log
