"""A server with a real object store: every kind of read of evicted data, outages, and the loss of the disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.seaweedfs import SeaweedFs, seaweedfs
from tests.serving import Server, serve, server_environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MESSAGE = 200_000
COUNT = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFs]:
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


def environment(store: SeaweedFs, directory: Path, prefix: str) -> dict[str, Any]:
    return {
        **store.environment,
        "DS_STORAGE__MODE": "file-durable",
        "DS_STORAGE__DATA_DIR": str(directory),
        "DS_STORAGE__COLD": store.url(prefix),
        "DS_STORAGE__COLD_CACHE_BYTES": str(2**20),
        "DS_STORAGE__COLD_BACKLOG_BYTES": str(3 * 2**20),
        "DS_STORAGE__HOT_TAIL_BYTES": str(2**20),
        "DS_STORAGE__SEGMENT_BYTES": str(2**20),
        "DS_SERVER__LONG_POLL_TIMEOUT_SECS": "2",
    }


def message(number: int) -> bytes:
    return bytes([ord("a") + number % 26]) * MESSAGE


def fill(server: Server, name: str) -> list[str]:
    """Append messages that are soon evicted from the disk; returns the offset after each."""
    url = server.stream_url(name)
    assert httpx.put(url, headers={"Content-Type": "text/plain"}).status_code == 201
    offsets = []
    for number in range(COUNT):
        response = append(url, message(number))
        offsets.append(response.headers["Stream-Next-Offset"])
    return offsets


def append(url: str, body: bytes) -> httpx.Response:
    """Append, with retries while storage is busy."""

    def attempt() -> httpx.Response:
        return httpx.post(url, content=body, headers={"Content-Type": "text/plain"})

    response = wait_until(attempt, lambda response: response.status_code != 503, what="an append is taken")
    assert response.status_code == 204, response.text
    return response


def wait_until_evicted(*directories: Path) -> None:
    def local_bytes() -> int:
        total = 0
        for path in (path for directory in directories for path in (directory / "packs").iterdir()):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        return total

    wait_until(local_bytes, lambda size: size <= 2**20, what="packs leave the disk")


def read_all(url: str, offset: str = "-1") -> bytes:
    data = b""
    while True:
        response = httpx.get(url, params={"offset": offset})
        assert response.status_code == 200, response.text
        data += response.content
        offset = response.headers["Stream-Next-Offset"]
        if "Stream-Up-To-Date" in response.headers:
            return data


def headwater(*arguments: str, env: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater", *arguments]
    return subprocess.run(
        command, env=server_environment(**env), capture_output=True, text=True, timeout=120, check=False
    )


def test_data_in_the_object_store_is_readable_in_every_way_and_survives_a_lost_disk(
    store: SeaweedFs, tmp_path: Path
) -> None:
    directory = tmp_path / "data"
    env = environment(store, directory, "reads")
    expected = b"".join(map(message, range(COUNT)))
    with serve(directory=tmp_path, **env) as server:
        url = server.stream_url("cold")
        offsets = fill(server, "cold")
        wait_until_evicted(directory)
        assert read_all(url) == expected
        # The cache is smaller than the stream, so each of these finds it in the store again.
        framed = httpx.get(url, params={"offset": "-1", "frames": "1"})
        assert framed.content.endswith(expected[-MESSAGE:])
        found = httpx.get(url, params={"offset": "-1", "splits": "4"}).json()["ranges"]
        assert found[-1]["end"] == offsets[-1]
        polled = httpx.get(url, params={"offset": offsets[2], "live": "long-poll"})
        assert polled.content.startswith(message(3))
        with httpx.stream("GET", url, params={"offset": offsets[9], "live": "sse"}) as events:
            wanted = b"data:" + message(10)
            seen = b""
            for piece in events.iter_bytes():
                seen += piece
                if wanted in seen:
                    break
        assert wanted in seen
        assert httpx.get(url, params={"offset": "0000000000000001_0000000000000005"}).status_code == 400
    code = headwater("store", "check", env=env)
    assert code.returncode == 0, code.stdout + code.stderr
    assert '"cold_objects"' in headwater("store", "stats", "--format", "json", env=env).stdout
    refused = headwater("backup", str(tmp_path / "backup"), env=env)
    assert "so a copy of the directory is not a backup" in refused.stderr
    copied = headwater("store", "copy", "--to-mode", "file-durable", "--to-dir", str(tmp_path / "plain"), env=env)
    assert copied.returncode == 0, copied.stderr
    with serve(
        directory=tmp_path, DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=str(tmp_path / "plain")
    ) as server:
        assert read_all(server.stream_url("cold")) == expected
    shutil.rmtree(directory)
    lost = headwater("serve", "--port", "0", env=env)
    assert lost.returncode == 1
    assert "--accept-data-loss" in lost.stderr
    with serve(directory=tmp_path, arguments=("--accept-data-loss",), **env) as server:
        data = read_all(server.stream_url("cold"))
        assert expected.startswith(data)
        assert len(data) >= len(expected) // 2, "only what was in the journal is lost"


def test_outage_of_the_object_store_loses_nothing(store: SeaweedFs, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with serve(directory=tmp_path, **environment(store, directory, "outage")) as server:
        url = server.stream_url("s")
        fill(server, "s")
        wait_until_evicted(directory)
        store.stop()
        response = httpx.get(url, params={"offset": "-1"})
        assert (response.status_code, response.json()["code"]) == (503, "being_fetched")
        assert response.headers["Retry-After"] == "1"
        taken = 0

        def refused() -> bool:
            nonlocal taken
            response = httpx.post(url, content=message(taken), headers={"Content-Type": "text/plain"})
            taken += response.status_code == 204
            return response.status_code == 503 and "object store" in response.json()["detail"]

        wait_until(refused, what="writes are refused")
        assert taken * MESSAGE >= 2 * 2**20, "many were accepted before"
        assert httpx.get(url, params={"offset": "now"}).status_code == 200
        store.start()
        append(url, message(taken))
        taken += 1
        expected = b"".join(map(message, [*range(COUNT), *range(taken)]))
        assert read_all(url) == expected


def test_each_worker_uses_its_part_of_the_object_store(store: SeaweedFs, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    env = environment(store, directory, "workers")
    names = [f"s{number}" for number in range(4)]
    expected = b"".join(map(message, range(COUNT)))
    with serve(directory=tmp_path, arguments=("--workers", "2"), **env) as server:
        for name in names:
            fill(server, name)
        wait_until_evicted(*(directory / "workers-1").iterdir())
        assert all(read_all(server.stream_url(name)) == expected for name in names)
    code = headwater("store", "check", env=env)
    assert code.returncode == 0, code.stdout + code.stderr
    copied = headwater("store", "copy", "--to-mode", "file-durable", "--to-dir", str(tmp_path / "plain"), env=env)
    assert copied.returncode == 0, copied.stderr
    plain: dict[str, Any] = {"DS_STORAGE__MODE": "file-durable", "DS_STORAGE__DATA_DIR": str(tmp_path / "plain")}
    with serve(directory=tmp_path, **plain) as server:
        assert all(read_all(server.stream_url(name)) == expected for name in names)
    for workers in ("1", "3"):
        refused = headwater("serve", "--port", "0", "--workers", workers, env=env)
        assert refused.returncode == 1
        assert "Use --workers 2" in refused.stderr
    shutil.rmtree(directory)
    lost = headwater("serve", "--port", "0", "--workers", "2", env=env)
    assert lost.returncode == 1
    assert "--accept-data-loss" in lost.stderr
    with serve(directory=tmp_path, arguments=("--workers", "2", "--accept-data-loss"), **env) as server:
        for name in names:
            data = read_all(server.stream_url(name))
            assert expected.startswith(data)
            assert len(data) >= len(expected) // 4, "only what was in the journals is lost"
