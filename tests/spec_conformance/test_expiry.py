"""Expiry headers: accepted values, and the messages of conflicts."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import pytest

from tests.http.protocol import ZERO, Stream, assert_problem, stream_on
from tests.http.raw import connect, encode
from tests.http.sse_reader import SseReader
from tests.http.watching import wait_for_live_readers
from tests.serving import Server, serve

HOUR_S = 3600
MISMATCH = "The stream exists {}. Use it as it is, delete it first, or choose another name."


@pytest.mark.parametrize("fraction", ["1234567890", "500000000000", "9" * 40], ids=len)
def test_a_fraction_of_a_second_may_have_any_number_of_digits(stream: Stream, fraction: str) -> None:
    """protocol line 84: an RFC 3339 timestamp, whose grammar has 1*DIGIT after the dot."""
    stream.create(headers={"Stream-Expires-At": f"2099-01-01T00:00:00.{fraction}Z"})
    assert stream.head().headers["stream-expires-at"] == f"2099-01-01T00:00:00.{fraction[:3]}Z"


def test_a_conflict_of_ttls_names_the_one_that_the_stream_has(stream: Stream) -> None:
    """reference line 525: 409 for another configuration. It said "another Stream-TTL (None)"."""
    stream.create()
    refused = stream.put(headers={"Stream-TTL": "60"})
    assert_problem(refused, 409, "config_mismatch")
    assert refused.json()["detail"] == MISMATCH.format("without a Stream-TTL")


def test_a_conflict_of_expiry_times_names_the_one_that_the_stream_has(stream: Stream) -> None:
    """reference line 525."""
    stream.create(headers={"Stream-Expires-At": "2099-01-01T00:00:00Z"})
    refused = stream.put()
    assert_problem(refused, 409, "config_mismatch")
    assert refused.json()["detail"] == MISMATCH.format("with Stream-Expires-At 2099-01-01T00:00:00Z")


def test_a_long_poll_keeps_a_short_ttl_alive(mode: str) -> None:
    """newer protocol: a stream with live readers does not expire. A poll on a TTL of 2 s used to get 404."""
    with (
        serve(moving_time=True, DS_STORAGE__MODE=mode, DS_SERVER__LONG_POLL_TIMEOUT_SECS=str(4 * HOUR_S)) as server,
        stream_on(server, "short") as stream,
        connect(server) as connection,
    ):
        stream.create(headers={"Stream-TTL": str(HOUR_S)})
        connection.send(encode("GET", f"{stream.path}?offset={ZERO}&live=long-poll"))
        wait_for_live_readers(server, "long-poll", 1)
        server.pass_time(3 * HOUR_S)
        assert connection.has_nothing()
        server.pass_time(HOUR_S)
        assert connection.response().status == 204
        assert stream.head().status_code == 200


def test_event_reader_keeps_a_short_ttl_alive_and_its_disconnect_starts_the_window(mode: str) -> None:
    """newer protocol: a stream with live readers does not expire."""
    with expiring(mode) as server, stream_on(server, "short") as stream:
        stream.create(headers={"Stream-TTL": str(HOUR_S)})
        with SseReader(server, stream.name) as reader:
            assert reader.next().control["upToDate"] is True
            server.pass_time(3 * HOUR_S)
            stream.append("still here")
            assert reader.pair()[0].data == "still here"
        wait_for_live_readers(server, "sse", 0)
        server.pass_time(HOUR_S + 1)
        assert stream.head().status_code == 404


def test_live_reader_does_not_delay_an_absolute_expiry(mode: str) -> None:
    """protocol line 84: Stream-Expires-At is an absolute time."""
    with expiring(mode) as server, stream_on(server, "short") as stream:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + HOUR_S))
        stream.create(headers={"Stream-Expires-At": at})
        with SseReader(server, stream.name) as reader:
            reader.next()
            server.pass_time(HOUR_S + 1)
            assert reader.ends()
        assert stream.head().status_code == 404


def expiring(mode: str) -> AbstractContextManager[Server]:
    """A server with a manual clock, whose event streams never end."""
    return serve(moving_time=True, DS_STORAGE__MODE=mode, DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0")
