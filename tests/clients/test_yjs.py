"""The official Yjs provider and server (`@durable-streams/y-durable-streams`), unchanged, over our streams."""

from __future__ import annotations

from pathlib import Path

from tests.serving import serve
from tests.vitest_run import check_vitest

YJS_TESTS = Path(__file__).parent / "yjs.test.mjs"
EXPECTED = 8


def test_yjs_documents_work() -> None:
    with serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="2", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="2") as server:
        check_vitest(YJS_TESTS, EXPECTED, server, env={"YJS_TEST_URL": server.url}, timeout_secs=280)
