"""Retention by age and size, an extension of ours, together with the protocol's snapshots and reads from the start."""

from __future__ import annotations

from headwater.core.retention import SLACK_SHARE
from tests.http.bucketed import Bucket
from tests.http.protocol import ZERO, Stream, assert_problem
from tests.http.sse_reader import SseReader
from tests.serving import Server
from tests.waiting import wait_until

DROP = {"Stream-Retention-Bytes": "1000", "Stream-Retention-Drop": "allowed"}
RETAINED_MAX_BYTES = 1000 + 1000 // SLACK_SHARE
"""Retention works in steps; the last one leaves no more than this."""


def fill(stream: Stream, count: int = 30) -> list[str]:
    return [stream.append(f"{number:03}".encode() * 34) for number in range(count)]


def trimmed(stream: Stream) -> Stream:
    """Create a stream whose first messages were removed by retention."""
    stream.create(headers=DROP)
    fill(stream)
    wait_until(lambda: retained_bytes(stream), lambda size: size <= RETAINED_MAX_BYTES)
    return stream


def retained_bytes(stream: Stream) -> int:
    headers = stream.head().headers
    earliest, tail = (
        int(headers.get(name, ZERO).split("_")[1], 16) for name in ("stream-earliest-offset", "stream-next-offset")
    )
    return tail - earliest


def test_retention_keeps_the_latest_snapshot_and_what_follows_it(bucket: Bucket) -> None:
    """extensions line 205: /bootstrap can provide a snapshot covering the earliest retained offset; line 144.

    Retention by size used to delete the snapshot, and bootstrap returned only the last few messages.
    """
    folded = bucket.stream("folded").create(headers=DROP)
    folded.publish(folded.append("first"), "state")
    other = bucket.stream("other")
    offsets = fill(folded)
    # Retention processes the stream that was written last after the others.
    trimmed(other)
    assert folded.latest().status_code == 307
    parts = [part.body for part in folded.parts()]
    assert parts == [b"state", *(f"{number:03}".encode() * 34 for number in range(30))]
    # The next snapshot covers them, so they are removed.
    folded.publish(offsets[-1], "later")
    assert [part.body for part in folded.parts()] == [b"later"]


def test_bootstrap_reports_missing_history(bucket: Bucket) -> None:
    """extensions lines 144, 205: without a snapshot nothing covers what retention dropped, and the response says so."""
    stream = bucket.stream("unfolded")
    trimmed(stream)
    answer = stream.bootstrap()
    assert answer.headers["stream-snapshot-offset"] == "-1"
    assert answer.headers["stream-earliest-offset"] == stream.head().headers["stream-earliest-offset"]
    whole = bucket.stream("whole").create("all of it")
    assert "stream-earliest-offset" not in whole.bootstrap().headers
    folded = bucket.stream("folded").create("one")
    folded.publish(folded.tail(), "state")
    assert "stream-earliest-offset" not in folded.bootstrap().headers


def test_base_reader_starts_at_the_earliest_retained_message(stream: Stream) -> None:
    """protocol line 350: `-1` is a valid offset that returns data; line 440: an extension must not break base clients.

    `Stream-Earliest-Offset` shows a reader that the beginning was removed (decision P-43); it used to be 410.
    """
    trimmed(stream)
    earliest = stream.head().headers["stream-earliest-offset"]
    retained = stream.get(offset=earliest)
    assert "stream-earliest-offset" not in retained.headers
    for answer in (stream.get(offset="-1"), stream.get(), stream.long_poll("-1")):
        assert (answer.status_code, answer.content) == (200, retained.content)
        assert answer.headers["stream-earliest-offset"] == earliest
        assert answer.headers["stream-next-offset"] == retained.headers["stream-next-offset"]
        assert answer.headers["cache-control"] == "no-store"


def test_base_event_reader_starts_at_the_earliest_retained_message(server: Server, stream: Stream) -> None:
    """protocol line 350, in SSE."""
    trimmed(stream)
    head = stream.head().headers
    with SseReader(server, stream.name) as reader:
        assert reader.status == 200
        assert reader.header("stream-earliest-offset") == head["stream-earliest-offset"]
        text = "".join(event.data for event in reader.until_up_to_date() if event.kind == "data")
    assert text.encode() == stream.get(offset=head["stream-earliest-offset"]).content


def test_an_offset_that_is_no_longer_retained_is_410(server: Server, stream: Stream) -> None:
    """protocol line 237: 410 Gone for an offset before the earliest retained position. A reader that resumes must know.

    This includes `-1` in a bounded read, because a planned range must begin at its planned start.
    """
    trimmed(stream)
    first = f"{1:016x}_{102:016x}"
    assert_problem(stream.get(offset=first), 410, "offset_gone")
    assert_problem(stream.get(offset=ZERO), 410, "offset_gone")
    assert_problem(stream.long_poll(first), 410, "offset_gone")
    with SseReader(server, stream.name, offset=first) as reader:
        assert reader.status == 410
    assert_problem(stream.get(offset="-1", until="now"), 410, "offset_gone")
    assert_problem(stream.get(offset="-1", frames="1"), 410, "offset_gone")


def test_complete_stream_has_no_earliest_offset_header(stream: Stream) -> None:
    """protocol line 441: an extension shows only where it is used."""
    stream.create("data")
    for answer in (stream.get(offset="-1"), stream.head(), stream.long_poll("-1")):
        assert "stream-earliest-offset" not in answer.headers


def test_beginning_of_a_trimmed_bucket_stream_is_410(bucket: Bucket) -> None:
    """extensions line 109: for any offset less than the earliest retained one, including -1, 410."""
    stream = bucket.stream("trimmed")
    trimmed(stream)
    for answer in (stream.get(offset="-1"), stream.get(), stream.long_poll("-1")):
        assert_problem(answer, 410, "offset_gone")
        assert answer.headers["stream-earliest-offset"] == stream.head().headers["stream-earliest-offset"]
