"""Large numbers of idle connections, and of readers that never read, and what they cost the server."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.http.raw import encode
from tests.pressure.probe import scheduled
from tests.serving import Server, serve

MIB = 1024 * 1024
MESSAGE_BYTES = 10 * MIB
ROUNDS = 1000
TEXT = {"Content-Type": "text/plain"}
IDLE_S = 1.0
IDLE_SHARE_MAX = 0.03
PATIENCE_S = 40.0
RETURN_S = 15.0
BACK_MIB = 5.0
"""Memory within this of the initial value counts as returned."""


def rss_mib(server: Server) -> float:
    return float(psutil.Process(server.pid).memory_info().rss / MIB)


def percentile(times: list[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(times)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 2)


class GoodClient:
    """A normal client: a timed append and HEAD in each round, and the CPU time of its server."""

    def __init__(self, server: Server, path: str) -> None:
        self._path = path
        self._process = psutil.Process(server.pid)
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        self._ask("PUT")
        self.times: list[float] = []
        self._before_s = self._cpu_s()

    def round(self) -> None:
        began = time.monotonic()
        assert self._ask("POST", b"x;") == 204
        self._ask("HEAD")
        self.times.append(time.monotonic() - began)

    def end(self) -> float:
        """The server's CPU time per round, in milliseconds."""
        self._connection.close()
        return round((self._cpu_s() - self._before_s) / len(self.times) * 1000, 3)

    def _ask(self, method: str, body: bytes = b"") -> int:
        self._connection.request(method, self._path, body, TEXT)
        answer = self._connection.getresponse()
        answer.read()
        return answer.status

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def compare(quiet: Server, crowded: Server, rounds: int) -> dict[str, float]:
    """Alternate rounds between both servers, so that other programs on the machine delay both equally."""
    one, other = GoodClient(quiet, "/v1/stream/good"), GoodClient(crowded, "/v1/stream/good")
    for _ in range(rounds):
        one.round()
        other.round()
    return {
        "quiet_cpu_ms": one.end(),
        "crowded_cpu_ms": other.end(),
        "quiet_p50_ms": percentile(one.times, 0.5),
        "crowded_p50_ms": percentile(other.times, 0.5),
        "quiet_p99_ms": percentile(one.times, 0.99),
        "crowded_p99_ms": percentile(other.times, 0.99),
    }


def wait_until_idle(server: Server) -> None:
    """Wait until the server uses almost no CPU time, because it has processed the connects or disconnects.

    Time in which it was ready to run and got no CPU does not count: other programs cannot make it look idle or busy.
    """
    process = psutil.Process(server.pid)
    patience_s = PATIENCE_S
    while True:
        began, (ran_s, waited_s) = time.monotonic(), scheduled(server.pid)
        time.sleep(IDLE_S)
        ran_s, waited_s = (
            after - before for before, after in zip((ran_s, waited_s), scheduled(server.pid), strict=True)
        )
        own_s = time.monotonic() - began - waited_s
        # A wait for a CPU is counted when it ends.
        if process.status() == psutil.STATUS_SLEEPING and ran_s <= IDLE_SHARE_MAX * own_s:
            return
        patience_s -= own_s
        assert patience_s > 0, f"the server does not become idle: {ran_s:.2f} s of CPU time in {own_s:.2f} s"


def silent_readers(count: int, rounds: int = ROUNDS, program: tuple[str, ...] = ("headwater",)) -> dict[str, Any]:
    """Half of the clients request events, half pipeline reads of the same large stream; none reads a byte."""
    settings: dict[str, Any] = {
        "DS_LIMITS__MAX_STREAM_BYTES": "0",
        "DS_SERVER__WRITE_TIMEOUT_SECS": "600",
        "DS_SERVER__SSE_RECONNECT_INTERVAL_SECS": "0",
    }
    with serve(**settings) as quiet, serve(program=program, **settings) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for method, body in (("PUT", b""), ("POST", b"m" * MESSAGE_BYTES)):
            connection.request(method, "/v1/stream/large", body, TEXT)
            connection.getresponse().read()
        connection.close()
        before = rss_mib(server)
        events = encode("GET", "/v1/stream/large?offset=-1&live=sse")
        reads = encode("GET", "/v1/stream/large?offset=-1") * 50
        requests = [events if number % 2 else reads for number in range(count)]
        with stopped(server, requests):
            compared = compare(quiet, server, rounds)
            during = rss_mib(server)
        after = rss_after(server, before)
        with stopped(server, requests):
            pass
        again = rss_after(server, before)
    return {
        "readers": count,
        "message_mib": MESSAGE_BYTES // MIB,
        "before_mib": round(before, 1),
        "during_mib": round(during, 1),
        "after_mib": round(after, 1),
        "after_second_mib": round(again, 1),
        **compared,
    }


def rss_after(server: Server, before_mib: float) -> float:
    """The memory of the server after it has returned freed memory, which takes seconds."""
    until = time.monotonic() + RETURN_S
    while (found := rss_mib(server)) > before_mib + BACK_MIB and time.monotonic() < until:
        time.sleep(0.2)
    return found


@contextmanager
def stopped(server: Server, requests: list[bytes]) -> Iterator[None]:
    """Open connections that send these requests and never read; wait for an idle server at the start and the end."""
    crowd = [_stopped(server, request) for request in requests]
    try:
        wait_until_idle(server)
        yield
    finally:
        for each in crowd:
            each.close()
    wait_until_idle(server)


def _stopped(server: Server, request: bytes) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(request)
    return connection


def idle_connections(count: int, rounds: int = ROUNDS, program: tuple[str, ...] = ("headwater",)) -> dict[str, Any]:
    """Connections that send one request and then stay open; all are opened twice."""
    settings: dict[str, Any] = {"DS_SERVER__IDLE_TIMEOUT_SECS": "3600", "DS_SERVER__MAX_CONNECTIONS": str(count + 100)}
    with serve(**settings) as quiet, serve(program=program, **settings) as server:
        before = rss_mib(server)
        with idle(server, count):
            during = rss_mib(server)
            compared = compare(quiet, server, rounds)
        after = rss_after(server, before)
        with idle(server, count):
            pass
        again = rss_after(server, before)
    return {
        "connections": count,
        "before_mib": round(before, 1),
        "during_mib": round(during, 1),
        "after_mib": round(after, 1),
        "after_second_mib": round(again, 1),
        "kib_per_connection": round((during - before) * 1024 / count, 2),
        **compared,
    }


@contextmanager
def idle(server: Server, count: int) -> Iterator[None]:
    """Open connections that have one response each; wait for an idle server at the start and the end."""
    crowd: list[socket.socket] = []
    try:
        request = encode("GET", "/healthz")
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            crowd.append(connection)
            connection.sendall(request)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200"), "a connection was refused"
        wait_until_idle(server)
        yield
    finally:
        for connection in crowd:
            connection.close()
    wait_until_idle(server)
