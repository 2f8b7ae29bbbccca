"""Clients that send too much or read too little: others are still served, and memory stays bounded."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from tests.http.protocol import stream_on
from tests.http.raw import RawConnection, connect, encode
from tests.http.watching import samples, wait_for_live_readers, wait_for_sample
from tests.serving import Server, serve
from tests.waiting import wait_until

MIB = 1024 * 1024
TEXT = {"Content-Type": "text/plain"}
BYTES = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with serve(
        DS_SERVER__WORKERS="1",  # What is limited here is the memory of one process.
        DS_LIMITS__MAX_STREAM_BYTES="0",
        DS_LIMITS__MAX_MEMORY_BYTES=str(512 * MIB),
        DS_LIMITS__MAX_REQUEST_BODIES_BYTES=str(32 * MIB),
        DS_SERVER__WRITE_TIMEOUT_SECS="3",
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="15",
    ) as server:
        yield server


def memory_mb(server: Server) -> float:
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def socket_buffer_bytes() -> int:
    """How much the system holds at most for the two ends of a connection."""
    return sum(int(Path(f"/proc/sys/net/ipv4/tcp_{end}").read_text().split()[-1]) for end in ("rmem", "wmem"))


def send_what_fits(connection: RawConnection, data: bytes, for_secs: float) -> int:
    """Send without reading, until the server stops reading or everything is sent."""
    connection.socket.settimeout(0.5)
    sent = 0
    ends_at = time.monotonic() + for_secs
    with suppress(OSError):
        while sent < len(data) and time.monotonic() < ends_at:
            with suppress(TimeoutError):
                sent += connection.socket.send(data[sent : sent + MIB])
    return sent


def test_responses_are_not_produced_while_earlier_ones_are_unread(running: Server) -> None:
    """A regression: thousands of GETs with unread answers used gigabytes."""
    with stream_on(running, "unread") as stream:
        stream.create(b"x" * 200_000)
        before, cut = memory_mb(running), samples(running)["headwater_slow_readers_total"] + 1
        with connect(running) as connection:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            send_what_fits(connection, encode("GET", stream.path) * 5000, 2)
            assert memory_mb(running) - before < 30
            # Another client is served at the same time.
            assert stream.head().status_code == 200

            # New requests do not extend the time that a client has to read: it is disconnected.
            def is_cut() -> bool:
                send_what_fits(connection, encode("GET", stream.path) * 10, 0.1)
                return samples(running)["headwater_slow_readers_total"] == cut

            wait_until(is_cut)


def test_large_bodies_pipelined_after_a_long_poll_are_not_all_read(running: Server) -> None:
    with stream_on(running, "behind") as stream:
        stream.create()
        before = memory_mb(running)
        post = encode("POST", stream.path, headers=TEXT, body=b"x" * (6 * MIB))
        with connect(running) as connection:
            wait = encode("GET", f"{stream.path}?offset=now&live=long-poll")
            most = socket_buffer_bytes() + 20 * MIB
            sent = send_what_fits(connection, wait + post * (2 * most // len(post)), 1.5)
            assert sent < most
            assert memory_mb(running) - before < 60


def test_bodies_of_all_connections_share_one_budget(running: Server) -> None:
    """Connections that stop one byte short of a complete body cannot hold more than the limit together."""
    with stream_on(running, "budget") as stream, ExitStack() as stack:
        stream.create()
        body = b"x" * (8 * MIB)
        request = encode("POST", stream.path, headers=TEXT, body=body)
        held = []
        for _ in range(8):
            connection = stack.enter_context(connect(running))
            send_what_fits(connection, request[:-1], 5)
            held.append(connection)
            assert samples(running)["headwater_request_body_bytes"] <= 32 * MIB
        # A small append is not affected.
        assert stream.post("small").status_code == 204
        refused = 0
        for connection in held:
            with suppress(OSError):
                connection.send(request[-1:])
        for connection in held:
            connection.socket.settimeout(60)
            answer = connection.response()
            if answer.status == 503:
                refused += 1
                assert answer.header("retry-after") == "1"
            else:
                assert answer.status == 204
        assert 1 <= refused <= 7
    with stream_on(running, "budget-after") as stream:
        stream.create()
        wait_for_sample(running, "request_body_bytes", 0)
        assert stream.post(b"y" * (8 * MIB)).status_code == 204
        wait_for_sample(running, "request_body_bytes", 0)


def test_unfinished_snapshots_share_the_budget_of_bodies(tmp_path: Path) -> None:
    """Each may wait for the disk in memory, however many connections there are."""
    most = str(4 * MIB)
    with (
        serve(
            directory=tmp_path,
            DS_SERVER__WORKERS="1",
            DS_STORAGE__MODE="file-durable",
            DS_LIMITS__MAX_REQUEST_BODIES_BYTES=most,
        ) as server,
        httpx.Client(base_url=server.url) as http,
        ExitStack() as stack,
    ):
        http.put("/ds/bucket")
        path = f"/ds/bucket/s/snapshot/{http.put('/ds/bucket/s', headers=TEXT).headers['stream-next-offset']}"
        begun = []
        for _ in range(6):
            connection = stack.enter_context(connect(server))
            connection.send(encode("PUT", path, headers={**TEXT, "Content-Length": str(100 * MIB)}) + b"x" * 100_000)
            begun.append(connection)
        for refused in begun[4:]:
            answer = refused.response()
            assert (answer.status, answer.header("retry-after")) == (503, "1")
        assert samples(server)["headwater_request_body_bytes"] == 4 * MIB
        assert http.put(path, headers=TEXT, content=b"small").status_code == 204
        for connection in begun:
            connection.socket.close()
        wait_for_sample(server, "request_body_bytes", 0)
        assert http.put(path, headers=TEXT, content=b"y" * (8 * MIB)).status_code == 204
        wait_for_sample(server, "request_body_bytes", 0)


def test_an_endless_trailer_is_refused(running: Server) -> None:
    with stream_on(running, "trailer") as stream:
        stream.create()
        with connect(running) as connection:
            connection.send(encode("POST", stream.path, headers={**TEXT, "Transfer-Encoding": "chunked"}))
            connection.send(b"1\r\nx\r\n0\r\nX-Endless: ")
            send_what_fits(connection, b"a" * (40 * MIB), 10)
            connection.socket.settimeout(60)
            assert connection.response().status == 431
        assert stream.content() == b""


@pytest.mark.parametrize("live", [False, True])
def test_fast_reader_of_much_data_does_not_delay_others(running: Server, live: bool) -> None:
    """A regression: one SSE catch-up of 500 MB blocked the loop for 12 s."""
    with stream_on(running, f"much-{live}") as stream:
        stream.create(headers=BYTES)
        for _ in range(12):
            assert stream.post(b"x" * (8 * MIB), headers=BYTES).status_code == 204
        query = "?offset=-1&live=sse" if live else "?offset=-1"
        with connect(running) as connection, connect(running) as other:
            connection.send(encode("GET", stream.path + query) * (1 if live else 8))
            other.request("GET", "/healthz")
            received: list[int] = []
            while sum(received) < 60 * MIB:
                other.send(encode("GET", "/healthz"))
                received.append(0)
                while other.socket not in (ready := select.select([connection.socket, other.socket], [], [], 60)[0]):
                    assert ready, "neither reader gets anything"
                    received[-1] += len(connection.socket.recv(256 * 1024))
                assert other.response().status == 200
            # The server writes in turns of 256 KiB, and the other request is answered after one of them. How long that
            # takes depends on the machine; how much is sent meanwhile does not.
            assert sorted(received)[len(received) // 2] < 8 * MIB, received


def test_a_large_event_is_not_held_by_readers_that_do_not_read(running: Server) -> None:
    """A regression: a hundred stopped readers of a 10 MB message of newlines used more than half a gigabyte."""
    with stream_on(running, "newlines") as stream, ExitStack() as stack:
        stream.create()
        before = memory_mb(running)
        for _ in range(60):
            connection = stack.enter_context(connect(running))
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.send(encode("GET", f"{stream.path}?offset=now&live=sse"))
        wait_for_live_readers(running, "sse", 60)
        assert stream.post(b"\n" * (10 * MIB)).status_code == 204
        assert stream.head().status_code == 200
        assert memory_mb(running) - before < 250


def test_reader_gets_a_large_message_of_newlines_completely(running: Server) -> None:
    with stream_on(running, "newlines-read") as stream:
        stream.create()
        stream.append(b"\n" * MIB + b"end")
        with httpx.stream("GET", f"{running.url}{stream.path}?offset=-1&live=sse", timeout=60) as response:
            lines = 0
            for line in response.iter_lines():
                lines += line.startswith("data:")
                if line.startswith("data:end"):
                    break
            assert lines == MIB + 1


JSON = {"Content-Type": "application/json"}


def test_dense_json_body_is_refused_without_blocking_the_loop(running: Server) -> None:
    """A regression: twenty million elements blocked the loop for half a minute."""
    with stream_on(running, "dense") as stream, connect(running) as other:
        stream.create(headers=JSON)
        with connect(running) as connection:
            body = b"[" + b"0," * (10 * MIB) + b"0]"
            connection.send(encode("POST", stream.path, headers=JSON, body=body))
            assert other.request("GET", "/healthz").status == 200
            answer = connection.response()
            assert answer.status == 413
            assert b"too_many_messages" in answer.body
        assert stream.get().json() == []


def test_large_json_bodies_are_stored_as_they_were_sent(running: Server) -> None:
    element = b'{"text":"a, b ],", "list":[1, 2,{"c": "}"}]}'
    body = b"[" + b" ,\n".join([element] * 40_000) + b"]"
    with stream_on(running, "large-json") as stream:
        stream.create(headers=JSON)
        assert stream.post(body, headers=JSON).status_code == 204
        assert stream.head().headers["stream-next-position"] == "40000"
        first = stream.get().content
        assert first.startswith(b"[" + element + b"," + element)
    with stream_on(running, "large-json-created") as stream:
        assert stream.put(body, headers=JSON).status_code == 201
        assert stream.head().headers["stream-next-position"] == "40000"


def test_a_large_malformed_json_body_is_400(running: Server) -> None:
    with stream_on(running, "large-bad-json") as stream:
        stream.create(headers=JSON)
        body = b"[" + b'{"a":1},' * 200_000 + b"]"
        assert stream.post(body, headers=JSON).status_code in (400, 413)
        body = b"[" + b'{"abcdefghijklmnopqrstuvwxyz":1},' * 50_000 + b"{]"
        assert stream.post(body, headers=JSON).status_code == 400
        assert stream.get().json() == []
