"""Closing a stream without data, with and without producer headers."""

from __future__ import annotations

import pytest

from tests.http.protocol import Stream, assert_problem, offset, producer

OTHERS = [producer("p", 0, 0), producer("p", 0, 2), producer("p", 0, 9), producer("p", 1, 0), producer("q", 0, 7)]


@pytest.mark.parametrize("headers", OTHERS, ids=lambda headers: "-".join(headers.values()))
def test_close_only_on_a_closed_stream_is_204_whatever_the_producer(stream: Stream, headers: dict[str, str]) -> None:
    """protocol lines 119-120: close-only is idempotent; line 204: also when producer headers are provided."""
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    stream.close("b", headers=producer("p", 0, 1))
    answer = stream.close(headers=headers)
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["stream-closed"] == "true"
    assert answer.headers["stream-next-offset"] == offset(2, 2)
    assert stream.content() == b"ab"


def test_close_only_on_a_closed_stream_reports_what_the_producer_really_sent(stream: Stream) -> None:
    """protocol line 165: Producer-Seq is the highest accepted number of this producer and epoch, not the request's."""
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    stream.close()
    known = stream.close(headers=producer("p", 0, 5))
    assert (known.headers["producer-epoch"], known.headers["producer-seq"]) == ("0", "0")
    assert "producer-seq" not in stream.close(headers=producer("p", 3, 0)).headers
    assert "producer-seq" not in stream.close(headers=producer("q", 0, 0)).headers


def test_data_for_a_closed_stream_is_409_for_every_other_producer(stream: Stream) -> None:
    """protocol lines 206-208: only the request that closed the stream is repeated; other data is 409."""
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    stream.close("b", headers=producer("p", 0, 1))
    for headers in OTHERS:
        refused = stream.close("c", headers=headers)
        assert_problem(refused, 409, "stream_closed")
        assert refused.headers["stream-closed"] == "true"
    assert stream.content() == b"ab"


@pytest.mark.parametrize("seq", [0, 1], ids=["older", "latest"])
def test_close_only_that_repeats_an_accepted_seq_closes_an_open_stream(stream: Stream, seq: int) -> None:
    """protocol lines 213-215: 204 to a close means that the stream is now closed, and says so."""
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    stream.append("b", headers=producer("p", 0, 1))
    answer = stream.close(headers=producer("p", 0, seq))
    assert (answer.status_code, answer.headers.get("stream-closed")) == (204, "true")
    assert answer.headers["stream-next-offset"] == offset(2, 2)
    assert answer.headers["producer-seq"] == "1"
    assert stream.head().headers["stream-closed"] == "true"
    assert_problem(stream.post("c", headers=producer("p", 0, 2)), 409, "stream_closed")
    again = stream.close(headers=producer("p", 0, seq))
    assert (again.status_code, again.headers["stream-closed"]) == (204, "true")
    assert stream.content() == b"ab"


def test_a_zombie_cannot_close_an_open_stream(stream: Stream) -> None:
    """protocol lines 181-184: a stale epoch is 403, also for a close without data."""
    stream.create()
    stream.append("a", headers=producer("p", 1, 0))
    assert_problem(stream.close(headers=producer("p", 0, 0)), 403, "stale_epoch")
    assert "stream-closed" not in stream.head().headers


def test_a_repeated_append_with_data_does_not_close(stream: Stream) -> None:
    """protocol line 203 (gap G-14): the append is deduplicated; the response shows that the stream is still open."""
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    answer = stream.close("a", headers=producer("p", 0, 0))
    assert (answer.status_code, answer.headers.get("stream-closed")) == (204, None)
    assert "stream-closed" not in stream.head().headers
    assert stream.close("b", headers=producer("p", 0, 1)).headers["stream-closed"] == "true"


def test_a_retry_after_another_client_closed_is_409_and_a_close_shows_whether_it_was_stored(stream: Stream) -> None:
    """reference line 670 returns 204 for a repeat; protocol lines 206-208 return 409 for a closed stream, and prevail.

    docs/clients.md says what producers do in that case: close without data, and check Producer-Seq.
    """
    stream.create()
    stream.append("stored", headers=producer("p", 0, 0))
    stream.close()
    assert_problem(stream.post("stored", headers=producer("p", 0, 0)), 409, "stream_closed")
    assert stream.close(headers=producer("p", 0, 0)).headers["producer-seq"] == "0"
    # This one was too late: Producer-Seq in the response is lower than its number.
    assert_problem(stream.post("late", headers=producer("p", 0, 1)), 409, "stream_closed")
    assert stream.close(headers=producer("p", 0, 1)).headers["producer-seq"] == "0"
