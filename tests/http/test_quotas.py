"""Quotas of namespaces: bytes, streams, live readers and connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from headwater.config import ConfigError, load_settings
from headwater.engine.namespaces import namespace_of
from tests.http.protocol import Stream, assert_problem
from tests.http.sse_reader import SseReader
from tests.http.watching import samples, wait_for_live_readers
from tests.serving import Server, serve
from tests.waiting import wait_until

OWN = "vip:bytes=1000, vip:streams=10, vip:readers=2"


@pytest.fixture(scope="module")
def limited() -> Iterator[Server]:
    with serve(
        DS_QUOTAS__MAX_BYTES="100",
        DS_QUOTAS__MAX_STREAMS="2",
        DS_QUOTAS__MAX_READERS="1",
        DS_QUOTAS__NAMESPACES=OWN,
    ) as running:
        yield running


@pytest.fixture
def http(limited: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=limited.url) as client:
        yield client


def test_namespace_is_the_first_of_several_segments_or_the_bucket() -> None:
    assert namespace_of("tenant/orders/1") == "tenant"
    assert namespace_of("alone") is None
    assert namespace_of("/ds/room-1/messages") == "/ds/room-1"


def test_bytes_of_all_streams_of_a_namespace_are_limited(http: httpx.Client) -> None:
    one, two = Stream(http, "a/one").create("x" * 60), Stream(http, "a/two").create("x" * 30)
    assert_problem(two.post("x" * 11), 413, "namespace_full")
    two.append("x" * 10)
    assert_problem(one.post("x"), 413, "namespace_full")
    one.delete()
    two.append("x" * 60)
    Stream(http, "other/one").create("x" * 100)
    Stream(http, "alone").create("x" * 1000)


def test_refusals_say_what_is_full_and_what_to_do() -> None:
    with (
        serve(
            DS_QUOTAS__MAX_STREAMS="1",
            DS_QUOTAS__MAX_BYTES="1",
            DS_QUOTAS__MAX_READERS="1",
            DS_QUOTAS__NAMESPACES="vip:streams=2",
        ) as running,
        httpx.Client(base_url=running.url) as http,
    ):
        stream = Stream(http, "a/one").create("x")
        assert Stream(http, "a/two").put().json()["detail"] == (
            "Namespace 'a' has 1 stream, and its quota is 1. Delete streams of the namespace, or raise"
            " quotas.max_streams."
        )
        for name in ("vip/one", "vip/two"):
            Stream(http, name).create()
        assert Stream(http, "vip/three").put().json()["detail"] == (
            "Namespace 'vip' has 2 streams, and its quota is 2. Delete streams of the namespace, or raise vip:streams"
            " in"
            " quotas.namespaces."
        )
        assert stream.post("yz").json()["detail"] == (
            "Namespace 'a' has 1 byte and the request adds 2; its quota is 1. Delete streams of the namespace, let"
            " retention drop old messages, or raise quotas.max_bytes."
        )
        live = {"offset": "-1", "live": "sse"}
        with SseReader(running, "a/one"):
            wait_for_live_readers(running, "sse", 1)
            assert http.get("/v1/stream/a/one", params=live).json()["detail"] == (
                "Namespace 'a' has 1 live reader, and its quota is 1. Retry later, end unused readers, or raise"
                " quotas.max_readers."
            )


def test_streams_of_a_namespace_are_limited(http: httpx.Client) -> None:
    for name in ("b/one", "b/two"):
        Stream(http, name).create()
    third = Stream(http, "b/three")
    assert_problem(third.put(), 413, "namespace_full")
    assert Stream(http, "b/one").put().status_code == 200, "it exists"
    Stream(http, "b/one").delete()
    third.create()
    for number in range(10):
        Stream(http, f"vip/{number}").create()
    assert_problem(Stream(http, "vip/10").put(), 413, "namespace_full")


def test_live_readers_of_a_namespace_are_limited(http: httpx.Client, limited: Server) -> None:
    stream = Stream(http, "c/one").create()
    Stream(http, "c/two").create()
    with SseReader(limited, "c/one"):
        wait_for_live_readers(limited, "sse", 1)
        refused = http.get("/v1/stream/c/two", params={"offset": "-1", "live": "long-poll"})
        assert_problem(refused, 429, "too_many_readers")
        assert refused.headers["retry-after"] == "5"
        assert stream.get(offset="-1").status_code == 200, "other reads need no live connection"
    wait_for_live_readers(limited, "sse", 0)
    with SseReader(limited, "c/two") as events:
        assert events.status == 200


def test_connections_that_serve_a_namespace_are_limited() -> None:
    with (
        serve(DS_QUOTAS__MAX_CONNECTIONS="2", DS_QUOTAS__NAMESPACES="vip:connections=3") as running,
        httpx.Client(base_url=running.url) as http,
    ):
        stream = Stream(http, "c/one").create()
        Stream(http, "c/two").create()
        with SseReader(running, "c/one"), SseReader(running, "c/two"):
            wait_for_live_readers(running, "sse", 2)
            for refused in (stream.post("x"), stream.get(offset="-1"), stream.head(), Stream(http, "c/three").put()):
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "1"
            busy = stream.post("x")
            assert_problem(busy, 429, "namespace_busy")
            assert busy.json()["detail"] == (
                "Namespace 'c' uses 2 connections, and its quota is 2. Retry later, send fewer requests at the same"
                " time,"
                " end unused live reads, or raise quotas.max_connections."
            )
            Stream(http, "other/one").create().append("x")
            Stream(http, "alone").create().append("x")
            assert samples(running)["headwater_quota_refusals_total{limit=connections}"] == 5
        wait_for_live_readers(running, "sse", 0)
        for _ in range(5):
            stream.append("x")
        assert stream.get(offset="-1").text == "xxxxx"
        with SseReader(running, "c/one"):
            wait_for_live_readers(running, "sse", 1)
            stream.append("one connection is left")


def test_a_connection_is_counted_only_while_it_serves_a_request() -> None:
    with serve(DS_QUOTAS__MAX_CONNECTIONS="1") as running, httpx.Client(base_url=running.url) as first:
        Stream(first, "c/one").create()
        with httpx.Client(base_url=running.url) as second:
            for _ in range(20):
                for http in (first, second):
                    Stream(http, "c/one").append("x")
                    assert Stream(http, "c/missing").head().status_code == 404
        body = "x" * 3_000_000
        Stream(first, "c/large").create(body)
        assert Stream(first, "c/large").get(offset="-1").text == body, "a response in pieces"
        Stream(first, "c/large").append("x")


def test_quotas_hold_after_a_restart_and_follow_retention(tmp_path: Path) -> None:
    def server() -> AbstractContextManager[Server]:
        return serve(
            moving_time=True,
            DS_STORAGE__MODE="file-durable",
            DS_STORAGE__DATA_DIR=str(tmp_path),
            DS_QUOTAS__MAX_BYTES="1000",
        )

    # By age, because a busy machine may apply a limit in bytes before the namespace is full.
    drop = {"Stream-Retention-Age": "3600", "Stream-Retention-Drop": "allowed"}
    with server() as running, httpx.Client(base_url=running.url) as http:
        stream = Stream(http, "d/log").create(headers=drop)
        for _ in range(9):
            stream.append("x" * 100)
        Stream(http, "d/full").create("x" * 100)
        assert_problem(Stream(http, "d/full").post("x"), 413, "namespace_full")
        running.pass_time(2 * 3600)
        earliest, tail = "stream-earliest-offset", "stream-next-offset"
        wait_until(lambda: (head := stream.head().headers).get(earliest) == head[tail])
        Stream(http, "d/full").append("x" * 500)
    with server() as running, httpx.Client(base_url=running.url) as http:
        assert_problem(Stream(http, "d/full").post("x" * 401), 413, "namespace_full")
        Stream(http, "d/full").append("x" * 400)


def test_namespaces_with_their_own_quota_have_metrics(http: httpx.Client, limited: Server) -> None:
    found = samples(limited)
    assert found["headwater_namespace_streams{namespace=vip}"] >= 0
    assert found["headwater_quota_refusals_total{limit=bytes}"] >= 0
    assert not any("namespace=a" in name for name in found)


@pytest.mark.parametrize("text", ["vip", "vip:bytes", "vip:bytes=-1", "vip:memory=5", "vip:connections", "a b:bytes=1"])
def test_invalid_entries_are_errors_at_startup(text: str) -> None:
    with pytest.raises(ConfigError, match="namespaces"):
        load_settings(None, None, {"DS_QUOTAS__NAMESPACES": text}, Path())
