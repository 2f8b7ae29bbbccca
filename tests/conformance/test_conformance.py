"""The official conformance suite, whole, against a real server in every storage mode.

Invariant: the number of tests that ran is asserted, not only that none failed, so a run that silently leaves
out a group fails.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bench.servers import official_node

from tests.http.certificates import make_certificate
from tests.serving import serve
from tests.vitest_run import Case, describe_failures, run_vitest

SUITE = Path(__file__).parent / "suite.test.mjs"

# Version 0.3.6 with `subscriptions: true`.
DISCOVERED = 338

MODES = ["memory", "file-fast", "file-durable", "acid"]

# The suite itself expects some reads of a few hundred bytes in one piece, so chunks cannot be smaller than this. With
# so little kept in memory, checkpoints are made all the time, and most reads come from files.
SMALL_CHUNKS = {
    "DS_LIMITS__MAX_CHUNK_BYTES": "1024",
    "DS_STORAGE__HOT_TAIL_BYTES": "4096",
    "DS_STORAGE__SEGMENT_BYTES": "65536",
}
TLS = "TLS"
PURE = {"HEADWATER_PURE": "1"}
"""Without the compiled functions."""

# Every mode and every other way to run the server in as few runs as possible; the durable modes have their defaults.
RUNS: dict[str, dict[str, Any]] = {
    "memory, 2 workers": {"DS_STORAGE__MODE": "memory", "DS_SERVER__WORKERS": "2"},
    f"pure Python, file-fast, 1 KiB chunks from files, {TLS}": {
        **PURE,
        "DS_STORAGE__MODE": "file-fast",
        **SMALL_CHUNKS,
    },
    "file-durable": {"DS_STORAGE__MODE": "file-durable"},
    "acid": {"DS_STORAGE__MODE": "acid"},
}
RUNS_ALONE: dict[str, dict[str, Any]] = {
    "memory": {"DS_STORAGE__MODE": "memory"},
    "file-fast": {"DS_STORAGE__MODE": "file-fast"},
    "pure Python, memory": {**PURE, "DS_STORAGE__MODE": "memory"},
    "pure Python, file-durable": {**PURE, "DS_STORAGE__MODE": "file-durable"},
    "1 KiB chunks from files": {"DS_STORAGE__MODE": "file-durable", **SMALL_CHUNKS},
    TLS: {},
}
"""The same, each by itself."""

# A run of the suite waits most of its time, so two share the cores.
RUNS_AT_ONCE = 2

CONNECTIONS = {"as Node has them": "", "a new one per request": "0", "a few that are kept": "6"}

WORKERS = [
    pytest.param(workers, mode, CONNECTIONS[connections], id=f"{workers}-{mode}-{connections}")
    for connections in CONNECTIONS
    for workers in ("2", "3")
    for mode in MODES
]

# Three tests of the suite sit through a whole long-poll.
LONG_POLL_TIMEOUT_SECS = 1


# What the suite subscribes to are receivers that it starts itself, on loopback.
SETTINGS: dict[str, Any] = {
    "DS_SERVER__LONG_POLL_TIMEOUT_SECS": str(LONG_POLL_TIMEOUT_SECS),
    "DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS": "true",
}


def _run(url: str, *, timeout_secs: float = 400, **env: str) -> list[Case]:
    return run_vitest(
        SUITE,
        env={
            "CONFORMANCE_URL": url,
            "CONFORMANCE_LONG_POLL_TIMEOUT_MS": str(LONG_POLL_TIMEOUT_SECS * 1000),
            **env,
        },
        timeout_secs=timeout_secs,
    )


def _assert_all_passed(run: str, cases: list[Case]) -> None:
    assert len(cases) == DISCOVERED, run
    assert not [case for case in cases if case.status == "failed"], f"{run}:\n{describe_failures(cases)}"
    assert sum(case.status == "passed" for case in cases) == DISCOVERED, run


@pytest.mark.timeout(900)
def test_the_whole_suite_passes_in_every_mode_and_over_tls(tmp_path: Path, long: bool) -> None:
    certificate = make_certificate(tmp_path)
    tls: dict[str, Any] = {
        "DS_TLS__CERT_PATH": str(certificate.cert_path),
        "DS_TLS__KEY_PATH": str(certificate.key_path),
    }

    def cases_of(name: str, settings: dict[str, Any]) -> list[Case]:
        is_tls = name.endswith(TLS)
        with serve(**SETTINGS, **settings, **(tls if is_tls else {})) as server:
            assert server.url.startswith("https://" if is_tls else "http://")
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, server.pid, -10)
            return _run(server.url, NODE_EXTRA_CA_CERTS=str(certificate.cert_path))

    with ThreadPoolExecutor(RUNS_AT_ONCE) as pool:
        settings_of = RUNS | RUNS_ALONE if long else RUNS
        runs = {name: pool.submit(cases_of, name, settings) for name, settings in settings_of.items()}
    for name, run in runs.items():
        _assert_all_passed(name, run.result())


@pytest.mark.long
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("workers", "mode", "connections"), WORKERS)
def test_the_whole_suite_passes_with_several_workers(workers: str, mode: str, connections: str) -> None:
    with serve(**SETTINGS, DS_SERVER__WORKERS=workers, DS_STORAGE__MODE=mode) as server:
        # With few connections, live reads of the suite wait for each other.
        cases = _run(server.url, timeout_secs=450, CONFORMANCE_CONNECTIONS=connections)
    _assert_all_passed(f"{workers} workers, {mode}", cases)


def test_the_harness_shows_where_a_server_does_not_conform() -> None:
    """The reference Node server fails one of these five; a harness that sees five passes is blind."""
    with official_node() as reference:
        cases = run_vitest(
            SUITE,
            env={"CONFORMANCE_URL": reference.url, "CONFORMANCE_LONG_POLL_TIMEOUT_MS": "1000"},
            name_pattern="^Caching and ETag",
            timeout_secs=280,
        )
    assert len(cases) == DISCOVERED
    ran = [case for case in cases if case.status != "skipped"]
    assert len(ran) == 5
    assert [case.name for case in ran if case.status == "failed"] == [
        "Caching and ETag should allow If-None-Match in CORS preflight responses"
    ]
