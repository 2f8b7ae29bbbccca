"""Snapshots, bootstrap and listings of buckets, where the specification is terse."""

from __future__ import annotations

import json

import pytest

from tests.http.bucketed import Bucket
from tests.http.protocol import ZERO, Stream, assert_problem
from tests.http.raw import connect
from tests.serving import Server


def test_a_snapshot_at_the_zero_offset_leaves_the_beginning_readable(bucket: Bucket) -> None:
    """extensions line 109 makes `-1` gone when it is less than the snapshot's offset; line 95 treats `-1` as 0.

    Both mean the beginning, so there is nothing before the snapshot and nothing was removed (gap G-11).
    """
    stream = bucket.stream("log").create("one")
    stream.publish(ZERO, "nothing yet")
    assert stream.head().headers["stream-snapshot-offset"].startswith(ZERO)
    assert "stream-earliest-offset" not in stream.head().headers
    for at in ("-1", ZERO):
        answer = stream.get(offset=at)
        assert (answer.status_code, answer.content) == (200, b"one")
    assert [part.body for part in stream.parts()] == [b"nothing yet", b"one"]


def test_publishing_at_the_beginning_of_a_trimmed_stream_is_410(bucket: Bucket) -> None:
    """extensions line 107: 410 when the offset is older than the earliest retained one; `-1` is. It was 400."""
    stream = bucket.stream("log").create()
    at = stream.append("one")
    stream.publish(at, "state")
    gone = stream.put_snapshot("-1", "late")
    assert_problem(gone, 410, "offset_gone")
    assert gone.headers["stream-earliest-offset"].startswith(at)
    assert_problem(stream.put_snapshot(ZERO, "late"), 410, "offset_gone")
    assert stream.parts()[0].body == b"state"


def test_publishing_at_the_beginning_of_a_whole_stream_is_400(bucket: Bucket) -> None:
    """extensions line 104: an invalid offset is 400; line 94: clients use offsets that the server returned."""
    stream = bucket.stream("log").create("one")
    assert_problem(stream.put_snapshot("-1"), 400, "invalid_offset")


@pytest.mark.parametrize("spelling", ["%2E", "."])
def test_the_stream_id_dot_is_refused(server: Server, bucket: Bucket, spelling: str) -> None:
    """extensions line 27 allows it, but URL libraries remove the segment: the request would name the bucket."""
    with connect(server) as connection:
        answer = connection.request("PUT", f"{bucket.path}/{spelling}", headers={"Content-Type": "text/plain"})
    assert (answer.status, json.loads(answer.body)["code"]) == (400, "invalid_name")
    assert bucket.count() == 0


def test_tail_offset_of_a_json_stream_counts_the_bytes_of_its_messages(bucket: Bucket) -> None:
    """extensions line 62: a number of payload bytes. It used to count the separators stored between messages."""
    stream = bucket.stream("json", "application/json").create()
    stream.append('[{"a":1},22,"three"]')
    entry = bucket.listing().json()["streams"][0]
    assert entry["tail_offset"] == len('{"a":1}') + len("22") + len('"three"')
    assert sum(len(part.body) for part in stream.parts()) == entry["tail_offset"]


def test_tail_offset_of_any_other_stream_is_its_length(bucket: Bucket) -> None:
    """extensions line 62."""
    stream: Stream = bucket.stream("text").create("hello, ")
    stream.append("world")
    assert bucket.listing().json()["streams"][0]["tail_offset"] == len(stream.content()) == 12
