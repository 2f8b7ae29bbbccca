"""A division of the streams between workers that is killed, or fails, at any step: the next start completes it, and no
stream is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from headwater.cluster import start
from headwater.cluster.shards import ShardMap
from headwater.config import ServerSettings, Settings, StorageSettings, sections
from headwater.core.records import Image
from headwater.storage.directory import open_directory, set_shards
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import StorageError
from headwater.storage.offline.check import check
from headwater.storage.offline.families import TOOLS, locked, tools_of
from headwater.storage.offline.interface import open_reader
from headwater.storage.worker_stores import WORKERS_NAME, read_worker_stores, store_directories
from tests.forking import forking_server
from tests.serving import serve, server_environment

DIVIDE_S = 60
TEXT = {"Content-Type": "text/plain"}


def _divide(root: Path, mode: str, workers: int, step: int = 0, how: str = "kill") -> tuple[int, str]:
    """Divide a directory in another process, interrupted at a step; returns its exit code and what it reported."""
    arguments = (str(root), mode, str(workers), str(step), how)
    environment = server_environment()
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).resolve().parents[2])
    process = forking_server().start(
        ("tests.cluster.interrupted_divisions",), arguments, root, environment, has_stdin=False
    )
    with closing(process.stderr):
        reported = process.stderr.read().decode()
    return process.wait(timeout=DIVIDE_S), reported


def _content(root: Path) -> dict[int, tuple[Image, bytes]]:
    """The streams of all stores of a directory, with their bytes."""
    filesystem, found = RealFilesystem(), {}
    for store in store_directories(root):
        assert list(check(store)) == []
        with open_reader(tools_of(store), filesystem, store) as reader:
            for stream in reader.catalog:
                pieces = [bytes(piece) for run in reader.runs(stream, 2**20) for piece in run.pieces]
                found[stream.id] = stream.image(), b"".join(pieces)
    return found


def _fill(directory: Path, mode: str) -> Path:
    """Create a store of one process; returns its directory."""
    with (
        serve(directory=directory, DS_STORAGE__MODE=mode, DS_SERVER__WORKERS="1") as server,
        httpx.Client(base_url=server.url) as client,
    ):
        for number in range(6):
            client.put(f"/v1/stream/s{number}", headers=TEXT, content=os.urandom(1000)).raise_for_status()
        forked = {"Stream-Forked-From": "/v1/stream/s1"}
        client.put("/v1/stream/fork", headers=forked).raise_for_status()
        client.put("/ds/bucket").raise_for_status()
        client.put("/ds/bucket/one", headers=TEXT, content=b"in a bucket").raise_for_status()
        tail = client.head("/ds/bucket/one").headers["Stream-Next-Offset"]
        client.put(f"/ds/bucket/one/snapshot/{tail}", content=b"a snapshot").raise_for_status()
    return next(directory.rglob("FORMAT")).parent


@pytest.mark.parametrize("how", ["kill", "fail"])
@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_interrupted_first_division_is_completed_by_the_next_start(
    tmp_path: Path, mode: str, how: str, long: bool
) -> None:
    (tmp_path / "filled").mkdir()
    filled = _fill(tmp_path / "filled", mode)
    content, root = _content(filled), tmp_path / "root"
    shutil.copytree(filled, root)
    code, reported = _divide(root, mode, 2)
    steps = re.search(r"steps=(\d+)", reported)
    assert code == 0, reported
    assert steps, reported
    assert _content(root) == content
    divided = {path.relative_to(root) for path in root.glob("workers-*/*")}
    for step in range(1, int(steps[1]) + 1, 1 if long else int(steps[1]) // 10):
        shutil.rmtree(root)
        shutil.copytree(filled, root)
        code, reported = _divide(root, mode, 2, step, how)
        # Some steps may fail, because the next start repeats them.
        assert code in ((-signal.SIGKILL,) if how == "kill" else (0, 1)), (step, reported)
        assert _content(root) == content, f"after step {step}"
        if how == "fail" and not (root / WORKERS_NAME).exists():
            assert not list(root.glob("workers-*")), f"the copy fills the disk after step {step}"
        code, reported = _divide(root, mode, 2)
        assert code == 0, f"after step {step}: {reported}"
        assert {path.relative_to(root) for path in root.glob("workers-*/*")} == divided
        assert _content(root) == content, f"after step {step}"
        assert not (root / "FORMAT").exists(), f"the undivided store is left after step {step}"


def test_refused_division_changes_nothing(tmp_path: Path) -> None:
    """Another process has the store open, or is dividing it: its files are not removed, and none are added."""
    root = _fill(tmp_path, "file-durable")
    copied = root / "workers-1" / "00" / "packs"
    copied.mkdir(parents=True)
    before = sorted(root.rglob("*"))
    settings = _settings(root, 2)
    with locked(RealFilesystem(), root), pytest.raises(StorageError, match="in use by process"):
        start.start_server(settings, lambda: settings)
    assert sorted(root.rglob("*")) == before
    assert read_worker_stores(root) is None


@pytest.mark.parametrize(("shards", "expected"), [(None, 16), (16, 16), (40, 32), (1, 1)])
def test_auto_is_limited_by_the_shards_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shards: int | None, expected: int
) -> None:
    if shards is not None:
        open_directory(RealFilesystem(), tmp_path, "log").close()
        set_shards(RealFilesystem(), tmp_path, shards)
        with closing(TOOLS["log"].bulk_load(RealFilesystem(), tmp_path, shard_count=1, map_bytes=2**20)) as load:
            load.finish()
    workers: list[int] = []

    def served(_settings: Settings, _load: object, shard_map: ShardMap, _of_worker: object) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: workers.append(shard_map.workers))

    monkeypatch.setattr(start, "WorkerSupervisor", served)
    monkeypatch.setattr(start, "run", lambda *_: workers.append(1))
    monkeypatch.setattr(sections, "SYSTEM", SimpleNamespace(has_workers=True, processors=lambda: 32))
    settings = _settings(tmp_path, 0)
    caplog.set_level("INFO", "headwater.cluster")
    start.start_server(settings, lambda: settings)
    assert workers == [expected]
    assert (f"because the data has {expected} shards" in caplog.text) == (expected < 32)


def _settings(root: Path, workers: int) -> Settings:
    storage = StorageSettings.model_validate({"mode": "file-durable", "data_dir": root})
    return Settings(server=ServerSettings(workers=workers), storage=storage)
