"""RUST_LOG as used by deployments of the reference server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from tests.serving import serve, server_environment


def test_the_reference_servers_module_shows_our_debug_lines(mode: str) -> None:
    """reference line 1113: per-module filters like durable_streams=debug. It was accepted and showed nothing."""
    with serve(DS_STORAGE__MODE=mode, RUST_LOG="durable_streams=debug") as server:
        httpx.put(server.stream_url("logged"), headers={"Content-Type": "text/plain"})
    server.wait_for_log("/v1/stream/logged")
    with serve(DS_STORAGE__MODE=mode) as server:
        httpx.put(server.stream_url("logged"), headers={"Content-Type": "text/plain"})
    assert "/v1/stream/logged" not in server.log()


def test_malformed_log_filter_prevents_the_start(mode: str, tmp_path: Path) -> None:
    """reference line 504: configurable levels via RUST_LOG. `bogus` was accepted silently."""
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "serve", "--port", "0"],
        cwd=tmp_path,
        env=server_environment(DS_STORAGE__MODE=mode, RUST_LOG="bogus"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert b"bogus" in done.stderr + done.stdout
