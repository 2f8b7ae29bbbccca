"""The memory of a server under a steady load stays within what its settings allow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pressure.load import MIB, TEXT, Load
from tests.serving import Server, serve

HOT_TAIL_BYTES = 64 * MIB


def peak_bytes(server: Server) -> int:
    """The most resident memory that the process has had so far, pages of mapped files included."""
    [kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
    return int(kib) * 1024


@pytest.mark.long
@pytest.mark.timeout(600)
def test_peak_memory_under_appends_to_many_streams_is_bounded_by_the_hot_tail() -> None:
    """Unsaved data is at most twice the hot tail; bodies in flight and freed blocks are less than another one."""
    streams, appends, body = 200, 40_000, b"b" * 16 * 1024
    with serve(DS_STORAGE__MODE="file-durable", DS_STORAGE__HOT_TAIL_BYTES=str(HOT_TAIL_BYTES)) as server:
        load = Load(server, 1.0)
        load.many(("PUT", f"/v1/stream/s{number}", TEXT, b"") for number in range(streams))
        before = peak_bytes(server)

        def append(worker: int) -> None:
            load.many(("POST", f"/v1/stream/s{number % streams}", TEXT, body) for number in range(worker, appends, 8))

        load.together(append, 8)
        assert peak_bytes(server) - before < 3 * HOT_TAIL_BYTES
