"""After the machine was suspended, the server continues with the time of the wall clock."""

from __future__ import annotations

import os
import signal

import httpx

from tests.serving import serve
from tests.suspending import SUSPENDED_S
from tests.waiting import wait_until


def test_streams_that_expired_during_a_suspend_are_gone_and_others_are_not() -> None:
    with serve(program=("tests.suspending",)) as server:
        for name, ttl_s in (("short", SUSPENDED_S / 2), ("long", SUSPENDED_S * 2)):
            headers = {"Content-Type": "text/plain", "Stream-TTL": f"{ttl_s:.0f}"}
            assert httpx.put(server.stream_url(name), headers=headers).status_code == 201
        assert httpx.head(server.stream_url("short")).status_code == 200
        os.kill(server.pid, signal.SIGUSR1)
        wait_until(lambda: httpx.head(server.stream_url("short")).status_code == 404)
        assert httpx.head(server.stream_url("long")).status_code == 200
