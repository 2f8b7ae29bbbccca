"""The official JavaScript client, its idempotent producer and its live readers, against a real server."""

from __future__ import annotations

from pathlib import Path

from tests.serving import serve
from tests.vitest_run import check_vitest

CLIENT_TESTS = Path(__file__).parent / "npm_client.test.mjs"
EXPECTED = 37


def test_the_official_javascript_client_works() -> None:
    with serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="1", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="1.5") as server:
        check_vitest(CLIENT_TESTS, EXPECTED, server, env={"CLIENT_TEST_URL": server.url}, timeout_secs=280)
