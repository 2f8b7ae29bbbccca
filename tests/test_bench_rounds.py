"""The rounds of the benchmarks that compare two servers, and the CPU time that they report."""

from __future__ import annotations

import os
import time

from bench.servers import Running, cpu_seconds, in_turns


def test_servers_take_turns_within_each_round() -> None:
    servers = (Running("ours", "http://127.0.0.1:1", 1), Running("theirs", "http://127.0.0.1:2", 2))
    done = in_turns(servers, 3, lambda server, number: (number, server.name))
    assert done == [(1, "ours"), (1, "theirs"), (2, "ours"), (2, "theirs"), (3, "ours"), (3, "theirs")]


def test_cpu_time_of_this_process_increases_with_its_work() -> None:
    before_s, own_before_s = cpu_seconds(os.getpid()), time.process_time()
    while time.process_time() - own_before_s < 0.1:
        pass
    used_s = cpu_seconds(os.getpid()) - before_s
    assert 0.05 <= used_s <= time.process_time() - own_before_s + 0.05
