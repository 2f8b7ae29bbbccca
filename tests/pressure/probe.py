"""A client that requests `/healthz` at a steady rate on one connection and times the responses.

    python -m tests.pressure.probe PORT EVERY_S

Prints `probing` when it starts; after a line on stdin, or its end, it prints the measurements as JSON and exits.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def probe(port: int, every_s: float) -> list[float]:
    times: list[float] = []
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sys.stdout.write("probing\n")
        sys.stdout.flush()
        while not select.select([sys.stdin], [], [], 0)[0]:
            began = time.monotonic()
            connection.sendall(REQUEST)
            answer = b""
            while not answer.endswith(b"ok"):
                received = connection.recv(65_536)
                assert received, "the server closed the probe's connection"
                answer += received
            spent = time.monotonic() - began
            times.append(spent)
            time.sleep(max(0.0, every_s - spent))
    return times


if __name__ == "__main__":
    measured = sorted(probe(int(sys.argv[1]), float(sys.argv[2])))
    found = {
        "probes": len(measured),
        "p50_ms": measured[len(measured) // 2] * 1000,
        "p99_ms": measured[len(measured) * 99 // 100] * 1000,
        "worst_ms": measured[-1] * 1000,
    }
    sys.stdout.write(json.dumps(found))
