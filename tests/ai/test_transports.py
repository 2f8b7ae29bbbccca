"""The official JavaScript transports for AI, unchanged, with `durable_response` in Python behind them."""

from __future__ import annotations

from pathlib import Path

from tests.ai.processes import application_process, serving
from tests.serving import serve
from tests.vitest_run import check_vitest

TRANSPORT_TESTS = Path(__file__).parent / "transports.test.mjs"
EXPECTED = 7


def test_the_official_transports_work_with_python() -> None:
    with (
        serve(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1") as server,
        serving(f"{server.url}/v1/stream") as app,
        application_process(f"{server.url}/v1/stream", AI_TEST_LEASE_S="2") as doomed,
    ):
        streams = f"{server.url}/v1/stream"
        environment = {"AI_TEST_APP": app, "AI_TEST_DOOMED_APP": doomed, "AI_TEST_STREAMS": streams}
        check_vitest(TRANSPORT_TESTS, EXPECTED, server, env=environment, timeout_secs=280)
