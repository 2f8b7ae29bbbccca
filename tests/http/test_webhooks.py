"""Webhooks against a real receiver: signatures, answers, callbacks, retries, time-outs, redirects (protocol §7.1)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from cryptography.exceptions import InvalidSignature

from tests.http.protocol import ZERO, Stream, offset
from tests.http.subscribing import (
    Subscription,
    acks_of,
    assert_error,
    eventually,
    key_set,
    verify,
)
from tests.http.webhook_receiver import DONE, Received, Reply, receive
from tests.serving import Server, serve

LOCAL: Any = {"DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS": "true"}


@pytest.fixture(scope="module")
def hasty() -> Iterator[Server]:
    """A server that gives receivers half a second."""
    with serve(DS_SUBSCRIPTIONS__WEBHOOK_TIMEOUT_SECS="0.5", **LOCAL) as server:
        yield server


@pytest.fixture
def name(stream_name: Callable[[], str]) -> str:
    return stream_name()


@pytest.fixture
def subscription(client: httpx.Client, name: str) -> Iterator[Subscription]:
    """Not yet created. Gone in the end, so that a receiver that went away is not called for ever."""
    made = Subscription(client, name)
    yield made
    made.delete()


def test_a_delivery_tells_what_to_do_and_is_signed(subscription: Subscription, server: Server) -> None:
    with receive(DONE) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("12345")
        got = receiver.wait()
        body = got.body
        assert got.path == "/hook?x=1"
        assert got.headers["content-type"] == "application/json"
        assert got.headers["host"] == f"127.0.0.1:{receiver.port}"
        assert body == {
            "subscription_id": subscription.id,
            "wake_id": body["wake_id"],
            "generation": 1,
            "streams": [
                {
                    "path": stream.name,
                    "link_type": "glob",
                    "acked_offset": ZERO,
                    "tail_offset": offset(1, 5),
                    "has_pending": True,
                }
            ],
            "callback_url": f"{server.url}{subscription.path}/callback",
            "callback_token": body["callback_token"],
        }
        keys = key_set(subscription.http)
        assert subscription.get()["webhook"]["signing"]["kid"] in keys
        assert abs(verify(got.signature, got.raw, keys) - time.time()) < 60
        with pytest.raises(InvalidSignature):
            verify(got.signature, got.raw.replace(b'"generation":1', b'"generation":2'), keys)
        eventually(lambda: subscription.acked(stream.name) == offset(1, 5))
        receiver.stays_quiet(0.3)


def test_the_key_set_holds_public_keys_only(subscription: Subscription) -> None:
    with receive() as receiver:
        subscription.webhook(receiver.url, "none/*")
    response = subscription.http.get("/v1/stream/__ds/jwks.json")
    assert response.headers["content-type"] == "application/jwk-set+json"
    assert response.headers["cache-control"] == "public, max-age=300"
    (key,) = response.json()["keys"]
    assert key == {"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig", "kid": key["kid"], "x": key["x"]}


def test_done_acks_what_was_told_and_no_more(subscription: Subscription) -> None:
    appended = threading.Event()
    with receive(Reply(body=b'{"done": true}', hold=appended), otherwise=DONE) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        first = receiver.wait().body
        stream.append("two")
        appended.set()
        second = receiver.wait(2).body
        assert second["generation"] == 2
        assert second["wake_id"] != first["wake_id"]
        assert second["streams"][0]["acked_offset"] == offset(1, 3)
        assert second["streams"][0]["tail_offset"] == offset(2, 6)
        eventually(lambda: subscription.acked(stream.name) == offset(2, 6))


def test_many_appends_while_one_delivery_is_under_way_are_one_more(subscription: Subscription) -> None:
    appended = threading.Event()
    with receive(Reply(body=b'{"done": true}', hold=appended), otherwise=DONE) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        streams = [Stream(subscription.http, f"{subscription.id}/{letter}").create() for letter in "abc"]
        for stream in streams:
            for _ in range(5):
                stream.append("x")
        appended.set()
        eventually(lambda: all(subscription.acked(stream.name) == offset(5, 5) for stream in streams))
        assert len(receiver.received) == 2


def test_a_callback_acks_later(subscription: Subscription) -> None:
    with receive() as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        wake = receiver.wait().body
        stream.append("two")
        beat = subscription.act("callback", wake, acks=acks_of(wake))
        assert beat.json() == {"ok": True, "next_wake": False}
        assert subscription.acked(stream.name) == offset(1, 3)
        receiver.otherwise = DONE
        done = subscription.act("callback", wake, done=True)
        assert done.json() == {"ok": True, "next_wake": True}
        assert receiver.wait(2).body["generation"] == 2
        assert_error(subscription.act("callback", wake, acks=acks_of(wake), done=True), 409, "FENCED")


def test_a_callback_may_come_before_the_answer(subscription: Subscription) -> None:
    """The usual receiver: it works, calls back, and answers last."""
    with receive() as receiver:

        def work(got: Received) -> None:
            subscription.act("callback", got.body, acks=acks_of(got.body), done=True).raise_for_status()

        receiver.on_request = work
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        eventually(lambda: subscription.acked(stream.name) == offset(1, 3))
        receiver.stays_quiet(0.5)
        stream.append("two")
        eventually(lambda: subscription.acked(stream.name) == offset(2, 6))
        assert [got.body["generation"] for got in receiver.received] == [1, 2]


def test_callbacks_of_others_are_401(subscription: Subscription, stream_name: Callable[[], str]) -> None:
    with receive() as receiver, receive() as foreign:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        other = Subscription(subscription.http, stream_name()).webhook(foreign.url, f"{subscription.id}/*")
        Stream(subscription.http, f"{subscription.id}/a").create("one")
        wake, foreign_wake = receiver.wait().body, foreign.wait().body
        stolen = wake | {"callback_token": foreign_wake["callback_token"]}
        assert_error(subscription.act("callback", stolen, done=True), 401, "TOKEN_INVALID")
        bare = subscription.http.post(f"{subscription.path}/callback", json={"wake_id": "x", "generation": 1})
        assert_error(bare, 401, "TOKEN_INVALID")
        assert subscription.act("callback", wake, acks=acks_of(wake), done=True).is_success
        other.delete()


def test_failed_deliveries_come_again_and_ever_later(subscription: Subscription) -> None:
    with receive(Reply(500), Reply(404), Reply(429), otherwise=DONE) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        receiver.wait()
        eventually(lambda: subscription.get()["status"] == "failed")
        stream.append("two")
        receiver.wait(4)
        times = [got.at_s for got in receiver.received]
        waits = [later - earlier for earlier, later in pairwise(times)]
        for waited, base in zip(waits, (1, 2, 4), strict=True):
            # A busy machine may see each of them late, which the rules of the delays are tested without.
            assert waited >= base * 0.8 - 0.5, waits
        assert len({(got.body["wake_id"], got.body["generation"]) for got in receiver.received}) == 1
        assert receiver.received[-1].body["streams"][0]["tail_offset"] == offset(2, 6), "what is told is fresh"
        keys = key_set(subscription.http)
        for got in receiver.received:
            verify(got.signature, got.raw, keys)
        eventually(lambda: subscription.get()["status"] == "active")
        assert subscription.acked(stream.name) == offset(2, 6)


def test_nobody_there_is_a_failed_delivery(subscription: Subscription) -> None:
    with receive() as receiver:
        url = receiver.url
    subscription.webhook(url, f"{subscription.id}/*")
    Stream(subscription.http, f"{subscription.id}/a").create("one")
    eventually(lambda: subscription.get()["status"] == "failed")


def test_t35_redirects_are_not_followed(subscription: Subscription) -> None:
    with receive() as secret:
        redirects = [Reply(status, headers={"Location": secret.url}) for status in (301, 307)]
        with receive(*redirects, otherwise=DONE) as receiver:
            subscription.webhook(receiver.url, f"{subscription.id}/*")
            stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
            receiver.wait(3)
            eventually(lambda: subscription.acked(stream.name) == offset(1, 3))
        assert secret.received == []


@pytest.mark.parametrize("trickle_s", [0.0, 0.1], ids=["silent", "trickling"])
def test_a_slow_receiver_is_given_up_and_called_again(hasty: Server, trickle_s: float) -> None:
    """The first call is not answered before the second has arrived, so the server must have given it up."""
    called_again = threading.Event()
    slow = Reply(body=b'{"done": true}', trickle_s=trickle_s, hold=called_again)
    with receive(slow, otherwise=DONE) as receiver, httpx.Client(base_url=hasty.url, timeout=60) as http:
        name = f"slow-{receiver.port}"
        subscription = Subscription(http, name).webhook(receiver.url, f"{name}/*")
        stream = Stream(http, f"{name}/a").create("one")
        first, second = receiver.wait(), receiver.wait(2)
        called_again.set()
        assert first.body["wake_id"] == second.body["wake_id"]
        eventually(lambda: subscription.acked(stream.name) == offset(1, 3))
        subscription.delete()


def test_a_call_that_seemed_lost_can_still_be_answered_by_callback(hasty: Server) -> None:
    with receive(Reply(delay_s=3)) as receiver, httpx.Client(base_url=hasty.url) as http:
        name = f"late-{receiver.port}"
        subscription = Subscription(http, name).webhook(receiver.url, f"{name}/*")
        stream = Stream(http, f"{name}/a").create("one")
        wake = receiver.wait().body
        eventually(lambda: subscription.get()["status"] == "failed")
        assert subscription.act("callback", wake, acks=acks_of(wake), done=True).json()["next_wake"] is False
        assert subscription.acked(stream.name) == offset(1, 3)
        receiver.stays_quiet(1.5)
        assert subscription.get()["status"] == "active"
        subscription.delete()


def test_a_receiver_that_never_calls_back_is_woken_again_and_fenced(subscription: Subscription) -> None:
    with receive() as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*", lease_ttl_ms=1000)
        Stream(subscription.http, f"{subscription.id}/a").create("one")
        first, second = receiver.wait(), receiver.wait(2)
        assert second.at_s - first.at_s >= 0.5, "the lease of a second, minus what a busy machine notices late"
        assert (first.body["generation"], second.body["generation"]) == (1, 2)
        assert_error(subscription.act("callback", first.body, done=True), 409, "FENCED", generation=2)
        assert subscription.act("callback", second.body, acks=acks_of(second.body), done=True).is_success


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"done",
        b'{"done": "true"}',
        b'{"done": 1}',
        b'{"done": true',
        b"[" * 60_000,
        b'{"done":true}' + b" " * 70_000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_an_answer_that_does_not_say_done_acks_nothing(subscription: Subscription, body: bytes) -> None:
    with receive(Reply(body=body)) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        wake = receiver.wait().body
        receiver.stays_quiet(0.3)
        assert subscription.acked(stream.name) == ZERO
        assert subscription.get()["status"] == "active"
        assert subscription.act("callback", wake, acks=acks_of(wake), done=True).is_success


def test_a_deleted_subscription_is_called_no_more(subscription: Subscription) -> None:
    with receive(otherwise=Reply(500)) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        wake = receiver.wait().body
        subscription.delete()
        stream.append("two")
        receiver.stays_quiet(1.5)
        assert_error(subscription.act("callback", wake, done=True), 404, "SUBSCRIPTION_NOT_FOUND")


def test_the_public_url_is_what_receivers_are_told(stream_name: Callable[[], str]) -> None:
    with (
        receive(DONE) as receiver,
        serve(DS_SUBSCRIPTIONS__PUBLIC_URL="https://streams.example/", **LOCAL) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        subscription = Subscription(http, "s").webhook(receiver.url, "a")
        assert subscription.get()["webhook"]["signing"]["jwks_url"] == (
            "https://streams.example/v1/stream/__ds/jwks.json"
        )
        Stream(http, "a").create("one")
        callback = receiver.wait().body["callback_url"]
        assert callback == "https://streams.example/v1/stream/__ds/subscriptions/s/callback"


def test_proxies_of_the_environment_are_not_used() -> None:
    with (
        receive(DONE) as receiver,
        receive() as proxy,
        serve(
            HTTP_PROXY=f"http://127.0.0.1:{proxy.port}", http_proxy=f"http://127.0.0.1:{proxy.port}", **LOCAL
        ) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        Subscription(http, "s").webhook(receiver.url.replace("127.0.0.1", "localhost"), "a")
        Stream(http, "a").create("one")
        assert receiver.wait().headers["host"] == f"localhost:{receiver.port}"
        assert proxy.received == []


def test_the_server_stops_while_a_call_is_under_way() -> None:
    with receive(Reply(delay_s=5)) as receiver:
        with serve(**LOCAL) as server, httpx.Client(base_url=server.url) as http:
            Subscription(http, "s").webhook(receiver.url, "a")
            Stream(http, "a").create("one")
            receiver.wait()
            began = time.monotonic()
        assert time.monotonic() - began < 4
    assert "Traceback" not in server.log()
