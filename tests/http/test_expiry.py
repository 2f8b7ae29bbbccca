"""Expiry of streams: `Stream-TTL`, a sliding window, and `Stream-Expires-At`, an instant."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem, offset, stream_on
from tests.http.raw import connect, encode
from tests.http.sse_reader import SseReader
from tests.http.watching import wait_for_live_readers
from tests.serving import Server, serve

TTL_MAX = 2**53 - 1


HOUR_S = 3600


@pytest.fixture
def client(moving_client: httpx.Client) -> httpx.Client:
    return moving_client


@pytest.fixture
def instant(moving_server: Server) -> Callable[[float], str]:
    """The time some seconds from now, by the server's clock."""
    return lambda in_s: instant_on(moving_server, in_s)


def instant_on(server: Server, in_s: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=server.moved_s + in_s)).isoformat().replace("+00:00", "Z")


def assert_gone(stream: Stream) -> None:
    assert stream.head().status_code == 404
    assert_problem(stream.get(), 404, "stream_not_found")
    assert_problem(stream.post("x"), 404, "stream_not_found")
    assert_problem(stream.delete(), 404, "stream_not_found")


def test_unused_stream_is_404_after_its_ttl(moving_server: Server, stream: Stream) -> None:
    stream.create("data", headers={"Stream-TTL": str(HOUR_S)})
    assert stream.head().status_code == 200
    moving_server.pass_time(HOUR_S + 1)
    assert_gone(stream)


def test_a_read_restarts_the_ttl(moving_server: Server, stream: Stream) -> None:
    stream.create("data", headers={"Stream-TTL": str(HOUR_S)})
    for _ in range(3):
        moving_server.pass_time(0.6 * HOUR_S)
        assert stream.get().status_code == 200
    moving_server.pass_time(HOUR_S + 1)
    assert_gone(stream)


def test_a_write_restarts_the_ttl(moving_server: Server, stream: Stream) -> None:
    stream.create("data", headers={"Stream-TTL": str(HOUR_S)})
    for _ in range(3):
        moving_server.pass_time(0.6 * HOUR_S)
        assert stream.post("more").status_code == 204
    moving_server.pass_time(HOUR_S + 1)
    assert_gone(stream)


def test_head_does_not_restart_the_ttl(moving_server: Server, stream: Stream) -> None:
    stream.create("data", headers={"Stream-TTL": str(HOUR_S)})
    for _ in range(2):
        moving_server.pass_time(0.4 * HOUR_S)
        assert stream.head().status_code == 200
    moving_server.pass_time(0.4 * HOUR_S)
    assert stream.head().status_code == 404


def test_head_has_the_whole_ttl(moving_server: Server, stream: Stream) -> None:
    stream.create(headers={"Stream-TTL": "3600"})
    moving_server.pass_time(1000)
    head = stream.head()
    assert head.headers["stream-ttl"] == "3600"
    assert "stream-expires-at" not in head.headers


def test_expires_at_is_not_extended(moving_server: Server, stream: Stream, instant: Callable[[float], str]) -> None:
    stream.create("data", headers={"Stream-Expires-At": instant(HOUR_S)})
    for _ in range(2):
        moving_server.pass_time(0.4 * HOUR_S)
        assert stream.get().status_code == 200
        assert stream.post("more").status_code == 204
    moving_server.pass_time(0.4 * HOUR_S)
    assert_gone(stream)


def test_head_has_the_expiry_time(stream: Stream) -> None:
    stream.create(headers={"Stream-Expires-At": "2999-12-31T23:59:59Z"})
    head = stream.head()
    returned = datetime.fromisoformat(head.headers["stream-expires-at"])
    assert returned == datetime(2999, 12, 31, 23, 59, 59, tzinfo=UTC)
    assert "stream-ttl" not in head.headers


def test_stream_without_expiry_has_no_expiry_headers(stream: Stream) -> None:
    stream.create()
    assert not {"stream-ttl", "stream-expires-at"} & set(stream.head().headers)


@pytest.mark.parametrize("headers", [{"Stream-TTL": "0"}, {"Stream-Expires-At": "2001-01-01T00:00:00Z"}])
def test_stream_created_with_a_past_expiry_is_404(stream: Stream, headers: dict[str, str]) -> None:
    assert stream.put("data", headers=headers).status_code == 201
    assert_gone(stream)


def test_the_name_of_an_expired_stream_is_free_again(moving_server: Server, stream: Stream) -> None:
    stream.create("old", headers={"Stream-TTL": str(HOUR_S)})
    moving_server.pass_time(HOUR_S + 1)
    stream.create(b'{"new":1}', headers={"Content-Type": "application/json"})
    assert stream.get().content == b'[{"new":1}]'
    moving_server.pass_time(HOUR_S + 1)
    assert stream.get().status_code == 200


def test_both_expiry_headers_are_400(stream: Stream) -> None:
    refused = stream.put(headers={"Stream-TTL": "60", "Stream-Expires-At": "2999-01-01T00:00:00Z"})
    assert_problem(refused, 400, "invalid_expiry")
    assert not stream.exists()


