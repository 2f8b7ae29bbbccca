"""The registry: `__registry__` lists every stream that is created and deleted, and is repaired after any failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem
from tests.http.subscribing import Subscription, wake_events
from tests.serving import Server, serve
from tests.waiting import wait_until

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def listing() -> Iterator[httpx.Client]:
    """A client of a server with a registry and a quick sweep."""
    with (
        serve(DS_REGISTRY__ENABLED="true", DS_EXPIRY__SWEEP_INTERVAL_SECS="0.1") as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


def events(http: httpx.Client) -> list[dict[str, Any]]:
    """Read every event of the registry, page by page."""
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
    """Fold the registry's events into the set of listed streams."""
    streams: dict[str, Any] = {}
    for event in events(http):
        if event["headers"]["operation"] == "delete":
            del streams[event["key"]]
        else:
            assert (event["key"] in streams) is (event["headers"]["operation"] == "update")
            streams[event["key"]] = event["value"]
    return streams


def test_registry_exists_from_the_start_and_does_not_list_itself(listing: httpx.Client) -> None:
    response = listing.head("/v1/stream/__registry__")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert "__registry__" not in listed(listing)


def test_registry_lists_created_and_deleted_streams(listing: httpx.Client) -> None:
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
    listing.delete("/v1/stream/reg/a")  # It has a fork, so it is kept, invisible.
    assert [event for event in events(listing) if event["key"].startswith("reg/")][3:] == [
        {"type": "stream", "key": "reg/c", "headers": {"operation": "delete"}},
        {"type": "stream", "key": "reg/a", "headers": {"operation": "delete"}},
    ]
    assert {name for name in listed(listing) if name.startswith("reg/")} == {"reg/b"}


def test_expiry_is_published_too(listing: httpx.Client) -> None:
    listing.put("/v1/stream/brief", headers={"Stream-TTL": "1"})
    assert "brief" in {event["key"] for event in events(listing)}
    wait_until(lambda: "brief" not in listed(listing))
    listing.put("/v1/stream/brief")
    assert "brief" in listed(listing)


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", JSON),
        ("POST", JSON | {"Stream-Closed": "true"}),
        ("POST", {"Stream-Closed": "true"}),
        ("PUT", JSON),
        ("PUT", {"Content-Type": "text/plain"}),
        ("DELETE", {}),
    ],
)
def test_clients_can_only_read_the_registry(listing: httpx.Client, method: str, headers: dict[str, str]) -> None:
    content = b"" if method == "DELETE" or headers == {"Stream-Closed": "true"} else b'[{"headers":null}]'
    before = events(listing)
    response = listing.request(method, "/v1/stream/__registry__", content=content, headers=headers)
    assert_problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "GET, HEAD, OPTIONS"
    assert "clients can only read it" in response.json()["detail"]
    assert events(listing) == before
    listing.put("/v1/stream/after")
    assert "after" in listed(listing)
    listing.delete("/v1/stream/after")


def test_registry_can_be_forked(listing: httpx.Client) -> None:
    fork = {"Stream-Forked-From": "/v1/stream/__registry__"}
    assert listing.put("/v1/stream/fork-of-it", headers=fork).status_code == 201
    assert listing.post("/v1/stream/fork-of-it", content=b"[1]", headers=JSON).status_code == 204


def test_pull_wake_cannot_write_to_the_registry(listing: httpx.Client) -> None:
    Stream(listing, "woken").create()
    Stream(listing, "wakes", "application/json").create()
    before = events(listing)
    body = {"type": "pull-wake", "pattern": "woken", "wake_stream": "__registry__"}
    listing.put("/v1/stream/__ds/subscriptions/sneaky", json=body)
    Subscription(listing, "honest").pull("wakes", "woken")
    Stream(listing, "woken").append("x")
    # The wake of the other subscription is written after the one that must not be written.
    wait_until(lambda: wake_events(listing, "wakes"))
    assert events(listing) == before


def test_without_the_setting_there_is_no_registry(server: Server) -> None:
    with httpx.Client(base_url=server.url) as http:
        assert http.head("/v1/stream/__registry__").status_code == 404


def test_registry_may_exceed_the_limit_of_one_stream() -> None:
    with (
        serve(DS_REGISTRY__ENABLED="true", DS_LIMITS__MAX_STREAM_BYTES="1000") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        for number in range(20):
            assert http.put(f"/v1/stream/s{number}").status_code == 201
        assert len(listed(http)) == 20
        assert "missed" not in server.log()


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_registry_is_corrected_after_a_restart(tmp_path: Path, mode: str) -> None:
    """Streams were created and deleted while the registry was off, or their events were lost in a crash."""
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
        wait_until(lambda: "older" in listed(http))
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
        wait_until(lambda: set(listed(http)) == {"older", "kept", "changed", "missed"})
        assert listed(http)["changed"]["contentType"] == "text/plain"
        count = len(events(http))
        server.kill()
    with serve(**on) as server, httpx.Client(base_url=server.url) as http:
        assert len(events(http)) == count, "correct entries are not changed"


def test_registry_stream_changed_by_a_client_while_disabled_is_replaced(tmp_path: Path) -> None:
    """The stream is closed, has an expiry, and contains messages that are not events."""
    with (
        serve(directory=tmp_path, DS_STORAGE__MODE="file-durable") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        Stream(http, "other").create()
        http.put("/v1/stream/__registry__", headers=JSON | {"Stream-TTL": "3600"})
        http.post("/v1/stream/__registry__", content=b'[{"headers":null}]', headers=JSON | {"Stream-Closed": "true"})
    with (
        serve(directory=tmp_path, DS_STORAGE__MODE="file-durable", DS_REGISTRY__ENABLED="true") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        wait_until(lambda: set(listed(http)) == {"other"})
        server.wait_for_log("it is replaced by a new one")
