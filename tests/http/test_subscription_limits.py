"""Limits of the subscription API: status, code and `Retry-After`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.http.protocol import Stream
from tests.http.subscribing import Subscription, assert_error
from tests.serving import serve

PULL = {"type": "pull-wake", "wake_stream": "wake"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    settings = {
        "MAX_SUBSCRIPTIONS": "4",
        "MAX_LINKS": "6",
        "MAX_LINKS_PER_SUBSCRIPTION": "3",
        "MAX_PATTERN_SEGMENTS": "8",
        "MAX_DESCRIPTION_CHARS": "10",
    }
    environment = {f"DS_SUBSCRIPTIONS__{key}": value for key, value in settings.items()}
    with serve(**environment) as server, httpx.Client(base_url=server.url) as client:  # type: ignore[arg-type]
        yield client


@pytest.fixture
def made(http: httpx.Client) -> Iterator[list[Subscription]]:
    """Create subscriptions and delete them after the test."""
    subscriptions: list[Subscription] = []
    yield subscriptions
    for one in subscriptions:
        one.delete()


def make(http: httpx.Client, made: list[Subscription], **body: object) -> httpx.Response:
    made.append(Subscription(http, f"s{len(made)}"))
    return made[-1].put(**PULL, **body)


def test_too_many_subscriptions_are_503(http: httpx.Client, made: list[Subscription]) -> None:
    for _ in range(4):
        assert make(http, made, pattern="a/*").status_code == 201
    refused = make(http, made, pattern="a/*")
    assert_error(refused, 503, "SUBSCRIPTION_LIMIT_REACHED")
    assert refused.headers["retry-after"] == "60"


def test_too_many_streams_of_one_subscription_are_413(http: httpx.Client, made: list[Subscription]) -> None:
    assert_error(make(http, made, streams=list("abcd")), 413, "TOO_MANY_STREAMS")
    assert make(http, made, streams=["a", "b"]).status_code == 201
    path = f"{made[-1].path}/streams"
    assert_error(http.post(path, json={"streams": ["c", "d"]}), 413, "TOO_MANY_STREAMS")
    assert set(made[-1].links()) == {"a", "b"}, "all or none"
    assert http.post(path, json={"streams": ["a", "b", "c"]}).status_code == 204


def test_too_many_links_of_all_subscriptions_are_503(http: httpx.Client, made: list[Subscription]) -> None:
    assert make(http, made, streams=list("abc")).status_code == 201
    assert make(http, made, streams=list("abc")).status_code == 201
    refused = make(http, made, streams=["a"])
    assert_error(refused, 503, "SUBSCRIPTION_LIMIT_REACHED")
    assert refused.headers["retry-after"] == "60"


def test_streams_not_linked_because_of_a_limit_are_reported(http: httpx.Client, made: list[Subscription]) -> None:
    assert make(http, made, pattern="later/*").status_code == 201
    for number in range(4):
        Stream(http, f"later/{number}").create("x")
    found = made[-1].get()
    assert (found["stream_count"], found["has_unlinked_streams"]) == (3, True)


def test_patterns_that_are_too_long_together_are_503(http: httpx.Client, made: list[Subscription]) -> None:
    assert make(http, made, pattern="a/b/c/d/*").status_code == 201
    assert_error(make(http, made, pattern="a/b/c/*"), 503, "SUBSCRIPTION_LIMIT_REACHED")
    assert make(http, made, pattern="a/b/*").status_code == 201


def test_requests_that_name_too_many_streams_are_413(http: httpx.Client, made: list[Subscription]) -> None:
    names = [f"n{number}" for number in range(1_001)]
    assert_error(make(http, made, streams=names), 413, "TOO_MANY_STREAMS")
    Stream(http, "wake", "application/json").create()
    assert make(http, made, streams=["a"]).status_code == 201
    assert_error(http.post(f"{made[-1].path}/streams", json={"streams": names}), 413, "TOO_MANY_STREAMS")
    Stream(http, "a").create("x")
    claimed = made[-1].claimed()
    acks = [{"stream": "a", "offset": claimed["streams"][0]["tail_offset"]}] * 1_001
    assert_error(made[-1].act("ack", claimed, acks=acks), 413, "TOO_MANY_STREAMS")
    assert made[-1].act("ack", claimed, acks=acks[:1_000], done=True).is_success


def test_a_description_that_is_too_long_is_400(http: httpx.Client, made: list[Subscription]) -> None:
    assert make(http, made, pattern="a", description="x" * 10).status_code == 201
    assert_error(make(http, made, pattern="a", description="x" * 11), 400, "INVALID_REQUEST")
