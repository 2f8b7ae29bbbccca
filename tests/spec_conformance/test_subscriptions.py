"""Subscriptions that name streams of buckets."""

from __future__ import annotations

import httpx

from tests.http.bucketed import Bucket
from tests.http.protocol import Stream
from tests.http.subscribing import Subscription


def test_a_subscription_that_names_a_stream_of_a_bucket_wakes_for_it(
    client: httpx.Client, bucket: Bucket, json_stream: Stream
) -> None:
    """newer protocol, subscriptions: existing matches are linked and wake; extensions line 86: all stream operations.

    Such a subscription was accepted and could never wake.
    """
    wake = json_stream.create()
    named = bucket.stream("orders").create("before")
    path = f"/ds/{bucket.id}/orders"
    subscription = Subscription(client, f"{bucket.id}-conformance").create(
        type="pull-wake", wake_stream=wake.name, streams=[path]
    )
    named.append("after")
    claimed = subscription.claimed()
    assert [stream["path"] for stream in claimed["streams"] if stream["has_pending"]] == [path]
    subscription.delete()
