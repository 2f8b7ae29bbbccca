"""The readers of the SSE benchmark, in a separate process: N raw sockets on one stream, one epoll loop.

Invariant: an arrival is timed right after `recv` and parsed after the run, so the work of the readers is not
measured.

Prints `ready` when every reader has its first control event, and one line of JSON with the latencies when its
stdin is closed. The send time is in the payload, in nanoseconds of the system-wide monotonic clock.
"""

from __future__ import annotations

import itertools
import json
import re
import select
import socket
import sys
import time

_STAMP = re.compile(rb"<(\d+)>")
_READY_TIMEOUT_SECS = 30.0
_RECV_BYTES = 65536

Chunks = list[tuple[int, bytes]]


def connect(host: str, port: int, path: str, readers: int) -> dict[int, socket.socket]:
    request = (
        f"GET {path}?offset=now&live=sse HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/event-stream\r\n\r\n"
    ).encode()
    connected = {}
    for _ in range(readers):
        one = socket.create_connection((host, port), timeout=10)
        one.sendall(request)
        one.setblocking(False)
        connected[one.fileno()] = one
    return connected


def collect(
    poller: select.epoll, readers: dict[int, socket.socket], arrivals: dict[int, Chunks], wait_secs: float
) -> int:
    """Read available data; return the number of bytes."""
    taken = 0
    for number, _ in poller.poll(wait_secs):
        chunk = readers[number].recv(_RECV_BYTES)
        arrived = time.monotonic_ns()
        if not chunk:
            raise SystemExit("the server ended an SSE response during the measurement")
        arrivals[number].append((arrived, chunk))
        taken += len(chunk)
    return taken


def latencies_ms(chunks: Chunks) -> list[float]:
    """One value per event. An event arrives with the chunk that completes its send time."""
    found, pending = [], b""
    for arrived, chunk in chunks:
        pending += chunk
        position = 0
        for match in _STAMP.finditer(pending):
            found.append((arrived - int(match[1])) / 1e6)
            position = match.end()
        pending = pending[position:][-64:]
    return found


def main() -> None:
    host, port, path, count = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    readers = connect(host, port, path, count)
    arrivals: dict[int, Chunks] = {number: [] for number in readers}
    poller = select.epoll()
    for number in readers:
        poller.register(number, select.EPOLLIN)

    deadline = time.monotonic() + _READY_TIMEOUT_SECS
    while any(b"streamNextOffset" not in b"".join(chunk for _, chunk in own) for own in arrivals.values()):
        if time.monotonic() > deadline:
            raise SystemExit("not every reader got its first control event")
        collect(poller, readers, arrivals, 0.1)
    for own in arrivals.values():
        own.clear()
    print("ready", flush=True)

    # The parent closes our stdin after the last event; then read until nothing arrives for a while.
    stdin_poller = select.poll()
    stdin_poller.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    while not stdin_poller.poll(0):
        collect(poller, readers, arrivals, 0.02)
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 0.5:
        if collect(poller, readers, arrivals, 0.05):
            quiet_since = time.monotonic()

    events = [latencies_ms(own) for own in arrivals.values()]
    result = {"per_reader": [len(own) for own in events], "latencies_ms": list(itertools.chain(*events))}
    print(json.dumps(result), flush=True)
    for one in readers.values():
        one.close()


if __name__ == "__main__":
    main()
