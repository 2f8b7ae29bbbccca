"""The registry: `__registry__` tells of every stream that comes and goes, and is put right whatever happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.protocol import Stream
from tests.http.subscribing import eventually
from tests.serving import Server, serve

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def listing() -> Iterator[httpx.Client]:
    """A client of a server with a registry and a quick sweep."""
    with (
        serve(DS_REGISTRY__ENABLED="true", DS_EXPIRY__SWEEP_INTERVAL_SECS="0.1") as server,
        httpx.Client(base_url=server.url, timeout=10) as http,
    ):
        yield http


def events(http: httpx.Client) -> list[dict[str, Any]]:
    """Every event of the registry, over as many pages as it takes."""
    found: list[dict[str, Any]] = []
    at = "-1"
    while True:
        response = http.get("/v1/stream/__registry__", params={"offset": at})
        assert response.status_code == 200, response.text
        found += response.json()
        if "stream-up-to-date" in response.headers:
            return found
        at = response.headers["stream-next-offset"]


def listed(http: httpx.Client) -> dict[str, Any]:
    """What the registry says there is: its events, folded."""
    streams: dict[str, Any] = {}
    for event in events(http):
        if event["headers"]["operation"] == "delete":
            del streams[event["key"]]
        else:
            assert (event["key"] in streams) is (event["headers"]["operation"] == "update")
            streams[event["key"]] = event["value"]
    return streams


def test_it_is_there_from_the_start_and_does_not_list_itself(listing: httpx.Client) -> None:
    response = listing.head("/v1/stream/__registry__")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert "__registry__" not in listed(listing)


def test_streams_come_and_go(listing: httpx.Client) -> None:
    before = time.time() * 1000
    Stream(listing, "reg/a", "text/plain; charset=utf-8").create("x")
    Stream(listing, "reg/b").create(headers={"Stream-Forked-From": "/v1/stream/reg/a", "Content-Type": "text/plain"})
    listing.put("/v1/stream/reg/c")
    listing.put("/v1/stream/reg/c")
    own = [event for event in events(listing) if event["key"].startswith("reg/")]
    assert [event["key"] for event in own] == ["reg/a", "reg/b", "reg/c"]
    assert own[0] == {
        "type": "stream",
        "key": "reg/a",
        "value": {
            "path": "reg/a",
            "contentType": "text/plain; charset=utf-8",
            "createdAt": own[0]["value"]["createdAt"],
        },
        "headers": {"operation": "insert"},
    }
    assert abs(own[0]["value"]["createdAt"] - before) < 60_000
    assert own[2]["value"]["contentType"] == "application/octet-stream"
    listing.delete("/v1/stream/reg/c")
    listing.delete("/v1/stream/reg/a")  # It has a fork, and lives on unseen.
    assert [event for event in events(listing) if event["key"].startswith("reg/")][3:] == [
        {"type": "stream", "key": "reg/c", "headers": {"operation": "delete"}},
        {"type": "stream", "key": "reg/a", "headers": {"operation": "delete"}},
    ]
    assert {name for name in listed(listing) if name.startswith("reg/")} == {"reg/b"}


def test_expiry_is_told_too(listing: httpx.Client) -> None:
    listing.put("/v1/stream/brief", headers={"Stream-TTL": "1"})
    assert "brief" in listed(listing)
    eventually(lambda: "brief" not in listed(listing))
    listing.put("/v1/stream/brief")
    assert "brief" in listed(listing)


def test_what_clients_write_into_it_is_passed_over(listing: httpx.Client) -> None:
    junk = b'[1, null, "x", {"type": "user"}, [[]], {"type":"stream","key":5}]'
    assert listing.post("/v1/stream/__registry__", content=junk, headers=JSON).status_code == 204
    listing.put("/v1/stream/after-junk")
    assert listing.get("/v1/stream/__registry__").json()[-1]["key"] == "after-junk"
    assert listing.delete("/v1/stream/__registry__").status_code == 204
    eventually(lambda: listing.head("/v1/stream/__registry__").status_code == 200)
    eventually(lambda: "after-junk" in listed(listing))


def test_deleted_it_comes_back_with_all_there_is(listing: httpx.Client) -> None:
    Stream(listing, "survivor").create()
    assert listing.delete("/v1/stream/__registry__").status_code == 204
    eventually(lambda: listing.head("/v1/stream/__registry__").status_code == 200)
    eventually(lambda: "survivor" in listed(listing))
    Stream(listing, "newcomer").create()
    assert "newcomer" in listed(listing)


def test_without_the_setting_there_is_none(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert http.head("/v1/stream/__registry__").status_code == 404


def test_it_may_grow_beyond_the_limit_for_one_stream() -> None:
    with (
        serve(DS_REGISTRY__ENABLED="true", DS_LIMITS__MAX_STREAM_BYTES="1000") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for number in range(20):
            assert http.put(f"/v1/stream/s{number}").status_code == 201
        assert len(listed(http)) == 20
        assert "missed" not in server.log()


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_after_a_restart_it_is_put_right(tmp_path: Path, mode: str) -> None:
    """Streams that came and went while the registry was off, or whose events a crash swallowed."""
    settings = {
        "directory": tmp_path,
        "DS_STORAGE__MODE": mode,
        "DS_STORAGE__ACID_SHARD_COUNT": "2",
        "DS_STORAGE__ACID_MAP_BYTES": "67108864",
    }
    on: dict[str, Any] = settings | {"DS_REGISTRY__ENABLED": "true"}
    off: dict[str, Any] = settings | {"DS_REGISTRY__ENABLED": "false"}
    with serve(**off) as server, httpx.Client(base_url=server.url) as http:
        http.put("/v1/stream/older")
        server.kill()
    with serve(**on) as server, httpx.Client(base_url=server.url) as http:
        eventually(lambda: "older" in listed(http))
        for name in ("kept", "gone", "changed"):
            http.put(f"/v1/stream/{name}")
        server.kill()
    with serve(**off) as server, httpx.Client(base_url=server.url) as http:
        http.delete("/v1/stream/gone")
        http.delete("/v1/stream/changed")
        http.put("/v1/stream/changed", headers={"Content-Type": "text/plain"})
        http.put("/v1/stream/missed")
        server.kill()
    with serve(**on) as server, httpx.Client(base_url=server.url) as http:
        eventually(lambda: set(listed(http)) == {"older", "kept", "changed", "missed"})
        assert listed(http)["changed"]["contentType"] == "text/plain"
        count = len(events(http))
        server.kill()
    with serve(**on) as server, httpx.Client(base_url=server.url) as http:
        assert len(events(http)) == count, "what is right is left alone"
