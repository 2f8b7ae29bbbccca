"""Subscriptions to streams of buckets, which are named by their path `/ds/{bucket}/{stream}`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from tests.http.bucketed import Bucket
from tests.http.protocol import Stream, offset
from tests.http.subscribing import Subscription, acks_of, wake_events
from tests.serving import serve


@pytest.fixture
def wake(client: httpx.Client, stream_name: Callable[[], str]) -> str:
    return Stream(client, stream_name(), "application/json").create().name


def pull(client: httpx.Client, id_: str, wake: str, **body: object) -> Subscription:
    return Subscription(client, id_).create(type="pull-wake", wake_stream=wake, **body)


@pytest.mark.one_process
@pytest.mark.parametrize("how", ["explicit", "glob"])
def test_a_stream_of_a_bucket_wakes_its_subscription(client: httpx.Client, bucket: Bucket, wake: str, how: str) -> None:
    old = bucket.stream("old").create("before")
    path = f"/ds/{bucket.id}/old"
    follows = {"streams": [path]} if how == "explicit" else {"pattern": f"/ds/{bucket.id}/*"}
    subscription = pull(client, f"{bucket.id}-{how}", wake, **follows)
    assert subscription.acked(path) == offset(1, 6)
    old.append("after")
    claimed = subscription.claimed()
    assert [stream["path"] for stream in claimed["streams"] if stream["has_pending"]] == [path]
    assert claimed["streams"][0]["link_type"] == how
    assert wake_events(client, wake)[0]["stream"] == path
    done = subscription.act("ack", claimed, acks=acks_of(claimed), done=True)
    assert done.json() == {"ok": True, "next_wake": False}
    assert subscription.acked(path) == offset(2, 11)
    subscription.delete()


def test_a_later_stream_of_a_bucket_is_linked_before_its_first_append(
    client: httpx.Client, bucket: Bucket, wake: str
) -> None:
    named = pull(client, f"{bucket.id}-named", wake, streams=[f"/ds/{bucket.id}/new"])
    matched = pull(client, f"{bucket.id}-matched", wake, pattern="/ds/**")
    bucket.stream("new").create("first")
    for subscription in (named, matched):
        claimed = subscription.claimed()
        pending = [stream for stream in claimed["streams"] if stream["has_pending"]]
        assert [(stream["path"], stream["tail_offset"]) for stream in pending] == [
            (f"/ds/{bucket.id}/new", offset(1, 5))
        ]
        subscription.delete()


def test_wildcards_do_not_match_streams_of_the_other_surface(client: httpx.Client, bucket: Bucket, wake: str) -> None:
    bucket.stream("s").create("x")
    Stream(client, f"ds/{bucket.id}/s").create("x")
    everything = pull(client, f"{bucket.id}-all", wake, pattern="**")
    assert f"/ds/{bucket.id}/s" not in everything.links()
    assert f"ds/{bucket.id}/s" in everything.links()
    buckets = pull(client, f"{bucket.id}-buckets", wake, pattern=f"/ds/{bucket.id}/**")
    assert list(buckets.links()) == [f"/ds/{bucket.id}/s"]
    everything.delete()
    buckets.delete()


def test_links_to_streams_of_buckets_are_added_and_removed(client: httpx.Client, bucket: Bucket, wake: str) -> None:
    path = f"/ds/{bucket.id}/s"
    subscription = pull(client, f"{bucket.id}-links", wake, streams=["other"])
    added = client.post(f"{subscription.path}/streams", json={"streams": [path]})
    assert added.status_code == 204, added.text
    assert set(subscription.links()) == {"other", path}
    removed = client.delete(f"{subscription.path}/streams/{quote(path, safe='')}")
    assert removed.status_code == 204, removed.text
    assert set(subscription.links()) == {"other"}
    subscription.delete()


def test_links_to_streams_of_buckets_survive_a_kill(tmp_path: Path) -> None:
    with serve(directory=tmp_path, DS_STORAGE__MODE="file-durable") as server:
        with httpx.Client(base_url=server.url) as http:
            wake = Stream(http, "wake", "application/json").create().name
            bucket = Bucket(http, "agents").create()
            bucket.stream("s").create("one")
            pull(http, "named", wake, streams=["/ds/agents/s"])
            pull(http, "matched", wake, pattern="/ds/agents/*")
        server.kill()
    with (
        serve(directory=tmp_path, DS_STORAGE__MODE="file-durable") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        Bucket(http, "agents").stream("s").append("two")
        for id_ in ("named", "matched"):
            (stream,) = Subscription(http, id_).claimed()["streams"]
            assert (stream["path"], stream["acked_offset"]) == ("/ds/agents/s", offset(1, 3))
