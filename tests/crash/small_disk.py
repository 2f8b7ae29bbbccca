"""Run a server on a small tmpfs that fills up or is read-only, in a separate mount namespace.

    unshare --mount [--user --map-root-user] python -m tests.crash.small_disk SCENARIO MODE DIRECTORY

The exit code is 0 if the server behaved as documented. The mount disappears with the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.cli.test_commands import headwater_command
from tests.serving import Server, serve

SIZES_MIB = {"file-fast": 24, "file-durable": 24, "acid": 160}
"""`acid` keeps a reserve of 128 MiB; that of the file modes follows from the sizes set below."""
RESERVES_MIB = {"file-fast": 3, "file-durable": 3, "acid": 128}
TIMEOUT_S = 90.0
TEXT = {"Content-Type": "text/plain"}


class Stream:
    """A client of one stream that records which appends were acknowledged and which have an unknown outcome."""

    def __init__(self, server: Server) -> None:
        self.http = httpx.Client(base_url=server.url, timeout=60)
        self.acknowledged = ""
        self.unknown: list[str] = []
        self.number = 0

    def create(self) -> None:
        assert self.http.put("/v1/stream/s", headers=TEXT).status_code == 201

    def append(self, size: int = 50) -> int:
        text = f"{self.number}:{'x' * size};"
        self.number += 1
        status = self.http.post("/v1/stream/s", headers=TEXT, content=text).status_code
        if status == 204:
            self.acknowledged += text
        elif status == 503:
            self.unknown.append(text)
        return status

    def read(self) -> str:
        text, offset = "", "-1"
        while True:
            answer = self.http.get("/v1/stream/s", params={"offset": offset})
            assert answer.status_code == 200, answer.text
            text += answer.text
            offset = answer.headers["stream-next-offset"]
            if answer.headers.get("stream-up-to-date") == "true":
                return text

    def ready(self) -> int:
        return self.http.get("/readyz").status_code


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.05)


def fill(disk: Path, leave_bytes: int) -> None:
    """Fill the disk with another file, except for `leave_bytes`."""
    with (disk / "ballast").open("ab") as ballast:
        while (room := free(disk) - leave_bytes) > 0:
            try:
                ballast.write(b"\0" * min(room, 2**20))
                ballast.flush()
            except OSError:
                break


def empty(disk: Path) -> None:
    (disk / "ballast").unlink()


def free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


def nearly_full(server: Server, stream: Stream, disk: Path, mode: str) -> None:
    """Appends are refused before anything is lost, and accepted again when there is space."""
    fill(disk, RESERVES_MIB[mode] * 2**20 // 2)
    until(lambda: stream.append() == 507, "appends are refused")
    answer = stream.http.post("/v1/stream/s", headers=TEXT, content="x")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "storage_full"
    assert stream.http.put("/v1/stream/another", headers=TEXT).status_code == 507
    assert stream.read() == stream.acknowledged
    assert stream.ready() == 503
    server.wait_for_log("writes are refused")
    empty(disk)
    until(lambda: stream.append() == 204, "appends are accepted again")
    assert stream.ready() == 200
    until(lambda: "writes are accepted again" in server.log(), "the log reports it")


def full_at_once(server: Server, stream: Stream, disk: Path) -> None:
    """The disk fills up between two checks of its free space: a write fails, and no later one is acknowledged."""
    fill(disk, 0)
    until(lambda: stream.append(200_000) in {503, 507}, "a write fails")
    for _ in range(5):
        assert stream.append() in {503, 507}
    assert stream.read() == stream.acknowledged
    assert stream.ready() == 503
    assert "refused" in server.log() or "no more writes are taken" in server.log()


def mount(disk: Path, *options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "headwater-test", str(disk)]
    subprocess.run(command, check=True, timeout=60)


def settings_for(mode: str, disk: Path) -> dict[str, Any]:
    return {
        "DS_STORAGE__MODE": mode,
        "DS_STORAGE__DATA_DIR": str(disk / "data"),
        "DS_STORAGE__SEGMENT_BYTES": str(2**20),
        "DS_STORAGE__HOT_TAIL_BYTES": str(2**20),
        "DS_STORAGE__ACID_SHARD_COUNT": "2",
    }


def fills_up(mode: str, disk: Path) -> None:
    mount(disk, f"size={SIZES_MIB[mode]}m")
    settings = settings_for(mode, disk)
    with serve(**settings) as server:
        stream = Stream(server)
        stream.create()
        for _ in range(200):
            assert stream.append() == 204
        nearly_full(server, stream, disk, mode)
        full_at_once(server, stream, disk)
        server.kill()
    empty(disk)
    with serve(**settings) as server:
        again = Stream(server)
        found = again.read()
        rest = found.removeprefix(stream.acknowledged)
        assert found.startswith(stream.acknowledged), "something acknowledged is lost"
        assert rest in {"", *stream.unknown}, "content is present that was never sent, or only in part"
        again.acknowledged = found
        until(lambda: again.append() == 204, "appends are accepted again")
        assert again.read() == again.acknowledged
        assert again.ready() == 200


def is_read_only(mode: str, disk: Path) -> None:
    """Startup fails with one line; after the disk is writable again, all data is there."""
    mount(disk, f"size={SIZES_MIB[mode]}m")
    settings = settings_for(mode, disk)
    with serve(**settings) as server:
        stream = Stream(server)
        stream.create()
        assert stream.append() == 204
    mount(disk, "remount", "ro")
    done = headwater_command("serve", "--port", "0", cwd=Path("/"), **settings)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"headwater: storage: Data directory {disk / 'data'} cannot be opened: ")
    assert "Read-only file system" in done.stderr
    mount(disk, "remount", "rw")
    with serve(**settings) as server:
        assert Stream(server).read() == stream.acknowledged


if __name__ == "__main__":
    {"fills_up": fills_up, "is_read_only": is_read_only}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