@pytest.mark.parametrize(
    "ttl",
    [
        "+60",
        "060",
        "00",
        "60.0",
        "6e1",
        "-1",
        "",
        "abc",
        "1 2",
        "0x10",
        "٣",
        "60s",
        str(TTL_MAX + 1),
        "18446744073709551615",
        "18446744073709551616",
        "9" * 300,
    ],
    ids=lambda text: text[:24] or "empty",
)
def test_t27_a_malformed_or_huge_ttl_is_400_and_creates_nothing(stream: Stream, ttl: str) -> None:
    refused = stream.http.put(stream.path, headers=[(b"Content-Type", b"text/plain"), (b"Stream-TTL", ttl.encode())])
    assert_problem(refused, 400, "invalid_expiry")
    assert not stream.exists()


def test_the_largest_ttl_works(stream: Stream) -> None:
    stream.create("a", headers={"Stream-TTL": str(TTL_MAX)})
    stream.append("b")
    assert stream.head().headers["stream-ttl"] == str(TTL_MAX)
    assert stream.content() == b"ab"


@pytest.mark.parametrize(
    "when",
    [
        "",
        "never",
        "2030-01-01",
        "2030-01-01T00:00:00",
        "2030-13-01T00:00:00Z",
        "2030-02-30T00:00:00Z",
        "2030-01-01T25:00:00Z",
        "2030-01-01T00:60:00Z",
        "2030-01-01T00:00:61Z",
        "2030-01-01T00:00:00+25:00",
        "2030-01-01T00:00Z",
        "1893456000",
        "Tue, 01 Jan 2030 00:00:00 GMT",
        "20300101T000000Z",
        "2030-01-01T00:00:00Z garbage",
        "-2030-01-01T00:00:00Z",
        "99999-01-01T00:00:00Z",
    ],
)
def test_t27_a_malformed_expires_at_is_400_and_creates_nothing(stream: Stream, when: str) -> None:
    assert_problem(stream.put(headers={"Stream-Expires-At": when}), 400, "invalid_expiry")
    assert not stream.exists()


@pytest.mark.parametrize(
    "when",
    [
        "2999-01-01T00:00:00Z",
        "2999-01-01T00:00:00.5Z",
        "2999-01-01T00:00:00.123456789Z",
        "2999-01-01T02:00:00+02:00",
        "2998-12-31T19:30:00-04:30",
    ],
)
def test_every_rfc_3339_form_is_accepted(stream: Stream, when: str) -> None:
    stream.create(headers={"Stream-Expires-At": when})
    returned = datetime.fromisoformat(stream.head().headers["stream-expires-at"])
    assert abs(returned - datetime(2999, 1, 1, tzinfo=UTC)) < timedelta(seconds=1)


def test_same_instant_in_another_notation_is_the_same_configuration(stream: Stream) -> None:
    stream.create(headers={"Stream-Expires-At": "2999-01-01T00:00:00Z"})
    assert stream.put(headers={"Stream-Expires-At": "2999-01-01T02:00:00+02:00"}).status_code == 200


def test_t21_a_long_poll_on_an_expiring_stream_is_answered_when_it_expires() -> None:
    with (
        serve(moving_time=True, DS_SERVER__LONG_POLL_TIMEOUT_SECS=str(3 * HOUR_S)) as server,
        stream_on(server, "expiring") as stream,
        connect(server) as connection,
    ):
        stream.create("data", headers={"Stream-Expires-At": instant_on(server, HOUR_S)})
        connection.send(encode("GET", f"{stream.path}?offset={offset(1, 4)}&live=long-poll"))
        wait_for_live_readers(server, "long-poll", 1)
        server.pass_time(HOUR_S + 1)
        assert connection.response().status == 404


def test_t21_an_sse_reader_of_an_expiring_stream_gets_a_clean_end() -> None:
    with (
        serve(moving_time=True, DS_SERVER__SSE_RECONNECT_INTERVAL_SECS=str(3 * HOUR_S)) as server,
        stream_on(server, "expiring") as stream,
    ):
        stream.create("data", headers={"Stream-Expires-At": instant_on(server, HOUR_S)})
        with SseReader(server, stream.name) as events:
            assert [event.kind for event in events.until_up_to_date()] == ["data", "control"]
            server.pass_time(HOUR_S + 1)
            assert events.ends()


def test_expiry_is_reported_as_404(moving_server: Server, stream: Stream, instant: Callable[[float], str]) -> None:
    stream.create("x", headers={"Stream-Expires-At": instant(HOUR_S)})

    def use(write: bool) -> set[int]:
        """Return the statuses up to and including the first different one.

        A request is sent in one piece: one of which the server had only the head when the clock moves gets 408.
        """
        append = encode("POST", stream.path, body=b"x", headers={"Content-Type": "text/plain"})
        request = append if write else encode("GET", stream.path)
        seen: set[int] = set()
        with connect(moving_server) as connection:
            while len(seen) < 2:
                connection.send(request)
                seen.add(connection.response().status)
                busy[write].set()
        return seen

    busy = (threading.Event(), threading.Event())
    with ThreadPoolExecutor(2) as pool:
        reads, writes = pool.submit(use, False), pool.submit(use, True)
        for event in busy:
            event.wait()
        moving_server.pass_time(HOUR_S + 1)
        assert reads.result() == {200, 404}
        assert writes.result() == {204, 404}
