"""Every offset from the server contains the incarnation of its stream; an offset of another stream is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import httpx

from tests.http.bucketed import Bucket, BucketStream
from tests.http.protocol import Stream, assert_problem, offset
from tests.http.subscribing import Subscription, acks_of, assert_error

WHOLE = re.compile(r"[0-9a-f]{16}_[0-9a-f]{16}_([0-9a-f]{16})")


def incarnation(token: str) -> str:
    found = WHOLE.fullmatch(token)
    assert found is not None, token
    return found[1]


def recreated(stream: Stream, *contents: str) -> str:
    """Delete the stream, create another one with messages of the same sizes, and return the old tail."""
    old = stream.tail()
    assert stream.delete().status_code == 204
    stream.create()
    for content in contents:
        stream.append(content)
    assert stream.tail()[:33] == old[:33], "the positions are equal, so only the incarnation differs"
    return old


def test_every_offset_in_a_response_has_the_incarnation(stream: Stream) -> None:
    created = stream.put("one")
    first = created.headers["stream-next-offset"]
    life = incarnation(first)
    answers = [
        stream.put("one"),
        stream.post("two"),
        stream.post("3", {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"}),
        stream.post("3", {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"}),
        stream.head(),
        stream.get(offset="-1"),
        stream.get(offset="now"),
        stream.get(offset=first),
        stream.get(offset="-1", until=first),
        stream.get(offset="-1", frames="1"),
        stream.get(offset="-1", splits="2"),
        stream.long_poll("-1"),
        stream.close(),
        stream.post("late"),
    ]
    assert {incarnation(answer.headers["stream-next-offset"]) for answer in answers} == {life}
    for answer in answers:
        if "etag" in answer.headers:
            assert answer.headers["etag"].startswith(f'"{life}:')
    for part in answers[10].json()["ranges"]:
        assert {incarnation(part["start"]), incarnation(part["end"])} == {life}
    events = stream.get(offset="-1", live="sse").text
    controls = [json.loads(line.removeprefix("data:")) for line in events.splitlines() if "streamNextOffset" in line]
    assert controls
    assert {incarnation(control["streamNextOffset"]) for control in controls} == {life}


def test_an_offset_of_a_deleted_stream_is_410_in_every_read_mode(stream: Stream) -> None:
    stream.create()
    stream.append("one")
    old = recreated(stream, "neu")
    for answer in (
        stream.get(offset=old),
        stream.long_poll(old),
        stream.get(offset=old, live="sse"),
        stream.get(offset=old, frames="1"),
        stream.get(offset=old, splits="2"),
        stream.get(offset="-1", until=old),
    ):
        assert_problem(answer, 410, "stream_recreated")
        assert incarnation(old) in answer.json()["detail"]
        assert incarnation(stream.tail()) in answer.json()["detail"]
        assert "stream-earliest-offset" not in answer.headers
    assert stream.get(offset=old[:33]).status_code == 200, "an offset of two parts has no incarnation"


def test_fork_accepts_the_offsets_of_its_source_up_to_the_fork_point(
    stream: Stream, client: httpx.Client, stream_name: Callable[[], str]
) -> None:
    stream.create()
    shared, later = stream.append("one"), stream.append("two")
    fork = Stream(client, stream_name())
    fork.create(headers={"Stream-Forked-From": stream.path, "Stream-Fork-Offset": shared})
    fork.append("zwo")
    assert incarnation(fork.tail()) != incarnation(stream.tail())
    assert fork.get(offset=shared).content == b"zwo"
    assert_problem(fork.get(offset=later), 400, "invalid_offset")
    assert_problem(stream.get(offset=fork.tail()), 410, "stream_recreated")
    # The same request with either form of the offset finds the existing fork.
    for spelling in (shared, shared[:33]):
        again = fork.put(headers={"Stream-Forked-From": stream.path, "Stream-Fork-Offset": spelling})
        assert again.status_code == 200, again.text


def test_a_fork_at_an_offset_of_a_deleted_source_is_410(
    stream: Stream, client: httpx.Client, stream_name: Callable[[], str]
) -> None:
    stream.create()
    stream.append("one")
    old = recreated(stream, "neu")
    fork = Stream(client, stream_name())
    answer = fork.put(headers={"Stream-Forked-From": stream.path, "Stream-Fork-Offset": old})
    assert_problem(answer, 410, "stream_recreated")


def test_snapshot_urls_accept_offsets_with_and_without_incarnation(log_stream: BucketStream) -> None:
    first, second = log_stream.append("one"), log_stream.append("two")
    published = log_stream.put_snapshot(first[:33], "state")
    assert published.headers["stream-snapshot-offset"] == first
    assert log_stream.put_snapshot(second, "state 2").headers["stream-snapshot-offset"] == second
    for spelling in (second, second[:33]):
        answer = log_stream.http.get(f"{log_stream.path}/snapshot/{spelling}")
        assert (answer.status_code, answer.text) == (200, "state 2")
        assert answer.headers["stream-snapshot-offset"] == answer.headers["stream-next-offset"] == second
    latest = log_stream.http.get(f"{log_stream.path}/snapshot", follow_redirects=False)
    assert latest.headers["location"].endswith(f"/snapshot/{second}")
    assert log_stream.head().headers["stream-snapshot-offset"] == second
    assert log_stream.head().headers["stream-earliest-offset"] == second
    bootstrap = log_stream.http.get(f"{log_stream.path}/bootstrap")
    assert bootstrap.headers["stream-snapshot-offset"] == bootstrap.headers["stream-next-offset"] == second
    gone = log_stream.get(offset=first)
    assert_problem(gone, 410, "offset_gone")
    assert gone.headers["stream-earliest-offset"] == second
    assert_problem(log_stream.http.get(f"{log_stream.path}/snapshot/{first}"), 404, "snapshot_not_found")


def test_a_snapshot_of_a_deleted_stream_is_neither_read_nor_published(log_stream: BucketStream) -> None:
    log_stream.put_snapshot(log_stream.tail(), "state")
    old = recreated(log_stream, "uno", "due", "quasi")
    log_stream.put_snapshot(log_stream.tail(), "other state")
    assert_problem(log_stream.http.get(f"{log_stream.path}/snapshot/{old}"), 410, "stream_recreated")
    assert_problem(log_stream.put_snapshot(old, "late"), 410, "stream_recreated")


def test_listing_has_the_offset_to_continue_from(bucket: Bucket, log_stream: BucketStream) -> None:
    tail = log_stream.append("one")
    (listed,) = bucket.http.get(f"{bucket.path}/streams").json()["streams"]
    assert listed["next_offset"] == tail
    assert incarnation(tail)


def test_acks_accept_offsets_with_and_without_incarnation_and_refuse_another(
    client: httpx.Client, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    wake = Stream(client, f"{name}-wake", "application/json").create()
    stream = Stream(client, name).create()
    subscription = Subscription(client, name).create(type="pull-wake", streams=[name], wake_stream=wake.name)
    tail = stream.append("one")
    claimed = subscription.claimed()
    (link,) = claimed["streams"]
    assert link["tail_offset"] == tail
    assert link["acked_offset"] == offset(0, 0)
    assert incarnation(link["acked_offset"]) == incarnation(tail)
    foreign = f"{tail[:33]}_{int(incarnation(tail), 16) ^ 1:016x}"
    refused = subscription.act("ack", claimed, acks=[{"stream": name, "offset": foreign}])
    assert_error(refused, 409, "INVALID_OFFSET")
    assert subscription.act("ack", claimed, acks=[{"stream": name, "offset": tail[:33]}]).status_code in (200, 204)
    assert subscription.act("ack", claimed, acks=acks_of(claimed), done=True).status_code in (200, 204)
    assert subscription.acked(name) == tail
