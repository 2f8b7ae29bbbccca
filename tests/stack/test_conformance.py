"""The official conformance suite through Envoy, with a token on every request: the same tests pass as without it."""

from __future__ import annotations

from tests.conformance.test_conformance import DISCOVERED, LONG_POLL_TIMEOUT_SECS, SETTINGS, SUITE
from tests.serving import serve
from tests.stack.proxying import proxied
from tests.vitest_run import describe_failures, run_vitest

OF_THE_PROXY = (
    "^(HTTP Protocol|Browser Security Headers|Long-Poll Operations|Caching and ETag|Chunking and Large Payloads)"
)
"""The groups about what a proxy could change; `make test-long` runs all of them."""
OF_THE_PROXY_COUNT = 33


def test_the_suite_passes_through_envoy_with_a_token(long: bool) -> None:
    """The suite uses the listener that clients use, which requires a token."""
    waits = {"DS_SERVER__LONG_POLL_TIMEOUT_SECS": str(LONG_POLL_TIMEOUT_SECS)}
    with serve(**SETTINGS) as server, proxied(server.port, **waits) as proxy:  # type: ignore[arg-type]
        cases = run_vitest(
            SUITE,
            env={
                "CONFORMANCE_URL": proxy.url,
                "CONFORMANCE_LONG_POLL_TIMEOUT_MS": str(LONG_POLL_TIMEOUT_SECS * 1000),
                "CONFORMANCE_TOKEN": proxy.token(scope="streams:admin"),
            },
            name_pattern=None if long else OF_THE_PROXY,
            timeout_secs=280,
        )
        refused = proxy.raw("PUT", "/v1/stream/without-a-token", "Content-Type: text/plain")
    assert refused.status == 401, "the listener did not require a token"
    assert len(cases) == DISCOVERED
    assert not [case for case in cases if case.status == "failed"], describe_failures(cases)
    assert sum(case.status == "passed" for case in cases) == (DISCOVERED if long else OF_THE_PROXY_COUNT)
