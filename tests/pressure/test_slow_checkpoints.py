"""No append waits for a checkpoint: its wait is at most that of two syncs of the journal."""

from __future__ import annotations

import threading
import time

import pytest

from tests.http.raw import RawConnection
from tests.measured import least
from tests.pressure.faults import CHECKPOINT_SYNC_S, CHECKPOINT_SYNCED, JOURNAL_SYNC_S, SLOW
from tests.pressure.load import MIB, TEXT
from tests.serving import Server, serve

WRITERS = 4
BODY = b"c" * 400_000
LIMIT_S = 2 * JOURNAL_SYNC_S + 0.6
"""The rest of a sync that has begun, and the next one, which has the append; the rest is for a busy machine."""


def longest_wait_s(server: Server) -> float:
    """Append until two syncs of checkpoints have passed; return how long the slowest append took."""
    enough = server.log().count(CHECKPOINT_SYNCED) + 2
    waits: list[float] = []
    deadline = time.monotonic() + 60

    def append(number: int) -> None:
        path = f"/v1/stream/{number}"
        with RawConnection(server) as connection:
            assert connection.request("PUT", path, headers=TEXT).status in {200, 201}
            while server.log().count(CHECKPOINT_SYNCED) < enough and time.monotonic() < deadline:
                began = time.monotonic()
                assert connection.request("POST", path, headers=TEXT, body=BODY).status == 204
                waits.append(time.monotonic() - began)

    writers = [threading.Thread(target=append, args=(number,)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert server.log().count(CHECKPOINT_SYNCED) >= enough, "no checkpoint was made"
    return max(waits)


def longest_with(fault: str, mode: str) -> float:
    with serve(
        program=("tests.pressure.faults", fault),
        DS_STORAGE__MODE=mode,
        DS_STORAGE__SEGMENT_BYTES=str(MIB),
        DS_STORAGE__HOT_TAIL_BYTES=str(64 * MIB),
        DS_LIMITS__MAX_STREAM_BYTES="0",
    ) as server:
        slow = server.directory / SLOW
        slow.touch()
        longest_s = least(lambda: longest_wait_s(server), LIMIT_S)
        slow.unlink()
    return longest_s


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_no_append_waits_for_a_checkpoint(mode: str) -> None:
    assert longest_with("syncs_slowly", mode) < LIMIT_S < CHECKPOINT_SYNC_S


@pytest.mark.long
def test_waiting_for_a_checkpoint_is_noticed() -> None:
    assert longest_with("syncs_one_file_at_a_time", "file-durable") > LIMIT_S
