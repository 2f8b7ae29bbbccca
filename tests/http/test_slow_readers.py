"""Readers that do not read: they fall behind, and cost the server and its writers almost nothing."""

from __future__ import annotations

import socket
import time

import httpx
import psutil

from tests.http.protocol import Stream
from tests.http.raw import RawConnection, encode
from tests.http.sse_reader import SseReader
from tests.http.watching import samples, wait_for_sample
from tests.serving import Server, serve
from tests.waiting import wait_until

READERS = 200
MESSAGE_BYTES = 50_000

# The cost of one stopped reader: the socket's buffer, one chunk being sent, and its state.
READER_COST_BYTES = 512 * 1024


def stopped_reader(server: Server, path: str) -> RawConnection:
    """Connect, request events, and never read."""
    connection = RawConnection(server)
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.send(encode("GET", f"{path}?offset=now&live=sse"))
    return connection


def rss_bytes(server: Server) -> int:
    return int(psutil.Process(server.pid).memory_info().rss)


def test_t22_stopped_sse_readers_cost_bounded_memory_and_no_writer_waits(long: bool) -> None:
    messages = 4000 if long else 1200
    with (
        serve(
            DS_LIMITS__MAX_STREAM_BYTES="0",
            DS_LIMITS__MAX_MEMORY_BYTES=str(2**30),
            DS_SERVER__WRITE_TIMEOUT_SECS="600",
            DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0",
        ) as server,
        httpx.Client(base_url=server.url, verify=False) as http,
    ):
        stream = Stream(http, "slow").create()
        readers = [stopped_reader(server, stream.path) for _ in range(READERS)]
        try:
            with SseReader(server, stream.name, offset="now") as attentive:
                attentive.until_up_to_date()
                before, waits = rss_bytes(server), list[float]()
                for number in range(messages):
                    body = (b"%06d" % number).ljust(MESSAGE_BYTES, b".")
                    began = time.monotonic()
                    assert stream.post(body).status_code == 204
                    waits.append(time.monotonic() - began)
                    # A reader is not delayed by stopped ones.
                    assert attentive.pair()[0].data.startswith(f"{number:06d}")
                grown = rss_bytes(server) - before
        finally:
            for reader in readers:
                reader.socket.close()
        stored = messages * MESSAGE_BYTES
        assert grown < 1.5 * stored + READERS * READER_COST_BYTES, f"{grown / 2**20:.0f} MiB for {READERS} readers"
        # A writer that waited for a stopped reader would wait for the write timeout, longer than its client does.
        # How fast it is can only be judged on a machine that does nothing else.
        waits.sort()
        assert not long or waits[len(waits) // 2] < 0.05
        assert not long or waits[int(len(waits) * 0.99)] < 0.5
        # The server still works after the readers disconnect.
        assert stream.append("x") == stream.tail()


def test_stopped_reader_that_resumes_gets_everything_in_order() -> None:
    with (
        serve(DS_LIMITS__MAX_STREAM_BYTES="0", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as server,
        httpx.Client(base_url=server.url, verify=False) as http,
    ):
        stream = Stream(http, "asleep").create()
        with SseReader(server, stream.name, offset="now") as reader:
            reader.until_up_to_date()
            for number in range(400):
                stream.append(f"{number:06d}".ljust(MESSAGE_BYTES, "."))
            pairs = [reader.pair() for _ in range(400)]
            assert [int(data.data[:6]) for data, _ in pairs] == list(range(400))
            assert pairs[-1][1]["upToDate"] is True
            stream.append("awake")
            assert reader.pair()[0].data == "awake"


def test_stopped_readers_are_disconnected_after_the_write_timeout() -> None:
    with (
        serve(
            DS_LIMITS__MAX_STREAM_BYTES="0",
            moving_time=True,
            DS_SERVER__WRITE_TIMEOUT_SECS="600",
            DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0",
        ) as server,
        httpx.Client(base_url=server.url, verify=False) as http,
    ):
        stream = Stream(http, "dropped").create()
        readers = [stopped_reader(server, stream.path) for _ in range(20)]
        try:
            for _ in range(200):
                stream.append(b"x" * MESSAGE_BYTES)
            wait_for_sample(server, "slow_readers_now", 20)
            server.pass_time(601)
            wait_for_sample(server, "slow_readers_total", 20)
            connected = [
                one for one in psutil.Process(server.pid).net_connections("tcp") if one.status == "ESTABLISHED"
            ]
            assert len(connected) < 20
        finally:
            for reader in readers:
                reader.socket.close()
        assert stream.append("still here") == stream.tail()


def test_reader_of_one_byte_at_a_time_is_not_disconnected() -> None:
    """A reader that reads a little within every timeout is not disconnected."""
    with (
        serve(moving_time=True, DS_SERVER__WRITE_TIMEOUT_SECS="600", DS_LIMITS__MAX_STREAM_BYTES="0") as server,
        httpx.Client(base_url=server.url, verify=False) as http,
    ):
        stream = Stream(http, "dripping").create()
        for _ in range(160):
            stream.append(b"x" * MESSAGE_BYTES)
        connection = RawConnection(server)
        try:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            connection.send(encode("GET", stream.path))
            for _ in range(12):
                assert len(connection.take(300_000)) == 300_000, "a slow reader was cut off"
                server.pass_time(100)
        finally:
            connection.socket.close()


def test_memory_for_unread_responses_is_limited_and_the_longest_waiting_are_disconnected() -> None:
    limit = 2 * 2**20
    with (
        serve(
            DS_SERVER__WORKERS="1",  # The limit is that of one process.
            DS_LIMITS__MAX_STREAM_BYTES="0",
            DS_LIMITS__MAX_UNREAD_BYTES=str(limit),
            DS_SERVER__WRITE_TIMEOUT_SECS="600",
            DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0",
        ) as server,
        httpx.Client(base_url=server.url, verify=False) as http,
    ):
        stream = Stream(http, "unread").create()
        readers = [stopped_reader(server, stream.path) for _ in range(40)]
        try:
            with SseReader(server, stream.name, offset="now") as attentive:
                attentive.until_up_to_date()
                for _ in range(200):
                    stream.append(b"x" * MESSAGE_BYTES)
                    attentive.pair()
                # Each takes at least the piece that could not be sent, so the limit allows at most half of them.
                wait_until(lambda: samples(server)["headwater_slow_readers_total"] >= 20)
                wait_until(lambda: samples(server)["headwater_unread_response_bytes"] <= limit)
                left = samples(server)["headwater_slow_readers_now"]
                assert 5 <= left <= 20, "only as many are disconnected as necessary"
                assert stream.append("y") == stream.tail()
                assert attentive.pair()[0].data == "y"
        finally:
            for reader in readers:
                reader.socket.close()
