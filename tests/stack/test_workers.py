"""A stack whose server has several workers, and the conversion of sharded directories of earlier releases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serving import serve, server_environment
from tests.stack.stacks import stack

TEXT = {"Content-Type": "text/plain"}
NAMES = [f"/v1/stream/s-{number}" for number in range(12)]


def test_server_of_a_stack_has_workers_and_everything_is_served(tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        made.up("--workers", "2")
        admin = made.token("--scope", "streams:admin")
        with made.client(admin) as client:
            for name in NAMES:
                assert client.put(name, headers=TEXT, content=b"x").status_code == 201
            assert client.put("/v1/stream/fork", headers={"Stream-Forked-From": NAMES[0]}).status_code == 201
            listed = client.get("/v1/stream/__ds/streams", params={"prefix": "s-"}).json()["streams"]
            assert len(listed) == len(NAMES)
            assert client.get("/ds").json()["buckets"] == []
            assert client.get("/v1/stream/__ds/subscriptions").status_code == 200
        workers = psutil.Process(made.part("server")["pid"]).children()
        assert len(workers) == 2
        os.kill(workers[1].pid, signal.SIGKILL)
        with made.client(admin) as client:
            assert {client.get(name, timeout=60).status_code for name in NAMES} == {200}


def _join(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater", "store", "join-shards", "--data-dir", str(directory)]
    return subprocess.run(
        command, env=server_environment(), cwd=directory, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("mode", ["file-durable", pytest.param("acid", marks=pytest.mark.long)])
def test_sharded_directory_is_joined_by_one_command(tmp_path: Path, mode: str) -> None:
    """The layout of `headwater up --shards 2` of an earlier release: a manifest, and one store per process."""
    settings = {"DS_STORAGE__MODE": mode, "DS_SUBSCRIPTIONS__ENABLED": "false"}
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": 2, "version": 1}))
    for shard in range(2):
        data = tmp_path / f"shard-{shard:02}" / "streams"
        data.parent.mkdir()
        with serve(DS_STORAGE__DATA_DIR=str(data), **settings) as server:  # type: ignore[arg-type]
            for name in NAMES[shard::2]:
                httpx.put(f"{server.url}{name}", headers=TEXT, content=name).raise_for_status()
            httpx.put(f"{server.url}/ds/bucket-{shard}").raise_for_status()
    refused = subprocess.run(
        [sys.executable, "-m", "headwater", "up", "--data-dir", str(tmp_path)],
        env=server_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 2
    assert "headwater store join-shards" in refused.stderr
    done = _join(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "joined 2 shards with 12 streams" in done.stdout
    assert not list(tmp_path.glob("shard-*"))
    again = _join(tmp_path)
    assert (again.returncode, "no shards to join" in again.stderr) == (2, True)
    with serve(DS_STORAGE__DATA_DIR=str(tmp_path / "streams"), DS_SERVER__WORKERS="2", **settings) as server:  # type: ignore[arg-type]
        assert [httpx.get(f"{server.url}{name}?offset=-1").text for name in NAMES] == NAMES
        buckets = httpx.get(f"{server.url}/ds").json()["buckets"]
        assert [bucket["bucket_id"] for bucket in buckets] == ["bucket-0", "bucket-1"]
