"""Webhooks with a real receiver: signatures, answers, callbacks, retries, timeouts, redirects (protocol §7.1)."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from cryptography.exceptions import InvalidSignature

from tests.http.protocol import ZERO, Stream, offset
from tests.http.subscribing import (
    Subscription,
    acks_of,
    assert_error,
    key_set,
    verify,
)
from tests.http.watching import samples, wait_for_sample
from tests.http.webhook_receiver import DONE, Received, Receiver, Reply, receive
from tests.serving import Server, serve
from tests.waiting import wait_until

MIN_DELAY_S = 0.8
"""The shortest delay before the second delivery; each further delay is twice as long."""
LOCAL: Any = {"DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS": "true"}


TIMEOUT_S = 120
markers = itertools.count()
LEASE_S = 600


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with a manual clock; receivers have two minutes to answer."""
    settings: Any = {"DS_SUBSCRIPTIONS__WEBHOOK_TIMEOUT_SECS": str(TIMEOUT_S), **LOCAL}
    with serve(moving_time=True, DS_SERVER__IDLE_TIMEOUT_SECS="600000", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, verify=False) as http:
        yield http


@pytest.fixture
def name(stream_name: Callable[[], str]) -> str:
    return stream_name()


@pytest.fixture
def subscription(client: httpx.Client, name: str) -> Iterator[Subscription]:
    """A subscription that is not yet created. It is deleted after the test, with its calls."""
    made = Subscription(client, name)
    yield made
    made.delete()


def assert_quiet(receiver: Receiver, server: Server, http: httpx.Client, after_s: float = 0) -> None:
    """Check that no further request is sent, by advancing the time and waiting for a later call to another receiver."""
    before = len(receiver.received)
    server.pass_time(after_s)
    with receive(otherwise=DONE) as other:
        name = f"marker-{next(markers)}"
        marker = Subscription(http, name).webhook(other.url, name)
        Stream(http, marker.id).create("now")
        other.wait()
        marker.delete()
    assert len(receiver.received) == before


def test_delivery_lists_the_pending_streams_and_is_signed(subscription: Subscription, server: Server) -> None:
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
        wait_until(lambda: subscription.acked(stream.name) == offset(1, 5))
        assert_quiet(receiver, server, subscription.http, after_s=3600)


def test_key_set_has_public_keys_only(subscription: Subscription) -> None:
    with receive() as receiver:
        subscription.webhook(receiver.url, "none/*")
    response = subscription.http.get("/v1/stream/__ds/jwks.json")
    assert response.headers["content-type"] == "application/jwk-set+json"
    assert response.headers["cache-control"] == "public, max-age=300"
    (key,) = response.json()["keys"]
    assert key == {"kty": "OKP", "crv": "Ed25519", "alg": "EdDSA", "use": "sig", "kid": key["kid"], "x": key["x"]}


def test_done_acks_only_the_reported_messages(subscription: Subscription) -> None:
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
        wait_until(lambda: subscription.acked(stream.name) == offset(2, 6))


def test_appends_during_a_delivery_cause_one_more_delivery(subscription: Subscription) -> None:
    appended = threading.Event()
    with receive(Reply(body=b'{"done": true}', hold=appended), otherwise=DONE) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        streams = [Stream(subscription.http, f"{subscription.id}/{letter}").create() for letter in "abc"]
        for stream in streams:
            for _ in range(5):
                stream.append("x")
        appended.set()
        wait_until(lambda: all(subscription.acked(stream.name) == offset(5, 5) for stream in streams))
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


def test_callback_before_the_response_is_accepted(subscription: Subscription, server: Server) -> None:
    """A typical receiver works, calls back, and answers last."""
    with receive() as receiver:

        def work(got: Received) -> None:
            subscription.act("callback", got.body, acks=acks_of(got.body), done=True).raise_for_status()

        receiver.on_request = work
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        wait_until(lambda: subscription.acked(stream.name) == offset(1, 3))
        assert_quiet(receiver, server, subscription.http, after_s=3600)
        stream.append("two")
        wait_until(lambda: subscription.acked(stream.name) == offset(2, 6))
        assert [got.body["generation"] for got in receiver.received] == [1, 2]


def test_callback_without_the_token_of_the_wake_is_401(
    subscription: Subscription, stream_name: Callable[[], str]
) -> None:
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


def test_failed_deliveries_are_retried_with_growing_delays(subscription: Subscription, server: Server) -> None:
    failed = samples(server)["headwater_webhook_calls_total{outcome=failed}"]
    with receive(Reply(500), Reply(404), Reply(429), otherwise=DONE) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        for number, earliest_s in enumerate((MIN_DELAY_S, 2 * MIN_DELAY_S, 4 * MIN_DELAY_S), 1):
            receiver.wait(number)
            wait_for_sample(server, "webhook_calls_total{outcome=failed}", failed + number)
            assert subscription.get()["status"] == "failed"
            if number == 1:
                stream.append("two")
            assert_quiet(receiver, server, subscription.http, after_s=earliest_s / 2)
            server.pass_time(earliest_s)
        receiver.wait(4)
        assert len({(got.body["wake_id"], got.body["generation"]) for got in receiver.received}) == 1
        assert receiver.received[-1].body["streams"][0]["tail_offset"] == offset(2, 6), (
            "the delivery has the current tail"
        )
        keys = key_set(subscription.http)
        for got in receiver.received:
            verify(got.signature, got.raw, keys)
        wait_until(lambda: subscription.get()["status"] == "active")
        assert subscription.acked(stream.name) == offset(2, 6)


