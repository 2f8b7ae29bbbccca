"""`headwater ping` and `headwater bench` against a real server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from tests.cli.test_commands import headwater_command
from tests.serving import serve


def test_ping_prints_response_times(tmp_path: Path) -> None:
    with serve() as server:
        done = headwater_command("ping", "-n", "3", "--url", server.url, cwd=tmp_path)
        named = headwater_command("ping", server.url, "--url", "http://127.0.0.1:1", cwd=tmp_path)
    assert named.stdout.startswith(f"{server.url} responds"), named.stderr
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{server.url} responds: median [\d.]+ ms, .*maximum [\d.]+ ms\n", done.stdout)


def test_bench_measures_appends_and_reads_and_deletes_its_stream(tmp_path: Path) -> None:
    with serve() as server:
        done = headwater_command("bench", server.url, "--seconds", "0.3", "-c", "2", "--size", "50", cwd=tmp_path)
        left = httpx.get(f"{server.url}/v1/stream/__ds/streams").json()["streams"]
    assert done.returncode == 0, done.stderr
    [messages] = re.findall(r"^append: ([\d,]+) messages of 50 bytes over 2 connections", done.stdout, re.MULTILINE)
    [size] = re.findall(r"^read: ([\d,]+) bytes", done.stdout, re.MULTILINE)
    assert int(size.replace(",", "")) == 50 * int(messages.replace(",", "")) > 0
    assert left == []
