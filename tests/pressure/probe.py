"""A client that requests `/healthz` at a steady rate on one connection and times the responses.

    python -m tests.pressure.probe PORT PID EVERY_S

Prints `probing` when it starts; after a line on stdin, or its end, it prints the measurements as JSON and exits. For
the longest response it also prints how long the server was ready to run and had no CPU, and how much time the host took
from this machine's CPUs: those parts are due to other programs, not to what the event loop did. `worst_own_ms` is the
most that is left of a response time without the wait for a CPU.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def scheduled(pid: int) -> tuple[float, float]:
    """For how long the main thread of a process has run, and for how long it has waited for a CPU, in seconds."""
    ran_ns, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran_ns) / 1e9, int(waited_ns) / 1e9


def stolen_s() -> float:
    """How much time the host of a virtual machine has taken from all of its CPUs, in steps of 10 ms."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def probe(port: int, pid: int, every_s: float) -> list[tuple[float, float, float]]:
    """The time of each response, and meanwhile: how long the server waited for a CPU, and what the host took."""
    times: list[tuple[float, float, float]] = []
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sys.stdout.write("probing\n")
        sys.stdout.flush()
        while not times or not select.select([sys.stdin], [], [], 0)[0]:
            _, waited_before_s = scheduled(pid)
            stolen_before_s = stolen_s()
            began = time.monotonic()
            connection.sendall(REQUEST)
            answer = b""
            while not answer.endswith(b"ok"):
                received = connection.recv(65_536)
                assert received, "the server closed the probe's connection"
                answer += received
            spent = time.monotonic() - began
            times.append((spent, scheduled(pid)[1] - waited_before_s, stolen_s() - stolen_before_s))
            time.sleep(max(0.0, every_s - spent))
    return times


if __name__ == "__main__":
    measured = sorted(probe(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
    found = {
        "probes": len(measured),
        "p50_ms": measured[len(measured) // 2][0] * 1000,
        "p99_ms": measured[len(measured) * 99 // 100][0] * 1000,
        "worst_ms": measured[-1][0] * 1000,
        "worst_waited_ms": measured[-1][1] * 1000,
        "worst_stolen_ms": measured[-1][2] * 1000,
        "worst_own_ms": max(spent - waited for spent, waited, _ in measured) * 1000,
    }
    sys.stdout.write(json.dumps(found))
