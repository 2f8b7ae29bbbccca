"""Subscriptions survive the end of the process: configuration, cursors, leases, retries, keys.

Every server here is killed with SIGKILL and restarted on the same directory, in each persistent mode.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.http.protocol import Stream, offset
from tests.http.subscribing import (
    Subscription,
    acks_of,
    assert_error,
    key_set,
    verify,
    wake_events,
)
from tests.http.webhook_receiver import DONE, Reply, receive
from tests.ports import free_port
from tests.serving import Server, serve
from tests.waiting import wait_until

MODES = ["file-durable", "file-fast", "acid"]


@contextmanager
def server_on(directory: Path, mode: str, port: int = 0) -> Iterator[tuple[Server, httpx.Client]]:
    with (
        serve(
            directory=directory,
            port=port or free_port(),
            DS_STORAGE__MODE=mode,
            DS_STORAGE__ACID_SHARD_COUNT="2",
            DS_STORAGE__ACID_MAP_BYTES="67108864",
            DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS="true",
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield server, http


@pytest.mark.parametrize("mode", MODES)
def test_subscriptions_cursors_and_keys_survive_a_kill(tmp_path: Path, mode: str) -> None:
    with receive(otherwise=DONE) as receiver:
        with server_on(tmp_path, mode) as (server, http):
            port = server.port
            Stream(http, "wake", "application/json").create()
            hook = Subscription(http, "hook").webhook(receiver.url, "hooked/*", description="kept", lease_ttl_ms=1234)
            pull = Subscription(http, "pull").pull("wake", "events/**", streams=["extra", "later/one"])
            events = Stream(http, "events/a").create("one")
            events.append("two")
            Stream(http, "extra").create("xyz")
            hooked = Stream(http, "hooked/h").create("123")
            wait_until(lambda: hook.acked(hooked.name) == offset(1, 3))
            claimed = pull.claimed("ann")
            assert pull.act("ack", claimed, acks=[{"stream": events.name, "offset": offset(1, 3)}]).is_success
            before = {one.id: one.get() for one in (hook, pull)}
            keys = http.get("/v1/stream/__ds/jwks.json").json()
            server.kill()
        with server_on(tmp_path, mode, port) as (server, http):
            hook, pull = Subscription(http, "hook"), Subscription(http, "pull")
            assert {one.id: one.get() for one in (hook, pull)} == before
            assert http.get("/v1/stream/__ds/jwks.json").json() == keys
            assert_error(pull.claim("bob"), 409, "ALREADY_CLAIMED", current_holder="ann", generation=1)
            assert [event["generation"] for event in wake_events(http, "wake")] == [1]
            done = pull.act("ack", claimed, acks=acks_of(claimed), done=True)
            assert done.json() == {"ok": True, "next_wake": False}
            Stream(http, "hooked/h").append("456")
            again = receiver.wait(2)
            assert again.body["generation"] == 2
            verify(again.signature, again.raw, key_set(http))
            Stream(http, "later/one").create("new")
            assert pull.claimed()["generation"] == 2
            server.kill()


@pytest.mark.parametrize("mode", MODES)
def test_delivery_interrupted_by_a_kill_is_repeated(tmp_path: Path, mode: str) -> None:
    killed = threading.Event()
    with receive(Reply(hold=killed), otherwise=DONE) as receiver:
        with server_on(tmp_path, mode) as (server, http):
            port = server.port
            Subscription(http, "s").webhook(receiver.url, "a", lease_ttl_ms=60_000)
            Stream(http, "a").create("one")
            first = receiver.wait().body
            server.kill()
            killed.set()
        with server_on(tmp_path, mode, port) as (server, http):
            second = receiver.wait(2).body
            assert (second["wake_id"], second["generation"]) == (first["wake_id"], 1)
            assert second["callback_token"] == first["callback_token"]
            wait_until(lambda: Subscription(http, "s").acked("a") == offset(1, 3))


def test_the_retry_schedule_is_kept(tmp_path: Path) -> None:
    with receive(Reply(500), Reply(500), otherwise=DONE) as receiver:
        with server_on(tmp_path, "file-durable") as (server, http):
            port = server.port
            subscription = Subscription(http, "s").webhook(receiver.url, "a")
            Stream(http, "a").create("one")
            second = receiver.wait(2)
            wait_until(lambda: 'headwater_webhook_calls_total{outcome="failed"} 2.0' in http.get("/metrics").text)
            Stream(http, "b").create()  # This append is durable after everything before it.
            failed = subscription.get()
            assert failed["status"] == "failed"
            failure = failed["failure"]
            assert (failure["attempts"], failure["reason"]) == (2, "status 500")
            assert failure["retry_at"] > failed["created_at"]
            [listed] = http.get("/v1/stream/__ds/subscriptions").json()["subscriptions"]
            assert listed["failure"] == failure
            server.kill()
        with server_on(tmp_path, "file-durable", port) as (server, http):
            status = Subscription(http, "s").get()["status"]
            assert status == "failed" or len(receiver.received) > 2, "until the third delivery"
            third = receiver.wait(3)
            # At the latest after the restart, which takes a while on a busy machine.
            assert third.at_s - second.at_s >= 1.5, "two seconds after the second delivery, not at once"
            assert third.body["wake_id"] == second.body["wake_id"]
            wait_until(lambda: Subscription(http, "s").get()["status"] == "active")
            assert "failure" not in Subscription(http, "s").get()


def test_lease_that_expired_while_the_server_was_down_wakes_again(tmp_path: Path) -> None:
    with server_on(tmp_path, "file-durable") as (server, http):
        port = server.port
        Stream(http, "wake", "application/json").create()
        Subscription(http, "s").pull("wake", "a/*", lease_ttl_ms=1000)
        Stream(http, "a/b").create("one")
        # A claim could be earlier than its wake event; the events of both wakes are counted below.
        wait_until(lambda: [event["generation"] for event in wake_events(http, "wake")] == [1])
        stale = Subscription(http, "s").claimed()
        server.kill()
    with server_on(tmp_path, "file-durable", port) as (server, http):
        wait_until(lambda: [event["generation"] for event in wake_events(http, "wake")] == [1, 2])
        assert_error(Subscription(http, "s").act("ack", stale, done=True), 409, "FENCED")


def test_deleted_subscriptions_stay_deleted_after_a_kill(tmp_path: Path) -> None:
    with server_on(tmp_path, "file-durable") as (server, http):
        port = server.port
        Stream(http, "wake", "application/json").create()
        Subscription(http, "gone").pull("wake", "**").delete()
        kept = Subscription(http, "kept").pull("wake", "**", streams=["x"])
        http.delete(f"{kept.path}/streams/x")
        Stream(http, "a").create("one")
        Stream(http, "b").create("one")
        claimed = kept.claimed()
        kept.act("ack", claimed, acks=acks_of(claimed), done=True)
        http.delete("/v1/stream/a")
        server.kill()
    with server_on(tmp_path, "file-durable", port) as (server, http):
        assert_error(http.get(Subscription(http, "gone").path), 404, "SUBSCRIPTION_NOT_FOUND")
        links = Subscription(http, "kept").links()
        assert {name: link["acked_offset"] for name, link in links.items()} == {"b": offset(1, 3)}
        Stream(http, "a").create("new life")
        assert [
            delivered["path"]
            for delivered in Subscription(http, "kept").claimed()["streams"]
            if delivered["has_pending"]
        ] == ["a"]


@pytest.mark.parametrize("mode", MODES)
def test_no_delivery_is_lost_by_kills_at_any_time(tmp_path: Path, mode: str, long: bool) -> None:
    """Append and kill the server repeatedly; in the end every acknowledged append was delivered."""
    chance = random.Random(7)
    names = [f"events/{letter}" for letter in "abcd"]
    written: dict[str, str] = {}
    delivered: dict[str, str] = {}
    port = 0
    with receive(otherwise=DONE) as receiver:
        for number in range(20 if long else 4):
            with server_on(tmp_path, mode, port) as (server, http):
                port = server.port
                if number == 0:
                    Subscription(http, "s").webhook(receiver.url, "events/*")
                writer = Writer(server, names, written)
                wait_until(lambda: len(written) == len(names), what="every stream has an acknowledged append")
                time.sleep(chance.uniform(0.2, 0.8))
                server.kill()
                writer.join()
        with server_on(tmp_path, mode, port) as (server, http):
            subscription = Subscription(http, "s")
            assert len(written) == len(names)
            tails = {name: http.head(f"/v1/stream/{name}").headers["stream-next-offset"] for name in names}
            wait_until(lambda: {name: subscription.acked(name) for name in names} == tails)
    for got in receiver.received:
        delivered |= {
            stream["path"]: max(stream["tail_offset"], delivered.get(stream["path"], ""))
            for stream in got.body["streams"]
        }
    for name, tail in written.items():
        assert delivered[name] >= tail, f"{name} was acknowledged up to {tail}, and delivered up to {delivered[name]}"
    generations = [got.body["generation"] for got in receiver.received]
    assert generations == sorted(generations)


class Writer(threading.Thread):
    """Appends to one stream after another until the server ends, and records the acknowledged offsets."""

    def __init__(self, server: Server, names: list[str], written: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._url = server.url
        self._names = names
        self._written = written
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            try:
                for name in self._names:
                    http.put(f"/v1/stream/{name}", headers={"Content-Type": "text/plain"})
                while True:
                    for name in self._names:
                        response = http.post(f"/v1/stream/{name}", content="x", headers={"Content-Type": "text/plain"})
                        if response.is_success:
                            self._written[name] = response.headers["stream-next-offset"]
            except httpx.TransportError:
                return
