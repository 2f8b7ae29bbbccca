"""Crowds of connections that cost the server memory and give it nothing: idle ones, and readers that never read."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.http.raw import encode
from tests.serving import Server, serve

MIB = 1024 * 1024
MESSAGE_BYTES = 10 * MIB
APPENDS = 400
TEXT = {"Content-Type": "text/plain"}
IDLE_S = 1.0
IDLE_SHARE_MAX = 0.03
PATIENCE_S = 40.0


def rss_mib(server: Server) -> float:
    return float(psutil.Process(server.pid).memory_info().rss / MIB)


def percentile(times: list[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(times)
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000, 2)


def good_client(server: Server, path: str) -> list[float]:
    """Appends and reads of a client that behaves, each timed."""
    times = []
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("PUT", path, headers=TEXT)
    connection.getresponse().read()
    for number in range(APPENDS):
        began = time.monotonic()
        connection.request("POST", path, b"%d;" % number, TEXT)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 204, answer.status
        connection.request("HEAD", path)
        connection.getresponse().read()
        times.append(time.monotonic() - began)
    connection.close()
    return times


def wait_until_idle(server: Server) -> None:
    """Until the server uses next to no CPU time: what the crowd's arrival or end gave it to do is done."""
    process = psutil.Process(server.pid)
    until = time.monotonic() + PATIENCE_S
    spent = 1.0
    while spent > IDLE_SHARE_MAX * IDLE_S:
        assert time.monotonic() < until, f"the server is never idle: {spent:.2f} s of CPU time a second"
        before = process.cpu_times()
        waits = True
        for _ in range(10):
            time.sleep(IDLE_S / 10)
            # On a busy machine a server with work to do may get no CPU time.
            waits = waits and process.status() == psutil.STATUS_SLEEPING
        after = process.cpu_times()
        spent = after.user + after.system - before.user - before.system if waits else 1.0


def cpu_ms(server: Server, path: str) -> tuple[list[float], float]:
    """The times of a client that behaves, and the server's CPU time for each of its rounds."""
    process = psutil.Process(server.pid)
    before = process.cpu_times()
    times = good_client(server, path)
    after = process.cpu_times()
    spent_s = after.user + after.system - before.user - before.system
    return times, round(spent_s / len(times) * 1000, 3)


def silent_readers(count: int, program: tuple[str, ...] = ("headwater",)) -> dict[str, Any]:
    """Half of them ask for events, half pipeline reads of the same large stream; none reads a byte."""
    settings: dict[str, Any] = {
        "DS_LIMITS__MAX_STREAM_BYTES": "0",
        "DS_SERVER__WRITE_TIMEOUT_SECS": "600",
        "DS_SERVER__SSE_RECONNECT_INTERVAL_SECS": "0",
    }
    with serve(program=program, **settings) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for method, body in (("PUT", b""), ("POST", b"m" * MESSAGE_BYTES)):
            connection.request(method, "/v1/stream/large", body, TEXT)
            connection.getresponse().read()
        connection.close()
        quiet, quiet_cpu_ms = cpu_ms(server, "/v1/stream/quiet")
        before = rss_mib(server)
        events = encode("GET", "/v1/stream/large?offset=-1&live=sse")
        reads = encode("GET", "/v1/stream/large?offset=-1") * 50
        requests = [events if number % 2 else reads for number in range(count)]
        with stopped(server, requests):
            crowded, crowded_cpu_ms = cpu_ms(server, "/v1/stream/crowded")
            during = rss_mib(server)
        after_times = good_client(server, "/v1/stream/after")
        after = rss_mib(server)
        # Freed memory may stay with the process; what is freed is used again by the next crowd, what leaks is not.
        with stopped(server, requests):
            pass
        again = rss_mib(server)
    return {
        "readers": count,
        "message_mib": MESSAGE_BYTES // MIB,
        "before_mib": round(before, 1),
        "during_mib": round(during, 1),
        "after_mib": round(after, 1),
        "after_second_mib": round(again, 1),
        "quiet_cpu_ms": quiet_cpu_ms,
        "crowded_cpu_ms": crowded_cpu_ms,
        "quiet_p99_ms": percentile(quiet, 0.99),
        "crowded_p99_ms": percentile(crowded, 0.99),
        "after_p99_ms": percentile(after_times, 0.99),
        "quiet_p50_ms": percentile(quiet, 0.5),
        "crowded_p50_ms": percentile(crowded, 0.5),
    }


@contextmanager
def stopped(server: Server, requests: list[bytes]) -> Iterator[None]:
    """Connections that send these requests and never read; the server is idle at the beginning and after the end."""
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


def idle_connections(count: int) -> dict[str, Any]:
    """Connections that sent one request and then stay open."""
    settings: dict[str, Any] = {"DS_SERVER__IDLE_TIMEOUT_SECS": "3600", "DS_SERVER__MAX_CONNECTIONS": str(count + 100)}
    with serve(**settings) as server:
        quiet, quiet_cpu_ms = cpu_ms(server, "/v1/stream/quiet")
        before = rss_mib(server)
        crowd: list[socket.socket] = []
        try:
            request = encode("GET", "/healthz")
            for _ in range(count):
                connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
                connection.sendall(request)
                assert connection.recv(4096).startswith(b"HTTP/1.1 200"), "a connection was refused"
                crowd.append(connection)
            wait_until_idle(server)
            during = rss_mib(server)
            crowded, crowded_cpu_ms = cpu_ms(server, "/v1/stream/crowded")
        finally:
            for connection in crowd:
                connection.close()
        wait_until_idle(server)
        after = rss_mib(server)
    return {
        "connections": len(crowd),
        "before_mib": round(before, 1),
        "during_mib": round(during, 1),
        "after_mib": round(after, 1),
        "kib_per_connection": round((during - before) * 1024 / count, 2),
        "quiet_cpu_ms": quiet_cpu_ms,
        "crowded_cpu_ms": crowded_cpu_ms,
        "quiet_p99_ms": percentile(quiet, 0.99),
        "crowded_p99_ms": percentile(crowded, 0.99),
    }
