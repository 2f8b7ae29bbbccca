"""Retention by age and size, which is ours, beside snapshots and reads from the beginning, which are the protocol's."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.http.bucketed import Bucket
from tests.http.protocol import Stream

DROP = {"Stream-Retention-Bytes": "1000", "Stream-Retention-Drop": "allowed"}


def eventually(condition: Callable[[], bool], *, within_secs: float = 10.0) -> None:
    deadline = time.monotonic() + within_secs
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_secs} s"
        time.sleep(0.05)


def fill(stream: Stream, count: int = 30) -> list[str]:
    return [stream.append(f"{number:03}".encode() * 34) for number in range(count)]


def trimmed(stream: Stream) -> Stream:
    """A stream that has lost its first messages to retention."""
    stream.create(headers=DROP)
    fill(stream)
    eventually(lambda: "stream-earliest-offset" in stream.head().headers)
    return stream


def test_retention_keeps_the_latest_snapshot_and_what_follows_it(bucket: Bucket) -> None:
    """extensions line 205: /bootstrap can provide a snapshot covering the earliest retained offset; line 144.

    Retention by size deleted the snapshot, and bootstrap answered with the last few messages only.
    """
    folded = bucket.stream("folded").create(headers=DROP)
    folded.publish(folded.append("first"), "state")
    other = bucket.stream("other")
    offsets = fill(folded)
    trimmed(other)
    # Retention had its turn on the other stream, and so on this one.
    time.sleep(1.0)
    assert folded.latest().status_code == 307
    parts = [part.body for part in folded.parts()]
    assert parts == [b"state", *(f"{number:03}".encode() * 34 for number in range(30))]
    # The next snapshot covers them, and then they go.
    folded.publish(offsets[-1], "later")
    assert [part.body for part in folded.parts()] == [b"later"]
