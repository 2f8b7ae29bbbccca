"""The offline tools work on the data directory of several workers as on any other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil

from headwater.storage.filesystem import RealFilesystem
from headwater.storage.offline.families import locked
from tests.cluster.workers import process_of
from tests.serving import serve, server_environment
from tests.waiting import wait_until

DURABLE: dict[str, Any] = {"DS_STORAGE__MODE": "file-durable", "DS_SERVER__WORKERS": "2"}
NAMES = [f"s{number}" for number in range(8)]


def _headwater(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "headwater", *arguments]
    done = subprocess.run(
        command,
        cwd=cwd,
        env=server_environment(DS_STORAGE__MODE="file-durable"),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _texts(url: str) -> list[str]:
    return [httpx.get(f"{url}/v1/stream/{name}?offset=-1").text for name in NAMES]


def test_backup_of_running_workers_is_checked_counted_restored_and_copied(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    with serve(directory=home, **DURABLE) as server:
        for name in NAMES:
            httpx.put(f"{server.url}/v1/stream/{name}", headers={"Content-Type": "text/plain"}, content=name)
        wanted = _texts(server.url)
        assert json.loads(_headwater("store", "stats", "--format", "json", cwd=home))["streams"] == len(NAMES)
        _headwater("backup", str(tmp_path / "backup"), cwd=home)
    assert "all checksums and indexes are correct" in _headwater("store", "check", cwd=home)
    assert json.loads(_headwater("store", "stats", "--format", "json", cwd=home))["streams"] == len(NAMES)
    _headwater("restore", str(tmp_path / "backup"), cwd=other)
    with serve(directory=other, **DURABLE) as server:
        assert _texts(server.url) == wanted
    # A copy is one store; it can be divided again.
    copied = tmp_path / "copied" / "data" / "streams"
    copied.parent.mkdir(parents=True)
    _headwater("store", "copy", "--to-mode", "acid", "--to-dir", str(copied), "--worker-shards", "4", cwd=other)
    with serve(directory=tmp_path / "copied", **{**DURABLE, "DS_STORAGE__MODE": "acid"}) as server:
        assert _texts(server.url) == wanted
    assert json.loads((copied / "WORKERS").read_text())["shards"] == 4


def test_backup_waits_for_a_worker_that_is_being_restarted(tmp_path: Path) -> None:
    with serve(directory=tmp_path, **DURABLE) as server:
        for name in NAMES:
            httpx.put(f"{server.url}/v1/stream/{name}", headers={"Content-Type": "text/plain"}, content=name)
        wanted = _texts(server.url)
        supervisor, killed = psutil.Process(server.pid), process_of(server, 1)
        store = next(tmp_path.rglob("workers-1")) / "01"
        supervisor.suspend()
        try:
            killed.kill()
            wait_until(lambda: killed.status() == psutil.STATUS_ZOMBIE, what="the end of the worker")
            command = [sys.executable, "-m", "headwater", "backup", str(tmp_path / "backup")]
            environment = server_environment(DS_STORAGE__MODE="file-durable")
            backup = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
            wait_until(lambda: _is_connected(backup.pid) or backup.poll() is not None, what="the backup to begin")
            with locked(RealFilesystem(), store):
                """The backup has not locked it."""
        finally:
            supervisor.resume()
        _, errors = backup.communicate(timeout=60)
        assert backup.returncode == 0, errors
        assert _texts(server.url) == wanted
    other = tmp_path / "other"
    other.mkdir()
    _headwater("restore", str(tmp_path / "backup"), cwd=other)
    with serve(directory=other, **DURABLE) as server:
        assert _texts(server.url) == wanted


def test_backup_without_a_server_locks_the_directory_and_every_store(tmp_path: Path) -> None:
    with serve(directory=tmp_path, **DURABLE):
        pass
    root = next(tmp_path.rglob("WORKERS")).parent
    with locked(RealFilesystem(), root / "workers-1" / "01"):
        done = subprocess.run(
            [sys.executable, "-m", "headwater", "backup", str(tmp_path / "backup")],
            cwd=tmp_path,
            env=server_environment(DS_STORAGE__MODE="file-durable"),
            check=False,
            capture_output=True,
            text=True,
        )
    assert done.returncode != 0
    assert "is in use by process" in done.stderr
    _headwater("backup", str(tmp_path / "backup"), cwd=tmp_path)


def _is_connected(pid: int) -> bool:
    """Whether a process is connected to the control socket of a worker."""
    try:
        return bool(psutil.Process(pid).net_connections("unix"))
    except psutil.Error:
        return False
