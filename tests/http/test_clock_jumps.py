"""A server that starts 40 days after it was stopped: expired streams are 404, and their data is kept."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from headwater.config import StorageSettings
from headwater.core.rules import CreateRequest
from headwater.engine.engine import Engine
from headwater.engine.open_storage import open_store
from headwater.engine.quota import EngineLimits
from tests.cli.test_commands import headwater_command
from tests.engine.seams import ManualClock, ManualScheduler
from tests.http.protocol import Stream, assert_problem
from tests.http.watching import samples, wait_for_sample
from tests.serving import serve

DAY_SECS = 24 * 3600


def write_store(directory: Path, mode: str, days_ago: int) -> None:
    """Write a data directory as a server left it some days ago."""
    clock = ManualClock(int((time.time() - days_ago * DAY_SECS) * 1000))
    scheduler = ManualScheduler(clock)
    storage = open_store(StorageSettings(mode=mode, data_dir=directory)).storage
    engine = Engine(storage, clock, scheduler, EngineLimits())
    engine.start()
    for name, ttl_secs in (("expired", 30 * DAY_SECS), ("alive", 60 * DAY_SECS), ("forever", None)):
        engine.create(CreateRequest(name, "text/plain", ttl_secs, None, False, b"kept"), lambda _: None)
    scheduler.run_until_idle()
    engine.stop()


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_start_after_40_days_keeps_the_data_of_expired_streams_until_it_is_confirmed(mode: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_store(data, mode, 40)
    with (
        serve(DS_STORAGE__MODE=mode, DS_STORAGE__DATA_DIR=str(data)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        expired, alive = Stream(http, "expired"), Stream(http, "alive")
        assert_problem(expired.get(offset="-1"), 404, "stream_not_found")
        assert_problem(expired.put(), 409, "conflict")
        assert alive.get(offset="-1").text == "kept"
        wait_for_sample(server, "expiry_held_streams", 1)
        assert samples(server)["headwater_streams"] == 3
        assert samples(server)["headwater_clock_jumps_total"] == 1
        server.wait_for_log("the clock jumped from")
        done = headwater_command("store", "confirm-expiry", "--data-dir", str(data), cwd=tmp_path)
        assert (done.returncode, done.stdout) == (
            0,
            "the time is confirmed; the server is deleting expired streams: 1\n",
        )
        wait_for_sample(server, "streams", 2)
        assert samples(server)["headwater_expiry_held_streams"] == 0
        assert expired.put("new").status_code == 201


def test_start_after_a_short_downtime_deletes_expired_streams(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_store(data, "file-durable", 40)
    with serve(
        DS_STORAGE__MODE="file-durable", DS_STORAGE__DATA_DIR=str(data), DS_EXPIRY__CLOCK_JUMP_SECS="8640000"
    ) as server:
        wait_for_sample(server, "streams", 2)
        assert "the clock jumped" not in server.log()


def test_confirming_without_a_server_is_an_error(tmp_path: Path) -> None:
    done = headwater_command("store", "confirm-expiry", "--data-dir", str(tmp_path / "data"), cwd=tmp_path)
    assert done.returncode != 0
    assert "no server has" in done.stderr
