"""Live reads by long-poll, and the cursor that prevents stale answers of caches (protocol §5.7, §8.1)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.http.conftest import LONG_POLL_S
from tests.http.protocol import Stream, assert_problem, offset, stream_on
from tests.http.raw import RawConnection, connect, encode
from tests.http.watching import wait_for_live_readers
from tests.serving import Server

CURSOR_EPOCH_SECS = 1_728_432_000
CURSOR_INTERVAL_SECS = 20


def poll(stream: Stream, at: str) -> bytes:
    return encode("GET", f"{stream.path}?offset={at}&live=long-poll")


def post(stream: Stream, body: bytes) -> bytes:
    return encode("POST", stream.path, headers={"Content-Type": "text/plain"}, body=body)


def test_existing_data_is_returned_at_once(stream: Stream) -> None:
    stream.create("data")
    read = stream.long_poll("-1")
    assert (read.status_code, read.content) == (200, b"data")
    assert read.headers["stream-next-offset"] == offset(1, 4)
    assert read.headers["stream-up-to-date"] == "true"
    assert read.headers["stream-cursor"].isdigit()


def test_long_poll_without_data_is_204_after_the_timeout(moving_server: Server, stream_name: Callable[[], str]) -> None:
    with stream_on(moving_server, stream_name()) as stream, connect(moving_server) as connection:
        stream.create("data")
        connection.send(poll(stream, offset(1, 4)))
        wait_for_live_readers(moving_server, "long-poll", 1)
        moving_server.pass_time(LONG_POLL_S / 2)
        assert connection.has_nothing()
        moving_server.pass_time(LONG_POLL_S / 2)
        read = connection.response()
    assert (read.status, read.body) == (204, b"")
    assert read.header("stream-next-offset") == offset(1, 4)
    assert read.header("stream-up-to-date") == "true"
    assert str(read.header("stream-cursor")).isdigit()
    assert read.header("cache-control") == "no-store"
    assert read.header("stream-closed") is None


def test_the_offset_is_required(stream: Stream) -> None:
    stream.create("data")
    assert stream.get(live="long-poll").status_code == 400


def test_an_append_wakes_the_reader(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create("old")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(patient_stream.long_poll, offset(1, 3))
        wait_for_live_readers(patient, "long-poll", 1)
        assert not waiting.done()
        patient_stream.append("new")
        read = waiting.result()
    assert (read.status_code, read.content) == (200, b"new")
    assert read.headers["stream-next-offset"] == offset(2, 6)
    assert read.headers["stream-up-to-date"] == "true"


def test_now_waits_for_the_next_message(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create("history")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(patient_stream.long_poll, "now")
        wait_for_live_readers(patient, "long-poll", 1)
        patient_stream.append("news")
        read = waiting.result()
    assert (read.status_code, read.content) == (200, b"news")
    assert read.headers["stream-next-offset"] == offset(2, 11)


def test_t17_timed_out_now_has_the_tail_and_no_etag(stream: Stream) -> None:
    stream.create("history")
    read = stream.long_poll("now")
    assert (read.status_code, read.headers["stream-next-offset"]) == (204, offset(1, 7))
    assert "etag" not in read.headers


def test_a_json_reader_is_woken_with_an_array(patient: Server) -> None:
    with stream_on(patient, "woken-json", "application/json") as stream, ThreadPoolExecutor(1) as pool:
        stream.create()
        waiting = pool.submit(stream.long_poll, "now")
        wait_for_live_readers(patient, "long-poll", 1)
        stream.append('[{"a":1},{"b":2}]')
        assert waiting.result().content == b'[{"a":1},{"b":2}]'


def test_append_wakes_every_reader_with_the_same_response(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create()
    connections = [RawConnection(patient) for _ in range(100)]
    try:
        for connection in connections:
            connection.send(poll(patient_stream, "now"))
        wait_for_live_readers(patient, "long-poll", 100)
        returned = patient_stream.append("for all of you")
        for connection in connections:
            read = connection.response()
            assert (read.status, read.body) == (200, b"for all of you")
            assert read.header("stream-next-offset") == returned
    finally:
        for connection in connections:
            connection.socket.close()


def test_t19_no_wake_up_is_missed_however_the_two_requests_race(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create()
    rng = random.Random(19)
    with connect(patient) as reader, connect(patient) as writer:
        at = patient_stream.tail()
        for number in range(300):
            body = b"%d;" % number
            first, second = (reader, poll(patient_stream, at)), (writer, post(patient_stream, body))
            if rng.random() < 0.5:
                first, second = second, first
            first[0].send(first[1])
            for _ in range(rng.choice((0, 0, 1, 3))):
                patient_stream.head()
            second[0].send(second[1])
            read = reader.response()
            assert (read.status, read.body) == (200, body)
            at = str(read.header("stream-next-offset"))
            assert writer.response().status == 204


def test_t21_deleting_the_stream_answers_the_waiting_reader_at_once(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create("data")
    with connect(patient) as reader:
        reader.send(poll(patient_stream, "now"))
        wait_for_live_readers(patient, "long-poll", 1)
        patient_stream.delete()
        read = reader.response()
        assert read.status == 404
        # The connection still works for another request.
        assert reader.request("GET", "/healthz").status == 200


def test_t21_readers_of_a_deleted_stream_get_no_data_of_its_successor(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create("data")
    with connect(patient) as reader:
        reader.send(poll(patient_stream, "now"))
        wait_for_live_readers(patient, "long-poll", 1)
        patient_stream.delete()
        patient_stream.create("other data")
        patient_stream.append("more")
        assert reader.response().status == 404


def test_disconnected_reader_does_not_affect_others(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create()
    for _ in range(20):
        with connect(patient) as leaving:
            leaving.send(poll(patient_stream, "now"))
    with connect(patient) as staying:
        staying.send(poll(patient_stream, "now"))
        wait_for_live_readers(patient, "long-poll", 1)
        patient_stream.append("x")
        assert staying.response().body == b"x"
    assert "Traceback" not in patient.log()


def test_request_pipelined_after_a_long_poll_is_answered_after_it(patient: Server, patient_stream: Stream) -> None:
    patient_stream.create()
    with connect(patient) as connection:
        connection.send(poll(patient_stream, "now") + encode("GET", "/healthz"))
        wait_for_live_readers(patient, "long-poll", 1)
        assert connection.has_nothing()
        patient_stream.append("x")
        assert connection.response().body == b"x"
        assert connection.response().body == b"ok"


def test_pipelined_long_poll_is_woken_by_a_later_append_on_its_connection(
    patient: Server, patient_stream: Stream
) -> None:
    """On one pipelined connection, the poll is parsed before the append that wakes it."""
    patient_stream.create()
    with connect(patient) as connection, connect(patient) as writer:
        at = patient_stream.tail()
        for number in range(20):
            connection.send(poll(patient_stream, at))
            writer.send(post(patient_stream, b"%d" % number))
            read = connection.response()
            assert read.body == b"%d" % number
            at = str(read.header("stream-next-offset"))
            writer.response()


def current_cursor() -> int:
    return int(time.time() - CURSOR_EPOCH_SECS) // CURSOR_INTERVAL_SECS


def test_a_cursor_is_the_number_of_the_current_interval(stream: Stream) -> None:
    stream.create("data")
    before = current_cursor()
    cursor = int(stream.long_poll("-1").headers["stream-cursor"])
    assert before <= cursor <= current_cursor()


def test_old_cursor_gets_the_current_one(stream: Stream) -> None:
    stream.create("data")
    assert int(stream.long_poll("-1", cursor="1000").headers["stream-cursor"]) >= current_cursor() - 1


@pytest.mark.parametrize("ahead", [0, 1, 2, 180, 10_000, 10**9])
def test_t16_an_equal_or_later_cursor_always_advances(stream: Stream, ahead: int) -> None:
    stream.create("data")
    held = current_cursor() + ahead
    for _ in range(20):
        answered = int(stream.long_poll("-1", cursor=str(held)).headers["stream-cursor"])
        assert held < answered <= held + 3600 // CURSOR_INTERVAL_SECS + 1
        held = answered


def test_t16_echoed_cursors_never_repeat(stream: Stream) -> None:
    stream.create("data")
    held, seen = str(stream.long_poll("-1").headers["stream-cursor"]), set()
    for _ in range(50):
        assert held not in seen
        seen.add(held)
        held = str(stream.long_poll("-1", cursor=held).headers["stream-cursor"])


@pytest.mark.parametrize("cursor", ["", "abc", "-5", "1.5", "1e3", "0x10", "9" * 30, "9" * 4000, "٣", "%00"])
def test_t16_malformed_cursor_gets_a_valid_one(stream: Stream, cursor: str) -> None:
    stream.create("data")
    read = stream.long_poll("-1", cursor=cursor)
    assert (read.status_code, read.content) == (200, b"data")
    assert read.headers["stream-cursor"].isdigit()


def test_long_poll_of_a_missing_stream_is_404(stream: Stream) -> None:
    assert_problem(stream.long_poll("-1"), 404, "stream_not_found")
