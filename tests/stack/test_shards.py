"""Several server processes behind one Envoy: each stream has one shard, and requests across shards are rejected."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving import Server, serve
from tests.stack.proxying import Proxied, proxied
from tests.stack.stacks import stack

# What is started for the module is started once, in one worker.
TEXT = {"Content-Type": "text/plain"}
SHARDS = 3
STREAMS = 40


@pytest.fixture(scope="module")
def shards() -> Iterator[list[Server]]:
    settings = {"DS_SUBSCRIPTIONS__ENABLED": "false"}
    with serve(**settings) as a, serve(**settings) as b, serve(**settings) as c:  # type: ignore[arg-type]
        yield [a, b, c]


@pytest.fixture(scope="module")
def proxy(shards: list[Server]) -> Iterator[Proxied]:
    with proxied(*(shard.port for shard in shards)) as running:
        yield running


def homes(shards: list[Server], path: str) -> list[int]:
    """The shards that have a stream, asked one by one."""
    return [number for number, shard in enumerate(shards) if httpx.head(f"{shard.url}{path}").status_code == 200]


def test_each_stream_has_one_home_whatever_is_asked_of_it(proxy: Proxied, shards: list[Server]) -> None:
    token = proxy.token()
    used = set()
    for number in range(STREAMS):
        path = f"/v1/stream/sharded/{number}"
        assert proxy.raw("PUT", path, "Content-Type: text/plain", token=token).status == 201
        assert proxy.raw("POST", f"{path}?x=1", "Content-Type: text/plain", token=token, body=b"one").status == 204
        for query in ("", "?offset=-1", "?offset=-1&live=long-poll", "?offset=-1&live=sse&x=2"):
            if "sse" not in query:
                assert proxy.raw("GET", path + query, token=token).body == b"one"
        assert proxy.raw("HEAD", path, token=proxy.token(sub="bob")).status == 200
        found = homes(shards, path)
        assert len(found) == 1
        used.update(found)
    assert used == set(range(SHARDS))


@pytest.mark.parametrize(
    "spelling",
    ["spelled-name", "spelled%2Dname", "spelled%2dname", "%73pelled-name", "x/../spelled-name", "/spelled-name"],
)
def test_every_spelling_of_a_name_leads_to_its_home(proxy: Proxied, shards: list[Server], spelling: str) -> None:
    token = proxy.token()
    proxy.raw("PUT", "/v1/stream/spelled-name", "Content-Type: text/plain", token=token)
    assert proxy.raw("PUT", f"/v1/stream/{spelling}", "Content-Type: text/plain", token=token).status == 200
    assert len(homes(shards, "/v1/stream/spelled-name")) == 1


def test_no_client_can_choose_the_shard(proxy: Proxied, shards: list[Server]) -> None:
    token = proxy.token()
    for number in range(8):
        line = f"X-Headwater-Shard-Key: /v1/stream/elsewhere-{number}"
        proxy.raw("PUT", "/v1/stream/chosen", "Content-Type: text/plain", line, token=token)
    assert len(homes(shards, "/v1/stream/chosen")) == 1


def test_a_bucket_and_its_streams_are_at_home_together(proxy: Proxied, shards: list[Server]) -> None:
    token = proxy.token()
    for number in range(6):
        bucket = f"/ds/bucket-{number}"
        assert proxy.raw("PUT", bucket, token=token).status == 201
        for stream in range(3):
            made = proxy.raw("PUT", f"{bucket}/stream-{stream}", "Content-Type: text/plain", token=token)
            assert made.status == 201
        listing = proxy.raw("GET", f"{bucket}/streams?limit=10", token=token)
        assert listing.body.count(b"stream_id") == 3
        assert len(homes(shards, f"{bucket}/stream-1")) == 1


def test_what_needs_all_streams_is_refused_with_the_reason(proxy: Proxied) -> None:
    admin = proxy.token(scope="streams:admin")
    for target, word in (
        ("/v1/stream/__ds/subscriptions/s", b"Subscriptions"),
        ("/v1/stream/__ds/subscriptions", b"Subscriptions"),
        ("/v1/stream/__registry__", b"registry"),
        ("/ds", b"Buckets"),
    ):
        for port in (proxy.port, proxy.direct_port):
            answer = proxy.raw("GET", target, token=admin, port=port)
            assert (answer.status, answer.code) == (501, "sharded"), answer
            assert word in answer.body


def test_a_fork_stays_on_the_shard_of_its_source_or_is_refused_with_the_reason(
    proxy: Proxied, shards: list[Server]
) -> None:
    token = proxy.token()
    source = "/v1/stream/fork-source"
    proxy.raw("PUT", source, "Content-Type: text/plain", token=token, body=b"")
    proxy.raw("POST", source, "Content-Type: text/plain", token=token, body=b"origin")
    home = homes(shards, source)
    outcomes = set()
    for number in range(24):
        fork = f"/v1/stream/fork-{number}"
        answer = proxy.raw("PUT", fork, "Content-Type: text/plain", f"Stream-Forked-From: {source}", token=token)
        outcomes.add(answer.status)
        if answer.status == 201:
            assert homes(shards, fork) == home
            assert proxy.raw("GET", f"{fork}?offset=-1", token=token).body == b"origin"
        else:
            assert (answer.status, answer.code) == (404, "source_not_on_shard"), answer
            assert homes(shards, fork) == []
    assert outcomes == {201, 404}


def test_without_a_token_the_direct_port_leads_to_the_same_homes(proxy: Proxied, shards: list[Server]) -> None:
    assert proxy.raw("PUT", "/v1/stream/direct", "Content-Type: text/plain", port=proxy.direct_port).status == 201
    assert proxy.raw("PUT", "/v1/stream/direct", "Content-Type: text/plain", token=proxy.token()).status == 200
    assert len(homes(shards, "/v1/stream/direct")) == 1


@pytest.mark.timeout(180)
def test_a_shard_that_is_down_answers_503_and_none_of_its_streams_is_made_elsewhere(tmp_path: Path) -> None:
    with stack(tmp_path, DS_STACK__RESTART_DELAY_SECS="120", DS_STACK__RESTART_DELAY_MAX_SECS="120") as made:
        made.up("--shards", "2")
        with made.client(made.token()) as client:
            names = [f"/v1/stream/s-{number}" for number in range(24)]
            for name in names:
                assert client.put(name, headers=TEXT).status_code == 201
            dead = made.part("server-1")
            os.kill(dead["pid"], signal.SIGKILL)
            alive = f"http://127.0.0.1:{made.ports['shards']}"
            kept = {name for name in names if httpx.head(alive + name).status_code == 200}
            lost = set(names) - kept
            assert kept
            assert lost
            for name in kept:
                assert client.post(name, content=b"x", headers=TEXT).status_code == 204
            for name in lost:
                assert client.put(name, headers=TEXT).status_code == 503
                assert client.get(name).status_code == 503
                assert httpx.head(alive + name).status_code == 404
            status = made.run("status")
            assert status.returncode == 1
            assert "restarting" in status.stdout
        refused = made.run("down")
        assert refused.returncode == 0
        other = made.run("up", "--shards", "3")
        assert other.returncode == 2
        assert "created for 2 shards" in other.stderr
        # Without a number, the directory knows its own.
        made.up()
        assert made.status()["shards"] == 2
        with made.client(made.token()) as client:
            assert {client.head(name).status_code for name in names} == {200}
