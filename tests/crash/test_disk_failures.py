"""Storage failures on a real disk: full, read-only, out of file descriptors, locked, or written by another version.

At startup the server prints one line that says what is wrong. At run time it refuses writes with a clear error and logs
it, reads still work, `/readyz` is 503, and after a restart every acknowledged message is there.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_commands import headwater_command
from tests.serving import serve, server_environment
from tests.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
MODES = ["file-fast", "file-durable", "acid"]
TEXT = {"Content-Type": "text/plain"}


def run_on_small_disk(scenario: str, mode: str, directory: Path) -> None:
    """Run a scenario in a new mount namespace, so that its mount is not visible outside."""
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare is missing; on Debian: apt-get install util-linux"
    command = [unshare, "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    environment = server_environment()
    environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.crash.small_disk", scenario, mode, str(directory)],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", MODES)
def test_appends_are_refused_on_a_full_disk_and_nothing_is_lost(tmp_path: Path, mode: str) -> None:
    run_on_small_disk("fills_up", mode, tmp_path)


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_start_on_a_read_only_disk_fails_with_one_line(tmp_path: Path, mode: str) -> None:
    run_on_small_disk("is_read_only", mode, tmp_path)


@pytest.mark.parametrize("mode", ["file-fast", "file-durable"])
def test_appends_continue_when_no_descriptor_is_left_for_the_next_segment(tmp_path: Path, mode: str) -> None:
    settings: dict[str, Any] = {"DS_STORAGE__MODE": mode, "DS_STORAGE__SEGMENT_BYTES": "65536"}
    acknowledged = ""
    with (
        serve(directory=tmp_path, **settings) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.put("/v1/stream/s", headers=TEXT).status_code == 201
        used = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used, used))
        text = "x" * 5000 + ";"
        while len(acknowledged) < 1_000_000:
            assert http.post("/v1/stream/s", headers=TEXT, content=text).status_code == 204
            acknowledged += text
        assert http.get("/v1/stream/s").text == acknowledged
        assert http.get("/readyz").status_code == 200
        numbers = [int(path.stem) for path in (tmp_path / "data/streams/log").iterdir() if path.stem.isdigit()]
        assert max(numbers) > 10, "new segments were begun with the reserved descriptors"
        server.kill()
    with serve(directory=tmp_path, **settings) as server:
        assert httpx.get(server.stream_url("s")).text == acknowledged
        assert httpx.post(server.stream_url("s"), headers=TEXT, content="more").status_code == 204


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_connections_leave_descriptors_for_storage(tmp_path: Path, mode: str) -> None:
    limit = 256
    settings: dict[str, Any] = {"DS_STORAGE__MODE": mode, "DS_STORAGE__SEGMENT_BYTES": "65536"}
    with ExitStack() as stack:
        command = ("prlimit", f"--nofile={limit // 2}:{limit}")
        server = stack.enter_context(serve(directory=tmp_path, command=command, **settings))
        http = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
        assert http.put("/v1/stream/s", headers=TEXT).status_code == 201
        assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[0] == limit, "the soft limit is raised"
        allowed = re.search(rf"the limit on open files \({limit}\) allows only (\d+) connections", server.log())
        assert allowed is not None
        address = ("127.0.0.1", server.port)
        crowd = [stack.enter_context(closing(socket.create_connection(address, 60))) for _ in range(limit + 50)]
        assert crowd[int(allowed[1])].recv(100).startswith(b"HTTP/1.1 503")
        for _ in range(40):
            assert http.post("/v1/stream/s", headers=TEXT, content="x" * 5000).status_code == 204
        descriptors = Path(f"/proc/{server.pid}/fd")
        wait_until(lambda: len(list(descriptors.iterdir())) < limit, what="connections beyond the limit are closed")
        assert http.get("/readyz").status_code == 200


@pytest.mark.parametrize(
    ("mode", "limit"), [("file-durable", 12), ("file-durable", 14), ("file-durable", 17), ("acid", 16)]
)
def test_start_with_too_few_descriptors_fails_with_one_line(tmp_path: Path, mode: str, limit: int) -> None:
    settings: dict[str, Any] = {"DS_STORAGE__MODE": mode, "DS_STORAGE__DATA_DIR": str(tmp_path / "data")}
    with serve(**settings) as server:
        assert httpx.put(server.stream_url("s"), headers=TEXT, content="kept").status_code == 201
    done = subprocess.run(
        ["prlimit", f"--nofile={limit}", sys.executable, "-m", "headwater", "serve", "--port", "0"],
        cwd=tmp_path,
        env=server_environment(**settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "too many open files" in done.stderr.lower()
    with serve(**settings) as server:
        assert httpx.get(server.stream_url("s")).text == "kept"


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_second_process_on_one_directory_is_rejected(tmp_path: Path, mode: str) -> None:
    with serve(directory=tmp_path, DS_STORAGE__MODE=mode) as server:
        done = headwater_command("serve", "--port", "0", cwd=tmp_path, DS_STORAGE__MODE=mode)
        assert httpx.get(f"{server.url}/readyz").status_code == 200
    assert done.returncode == 1
    assert done.stderr == (
        f"headwater: storage: Data directory data/streams is in use by process {server.pid}."
        " Stop it first, or give this one its own data_dir.\n"
    )


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_newer_format_version_is_rejected(tmp_path: Path, mode: str) -> None:
    with serve(directory=tmp_path, DS_STORAGE__MODE=mode):
        pass
    path = tmp_path / "data/streams/FORMAT"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    done = headwater_command("serve", "--port", "0", cwd=tmp_path, DS_STORAGE__MODE=mode)
    assert done.returncode == 1
    assert done.stderr == (
        "headwater: storage: Data directory data/streams has format version 2; this Headwater reads version 1 only."
        " Open it with the Headwater that wrote it.\n"
    )


@pytest.mark.parametrize(("made", "asked"), [("file-durable", "acid"), ("acid", "file-fast")])
def test_directory_of_another_mode_is_rejected(tmp_path: Path, made: str, asked: str) -> None:
    with serve(directory=tmp_path, DS_STORAGE__MODE=made):
        pass
    done = headwater_command("serve", "--port", "0", cwd=tmp_path, DS_STORAGE__MODE=asked)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "was written by storage mode" in done.stderr
    assert "headwater store copy" in done.stderr


def test_file_modes_can_open_each_others_directory(tmp_path: Path) -> None:
    with serve(directory=tmp_path, DS_STORAGE__MODE="file-fast") as server:
        assert httpx.put(server.stream_url("s"), headers=TEXT, content="kept").status_code == 201
    with serve(directory=tmp_path, DS_STORAGE__MODE="file-durable") as server:
        assert httpx.get(server.stream_url("s")).text == "kept"


def test_another_shard_count_is_rejected(tmp_path: Path) -> None:
    with serve(directory=tmp_path, DS_STORAGE__MODE="acid", DS_STORAGE__ACID_SHARD_COUNT="4"):
        pass
    done = headwater_command(
        "serve", "--port", "0", cwd=tmp_path, DS_STORAGE__MODE="acid", DS_STORAGE__ACID_SHARD_COUNT="8"
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "was made with 4 shards, and storage.acid_shard_count is 8" in done.stderr
