"""Closing streams, and how readers are notified (protocol §4.1, §5.3)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.http.protocol import ZERO, Stream, assert_problem, offset
from tests.http.raw import connect
from tests.http.sse_reader import SseReader
from tests.http.watching import wait_for_live_readers
from tests.serving import Server


def test_close_without_data_keeps_the_tail(stream: Stream) -> None:
    stream.create("data")
    closed = stream.close()
    assert (closed.status_code, closed.headers["stream-closed"]) == (204, "true")
    assert closed.headers["stream-next-offset"] == offset(1, 4)
    assert stream.content() == b"data"


def test_closing_again_is_204(stream: Stream) -> None:
    stream.create("data")
    answers = [stream.close() for _ in range(3)]
    assert [(one.status_code, one.headers["stream-closed"]) for one in answers] == [(204, "true")] * 3
    assert all(one.headers["stream-next-offset"] == offset(1, 4) for one in answers)


@pytest.mark.parametrize("content_type", ["", "application/json", "image/png"])
def test_the_content_type_of_an_empty_close_does_not_matter(stream: Stream, content_type: str) -> None:
    stream.create()
    assert stream.close(headers={"Content-Type": content_type}).status_code == 204


def test_append_and_close_in_one_request(stream: Stream) -> None:
    stream.create("a")
    closed = stream.close("b")
    assert (closed.status_code, closed.headers["stream-closed"]) == (204, "true")
    assert closed.headers["stream-next-offset"] == offset(2, 2)
    read = stream.get()
    assert (read.content, read.headers["stream-closed"]) == (b"ab", "true")


@pytest.mark.parametrize("closing", [False, True], ids=["append", "append and close"])
def test_append_to_a_closed_stream_is_409(stream: Stream, closing: bool) -> None:
    stream.create("a")
    stream.close()
    refused = stream.close("late") if closing else stream.post("late")
    assert_problem(refused, 409, "stream_closed")
    assert refused.headers["stream-closed"] == "true"
    assert refused.headers["stream-next-offset"] == offset(1, 1)
    assert stream.content() == b"a"


@pytest.mark.parametrize("value", ["TRUE", "True", "tRuE"])
def test_t27_stream_closed_is_true_in_any_case(stream: Stream, value: str) -> None:
    stream.create()
    closed = stream.post("a", headers={"Stream-Closed": value})
    assert closed.headers["stream-closed"] == "true"
    assert stream.head().headers["stream-closed"] == "true"


def test_t27_whitespace_around_the_value_is_ignored(server: Server, stream: Stream) -> None:
    stream.create()
    with connect(server) as connection:
        connection.request("POST", stream.path, headers={"Stream-Closed": " \ttrue\t "})
    assert stream.head().headers["stream-closed"] == "true"


@pytest.mark.parametrize("value", ["false", "yes", "1", "", "truee", "true, true", '"true"'])
def test_t27_other_values_of_stream_closed_are_ignored(stream: Stream, value: str) -> None:
    created = stream.put(headers={"Stream-Closed": value})
    assert created.status_code == 201
    assert "stream-closed" not in created.headers
    appended = stream.post("a", headers={"Stream-Closed": value})
    assert appended.status_code == 204
    assert "stream-closed" not in appended.headers
    assert_problem(stream.post(headers={"Stream-Closed": value}), 400, "empty_body")
    assert "stream-closed" not in stream.head().headers


def test_closing_a_missing_stream_is_404(stream: Stream) -> None:
    assert_problem(stream.close(), 404, "stream_not_found")


def test_head_reports_closure(stream: Stream) -> None:
    stream.create()
    assert "stream-closed" not in stream.head().headers
    stream.close()
    assert stream.head().headers["stream-closed"] == "true"


def test_catch_up_read_at_the_end_of_a_closed_stream_reports_closure(stream: Stream) -> None:
    stream.create("data")
    stream.close()
    end = stream.get(offset=offset(1, 4))
    assert (end.status_code, end.content) == (200, b"")
    assert end.headers["stream-closed"] == "true"
    assert end.headers["stream-up-to-date"] == "true"
    assert end.headers["stream-next-offset"] == offset(1, 4)


def test_the_end_of_an_empty_closed_json_stream_is_an_empty_array(json_stream: Stream) -> None:
    json_stream.create(headers={"Stream-Closed": "true"})
    end = json_stream.get()
    assert (end.content, end.headers["stream-closed"]) == (b"[]", "true")


def test_open_stream_never_has_the_closed_header(stream: Stream) -> None:
    stream.create("data")
    assert "stream-closed" not in stream.get().headers
    assert "stream-closed" not in stream.long_poll("-1").headers


def test_long_poll_at_the_end_of_a_closed_stream_does_not_wait(patient_stream: Stream) -> None:
    stream = patient_stream
    stream.create("data")
    stream.close()
    end = stream.long_poll(offset(1, 4))
    assert (end.status_code, end.content) == (204, b"")
    assert end.headers["stream-closed"] == "true"
    assert end.headers["stream-up-to-date"] == "true"
    assert end.headers["stream-next-offset"] == offset(1, 4)


def test_closing_wakes_a_waiting_long_poll(patient: Server, patient_stream: Stream) -> None:
    stream = patient_stream.create("data")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.long_poll, offset(1, 4))
        wait_for_live_readers(patient, "long-poll", 1)
        stream.close()
        end = waiting.result()
    assert (end.status_code, end.headers["stream-closed"]) == (204, "true")


def test_append_and_close_wakes_a_long_poll_with_data_and_closure(patient: Server, patient_stream: Stream) -> None:
    stream = patient_stream.create("data")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.long_poll, offset(1, 4))
        wait_for_live_readers(patient, "long-poll", 1)
        stream.close("last")
        end = waiting.result()
    assert (end.status_code, end.content, end.headers["stream-closed"]) == (200, b"last", "true")


def test_now_on_a_closed_stream_reports_closure_in_every_mode(server: Server, stream: Stream) -> None:
    stream.create("data")
    stream.close()
    read = stream.get(offset="now")
    assert (read.status_code, read.content) == (200, b"")
    poll = stream.long_poll("now")
    assert (poll.status_code, poll.content) == (204, b"")
    for end in (read, poll):
        assert end.headers["stream-closed"] == "true"
        assert end.headers["stream-up-to-date"] == "true"
        assert end.headers["stream-next-offset"] == offset(1, 4)
    with SseReader(server, stream.name, offset="now") as events:
        only = events.next().control
        assert only["streamClosed"] is True
        assert only["streamNextOffset"] == offset(1, 4)
        assert events.ends()


def test_closure_lasts_until_deletion(stream: Stream) -> None:
    stream.create(headers={"Stream-Closed": "true"})
    assert stream.put(headers={"Stream-Closed": "true"}).status_code == 200
    assert stream.delete().status_code == 204
    stream.create()
    assert "stream-closed" not in stream.head().headers
    assert stream.append("open again") == offset(1, 10)


def test_racing_append_is_never_stored_after_the_close(server: Server, stream: Stream) -> None:
    stream.create()
    with ThreadPoolExecutor(8) as pool:
        appends = [pool.submit(stream.post, "x") for _ in range(20)]
        closing = pool.submit(stream.close, "END")
        appends += [pool.submit(stream.post, "x") for _ in range(20)]
        accepted = sum(one.result().status_code == 204 for one in appends)
        assert closing.result().status_code == 204
    assert stream.content() == b"x" * accepted + b"END"


def test_a_stream_closed_while_empty_ends_at_its_beginning(stream: Stream) -> None:
    stream.create()
    assert stream.close().headers["stream-next-offset"] == ZERO
    read = stream.get(offset=ZERO)
    assert (read.content, read.headers["stream-closed"]) == (b"", "true")