def test_refused_connection_is_a_failed_delivery(subscription: Subscription) -> None:
    with receive() as receiver:
        url = receiver.url
    subscription.webhook(url, f"{subscription.id}/*")
    Stream(subscription.http, f"{subscription.id}/a").create("one")
    wait_until(lambda: subscription.get()["status"] == "failed")


def test_t35_redirects_are_not_followed(subscription: Subscription) -> None:
    with receive() as secret:
        redirects = [Reply(status, headers={"Location": secret.url}) for status in (301, 307)]
        with receive(*redirects, otherwise=DONE) as receiver:
            subscription.webhook(receiver.url, f"{subscription.id}/*")
            stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
            receiver.wait(3)
            wait_until(lambda: subscription.acked(stream.name) == offset(1, 3))
        assert secret.received == []


@pytest.mark.parametrize("trickles", [False, True], ids=["silent", "trickling"])
def test_slow_receiver_times_out_and_is_called_again(
    subscription: Subscription, server: Server, trickles: bool
) -> None:
    """The first call is not answered until the second is received, so the server must have timed out."""
    called_again = threading.Event()
    slow = Reply(body=b'{"done": true}', trickles=trickles, hold=called_again)
    with receive(slow, otherwise=DONE) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*", lease_ttl_ms=LEASE_S * 1000)
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        first = receiver.wait()
        assert_quiet(receiver, server, subscription.http, after_s=TIMEOUT_S / 2)
        assert subscription.get()["status"] == "active"
        server.pass_time(TIMEOUT_S)
        wait_until(lambda: subscription.get()["status"] == "failed")
        server.pass_time(2 * MIN_DELAY_S)
        second = receiver.wait(2)
        called_again.set()
        assert first.body["wake_id"] == second.body["wake_id"]
        wait_until(lambda: subscription.acked(stream.name) == offset(1, 3))


def test_callback_after_a_timed_out_call_is_accepted(subscription: Subscription, server: Server) -> None:
    never = threading.Event()
    with receive(Reply(hold=never)) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        wake = receiver.wait().body
        server.pass_time(TIMEOUT_S + 1)
        wait_until(lambda: subscription.get()["status"] == "failed")
        assert subscription.act("callback", wake, acks=acks_of(wake), done=True).json()["next_wake"] is False
        assert subscription.acked(stream.name) == offset(1, 3)
        assert_quiet(receiver, server, subscription.http, after_s=3600)
        assert subscription.get()["status"] == "active"
        never.set()


def test_a_receiver_that_never_calls_back_is_woken_again_and_fenced(subscription: Subscription, server: Server) -> None:
    with receive() as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*", lease_ttl_ms=LEASE_S * 1000)
        Stream(subscription.http, f"{subscription.id}/a").create("one")
        first = receiver.wait()
        wait_for_sample(server, "subscriptions{kind=webhook,phase=held}", 1)
        assert_quiet(receiver, server, subscription.http, after_s=LEASE_S / 2)
        server.pass_time(LEASE_S)
        second = receiver.wait(2)
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
def test_response_without_done_acks_nothing(subscription: Subscription, server: Server, body: bytes) -> None:
    with receive(Reply(body=body)) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        wake = receiver.wait().body
        wait_for_sample(server, "subscriptions{kind=webhook,phase=held}", 1)
        assert subscription.acked(stream.name) == ZERO
        assert subscription.get()["status"] == "active"
        assert subscription.act("callback", wake, acks=acks_of(wake), done=True).is_success


def test_deleted_subscription_is_not_called_again(subscription: Subscription, server: Server) -> None:
    with receive(otherwise=Reply(500)) as receiver:
        subscription.webhook(receiver.url, f"{subscription.id}/*")
        stream = Stream(subscription.http, f"{subscription.id}/a").create("one")
        wake = receiver.wait().body
        subscription.delete()
        stream.append("two")
        assert_quiet(receiver, server, subscription.http, after_s=3600)
        assert_error(subscription.act("callback", wake, done=True), 404, "SUBSCRIPTION_NOT_FOUND")


def test_receivers_get_the_public_url(stream_name: Callable[[], str]) -> None:
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


def test_server_can_be_stopped_during_a_webhook_call() -> None:
    never = threading.Event()
    with receive(Reply(hold=never)) as receiver:
        with serve(**LOCAL) as server, httpx.Client(base_url=server.url) as http:
            Subscription(http, "s").webhook(receiver.url, "a")
            Stream(http, "a").create("one")
            receiver.wait()
        never.set()
    assert "Traceback" not in server.log()
