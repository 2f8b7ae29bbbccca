"""Shutdown: on SIGTERM live responses end cleanly, and requests in flight are answered."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress

import httpx
import pytest

from tests.http.protocol import offset, stream_on
from tests.http.raw import RawConnection, connect, encode
from tests.http.sse_reader import SseReader
from tests.http.watching import COUNTED_BODY_BYTES, wait_for_body, wait_for_live_readers, wait_for_sample
from tests.serving import STOP_TIMEOUT_SECS, Server, serve
from tests.waiting import wait_until

TEXT = {"Content-Type": "text/plain"}


def length(size: int) -> dict[str, str]:
    return {**TEXT, "Content-Length": str(size)}


UNFINISHED = encode("POST", "/v1/stream/x", headers=length(COUNTED_BODY_BYTES + 5)) + b"x" * COUNTED_BODY_BYTES


def test_sse_readers_get_a_clean_end() -> None:
    with serve(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as server, stream_on(server, "drained") as stream:
        stream.create("data")
        readers = [SseReader(server, stream.name) for _ in range(20)]
        for reader in readers:
            reader.until_up_to_date()
        server.ask_to_stop()
        for reader in readers:
            # Iteration ends only if the last chunk of the response was received.
            assert not [event for event in reader if "streamClosed" in event.data]
            reader.connection.socket.close()
        assert server.stop() == 0


def test_a_waiting_long_poll_is_answered_at_once() -> None:
    with serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="3600") as server, stream_on(server, "drained") as stream:
        stream.create("data")
        with connect(server) as connection:
            connection.send(encode("GET", f"{stream.path}?offset=now&live=long-poll"))
            wait_for_live_readers(server, "long-poll", 1)
            server.ask_to_stop()
            answer = connection.response()
            assert answer.status == 204
            assert answer.header("stream-next-offset") == offset(1, 4)
            assert answer.header("stream-up-to-date") == "true"
            assert answer.header("stream-closed") is None
        assert server.stop() == 0


def test_a_write_in_flight_is_answered_and_done() -> None:
    with serve() as server, stream_on(server, "drained") as stream:
        stream.create()
        with connect(server) as connection:
            connection.send(encode("POST", stream.path, headers=length(COUNTED_BODY_BYTES + 500)))
            connection.send(b"x" * COUNTED_BODY_BYTES)
            wait_for_body(server)
            server.ask_to_stop()
            server.wait_for_log("draining")
            connection.send(b"x" * 500)
            answer = connection.response()
            assert (answer.status, answer.header("stream-next-offset")) == (204, offset(1, COUNTED_BODY_BYTES + 500))
            assert answer.header("connection") == "close"
            assert connection.ends()
        assert server.stop() == 0


def test_idle_connections_are_closed_and_new_ones_refused() -> None:
    with serve() as server:
        with connect(server) as idle, connect(server) as busy:
            assert idle.request("GET", "/healthz").status == 200
            busy.send(UNFINISHED)
            wait_for_body(server)
            server.ask_to_stop()
            assert idle.ends()
            # Each of several workers refuses them when it begins to drain.
            wait_until(lambda: _is_refused(server), what="new connections are refused")
        assert server.stop() == 0


def _is_refused(server: Server) -> bool:
    try:
        with RawConnection(server) as connection:
            connection.request("GET", "/healthz")
    except (ConnectionError, AssertionError):
        return True
    return False


def test_client_that_never_finishes_does_not_delay_the_shutdown() -> None:
    with serve(DS_SERVER__DRAIN_TIMEOUT_SECS="1") as server, connect(server) as connection:
        connection.send(UNFINISHED)
        wait_for_body(server)
        assert server.stop() == 0
    assert "aborted 1 connections" in server.log()


def test_reader_that_never_reads_does_not_delay_the_shutdown() -> None:
    with serve(DS_SERVER__DRAIN_TIMEOUT_SECS="1") as server, stream_on(server, "stuck") as stream:
        stream.create()
        for _ in range(8):
            stream.append(b"x" * 1_000_000)
        with connect(server) as connection:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.send(encode("GET", stream.path) * 10)
            wait_for_sample(server, "slow_readers_now", 1)
            assert server.stop() == 0
    assert "aborted 1 connections" in server.log()


def test_idle_server_stops_at_once_without_warnings() -> None:
    with serve() as server:
        assert httpx.get(f"{server.url}/healthz").text == "ok"
        assert server.stop() == 0
    assert "Traceback" not in server.log()
    assert "ERROR" not in server.log()


def test_sigint_stops_as_sigterm_does() -> None:
    with serve() as server:
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=STOP_TIMEOUT_SECS) in (0, 130)
        assert "Traceback" not in server.log()


@pytest.mark.parametrize("stays", [False, True], ids=["client gone", "client still there"])
def test_refused_connection_does_not_delay_the_shutdown(stays: bool) -> None:
    """After a refusal in the middle of a body the server waits briefly, so that the client can read the answer."""
    with serve(DS_SERVER__DRAIN_TIMEOUT_SECS="3600") as server, stream_on(server, "drained") as stream:
        stream.create()
        with connect(server) as connection:
            headers = {**TEXT, "Content-Length": str(2**30)}
            connection.send(encode("POST", stream.path, headers=headers) + b"some of it")
            assert connection.response().status == 413
            if not stays:
                connection.socket.close()
            assert server.stop() == 0


def test_further_requests_to_stop_do_not_change_the_exit_code() -> None:
    with serve() as server:
        server.ask_to_stop()
        with suppress(ProcessLookupError):
            while server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        assert server.stop() == 0
