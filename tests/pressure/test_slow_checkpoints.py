"""No append waits for a checkpoint: its wait is at most that of two syncs of the journal."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.http.raw import RawConnection
from tests.measured import least
from tests.pressure.faults import CHECKPOINT_WAITS, HOLD, JOURNAL_SYNCS
from tests.pressure.load import MIB, TEXT
from tests.pressure.many_connections import percentile
from tests.serving import Server, serve

WRITERS = 4
APPENDS = 20
BODY = b"c" * 400_000
SYNCS_MAX = 2
"""The rest of a sync that has begun, and the next one, which has the append."""
DISK = Path("/var/tmp")
ROUNDS = 300
HTTP_MS = 5.0
"""What a request takes beside the disk, with a busy client."""


class Writers:
    """Clients that append in turn, each to its own stream."""

    def __init__(self, server: Server, stack: ExitStack, limit_s: float) -> None:
        self._connections = [stack.enter_context(RawConnection(server)) for _ in range(WRITERS)]
        self._syncs = server.directory / JOURNAL_SYNCS
        self._appends = 0
        for number, connection in enumerate(self._connections):
            connection.socket.settimeout(limit_s)
            assert connection.request("PUT", f"/v1/stream/{number}", headers=TEXT).status == 201

    def append(self) -> int:
        """Append once; return how many syncs of the journal there were before the response."""
        number = self._appends % WRITERS
        self._appends += 1
        before = self._syncs.stat().st_size
        answer = self._connections[number].request("POST", f"/v1/stream/{number}", headers=TEXT, body=BODY)
        assert answer.status == 204
        return self._syncs.stat().st_size - before


def most_syncs(fault: str, mode: str, limit_s: float) -> int:
    """For how many syncs of the journal an append waits at most while a checkpoint waits for the disk."""
    with (
        serve(
            program=("tests.pressure.faults", fault),
            DS_STORAGE__MODE=mode,
            DS_STORAGE__SEGMENT_BYTES=str(MIB),
            DS_STORAGE__HOT_TAIL_BYTES=str(64 * MIB),
            DS_LIMITS__MAX_STREAM_BYTES="0",
        ) as server,
        ExitStack() as stack,
    ):
        hold = server.directory / HOLD
        writers = Writers(server, stack, limit_s)
        hold.touch()
        try:
            for _ in range(APPENDS):
                writers.append()
            server.wait_for_log(CHECKPOINT_WAITS)
            return max(writers.append() for _ in range(APPENDS))
        finally:
            hold.unlink()


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_no_append_waits_for_a_checkpoint(mode: str) -> None:
    """An append that waited for the checkpoint would not be answered."""
    assert most_syncs("holds_checkpoints", mode, limit_s=60.0) <= SYNCS_MAX


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_waiting_for_a_checkpoint_is_noticed(mode: str) -> None:
    with pytest.raises(TimeoutError):
        most_syncs("syncs_one_file_at_a_time", mode, limit_s=2.0)


def raw_syncs_waited(mode: str) -> float:
    """For how many raw writes and syncs of what a commit has, made at the same time, a small append waits while large
    ones keep checkpoints running. The larger of the medians and the 90th percentiles."""
    with (
        tempfile.TemporaryDirectory(dir=DISK) as directory,
        serve(
            directory=Path(directory),
            DS_STORAGE__MODE=mode,
            DS_STORAGE__SEGMENT_BYTES=str(4 * MIB),
            DS_STORAGE__HOT_TAIL_BYTES=str(4 * MIB),
            DS_LIMITS__MAX_STREAM_BYTES="0",
        ) as server,
        RawConnection(server) as small,
        RawConnection(server) as large,
    ):
        ended = threading.Event()
        syncs: list[float] = []

        def fill() -> None:
            while not ended.is_set():
                assert large.request("POST", "/v1/stream/large", headers=TEXT, body=BODY).status in {204, 503}

        def sync() -> None:
            with (Path(directory) / "probe").open("wb") as file:
                while not ended.is_set():
                    began = time.monotonic()
                    file.seek(0)
                    file.write(BODY)
                    file.flush()
                    os.fdatasync(file.fileno())
                    syncs.append(time.monotonic() - began)

        for name in ("small", "large"):
            assert small.request("PUT", f"/v1/stream/{name}", headers=TEXT).status == 201
        threads = [threading.Thread(target=work) for work in (fill, sync)]
        for thread in threads:
            thread.start()
        appends: list[float] = []
        try:
            while len(appends) < ROUNDS:
                began = time.monotonic()
                if small.request("POST", "/v1/stream/small", headers=TEXT, body=b"x").status == 204:
                    appends.append(time.monotonic() - began)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    return max((percentile(appends, share) - HTTP_MS) / percentile(syncs, share) for share in (0.5, 0.9))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_append_waits_at_most_twice_a_raw_sync_of_the_same_disk(mode: str) -> None:
    assert least(partial(raw_syncs_waited, mode), SYNCS_MAX) < SYNCS_MAX
