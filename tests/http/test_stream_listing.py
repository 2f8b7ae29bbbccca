"""Listing streams by prefix, and waiting for those that changed."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import httpx

from tests.http.protocol import Stream, assert_problem
from tests.serving import Server

LISTING = "/v1/stream/__ds/streams"
_numbers = itertools.count()


def family() -> str:
    return f"family-{next(_numbers):04}/"


def json_stream(client: httpx.Client, name: str) -> Stream:
    return Stream(client, name, "application/json").create()


def listed(client: httpx.Client, prefix: str, limit: int = 1000) -> list[dict[str, Any]]:
    """All entries of a listing, page by page."""
    found: list[dict[str, Any]] = []
    query: dict[str, str | int] = {"prefix": prefix, "limit": limit}
    while True:
        page = client.get(LISTING, params=query).json()
        assert len(page["streams"]) <= limit
        found += page["streams"]
        if not page["has_more"]:
            return found
        query["after"] = page["next_cursor"]


def changes(client: httpx.Client, prefix: str, cursor: str | None = None, path: str = LISTING) -> dict[str, Any]:
    query = {"prefix": prefix, "live": "long-poll"} | ({"cursor": cursor} if cursor is not None else {})
    response = client.get(path, params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_streams_are_listed_by_prefix_with_their_tails(client: httpx.Client) -> None:
    prefix = family()
    streams = [json_stream(client, f"{prefix}{n}") for n in range(5)]
    json_stream(client, prefix.removesuffix("/") + "-other")
    client.put(f"/ds/{prefix.removesuffix('/')}")
    for stream in reversed(streams):
        stream.append("[1]")
    streams[1].http.post(streams[1].path, headers={"Stream-Closed": "true"})
    streams[2].http.delete(streams[2].path)
    entries = listed(client, prefix, 2)
    assert [entry["name"] for entry in entries] == [f"{prefix}{n}" for n in (0, 1, 3, 4)]
    for entry in entries:
        head = client.head(f"/v1/stream/{entry['name']}")
        assert entry["next_offset"] == head.headers["Stream-Next-Offset"]
        assert entry["content_type"] == "application/json"
        assert 0 < entry["created_at_ms"] <= entry["last_write_at_ms"]
    assert [entry.get("closed", False) for entry in entries] == [False, True, False, False]
    assert listed(client, prefix + "none") == []


def test_waiting_listing_returns_after_a_change(patient: Server) -> None:
    with httpx.Client(base_url=patient.url, verify=False) as client:
        check_waiting_listing(client)


def check_waiting_listing(client: httpx.Client) -> None:
    prefix = family()
    one, two = (json_stream(client, f"{prefix}{n}") for n in (1, 2))
    json_stream(client, f"{prefix}3")
    cursor = changes(client, prefix)["changes_cursor"]
    assert changes(client, prefix)["streams"] == []
    found: list[dict[str, Any]] = []
    waiting = threading.Thread(target=lambda: found.append(changes(client, prefix, cursor)))
    waiting.start()
    json_stream(client, f"elsewhere-{prefix}1")
    one.append("[1]")
    waiting.join(60)
    assert [entry["name"] for entry in found[0]["streams"]] == [one.name]
    assert found[0]["streams"][0]["next_offset"] == client.head(one.path).headers["Stream-Next-Offset"]
    # Changes since a cursor are returned at once: each stream once, in the order of the last changes.
    two.append("[1]")
    one.append("[2]")
    two.append("[2]")
    client.delete(f"/v1/stream/{prefix}3")
    later = changes(client, prefix, found[0]["changes_cursor"])
    assert [(entry["name"], entry.get("deleted", False)) for entry in later["streams"]] == [
        (one.name, False),
        (two.name, False),
        (f"{prefix}3", True),
    ]
    assert not later["reset"]


def test_changes_are_paged(client: httpx.Client) -> None:
    prefix = family()
    cursor = changes(client, prefix)["changes_cursor"]
    names = [json_stream(client, f"{prefix}{n}").name for n in range(7)]
    found: list[str] = []
    has_more = True
    while has_more:
        query = {"prefix": prefix, "live": "long-poll", "cursor": cursor, "limit": "3"}
        page = client.get(LISTING, params=query).json()
        found += [entry["name"] for entry in page["streams"]]
        cursor, has_more = page["changes_cursor"], page["has_more"]
    assert found == names


def test_a_stream_created_again_is_a_change(client: httpx.Client) -> None:
    prefix = family()
    stream = json_stream(client, f"{prefix}1")
    cursor = changes(client, prefix)["changes_cursor"]
    before = listed(client, prefix)
    client.delete(stream.path)
    json_stream(client, stream.name)
    (entry,) = changes(client, prefix, cursor)["streams"]
    assert entry["name"] == stream.name
    assert entry["next_offset"] != before[0]["next_offset"]


def test_unknown_cursor_requests_a_new_listing(client: httpx.Client) -> None:
    known = changes(client, "")["changes_cursor"]
    for cursor in ("", "x", "0_0", known + "0", known.replace("_", "_-")):
        answer = changes(client, "", cursor)
        assert answer["reset"]
        assert answer["changes_cursor"].startswith(known.split("_")[0])


def test_changes_of_a_bucket(client: httpx.Client) -> None:
    bucket = family().removesuffix("/")
    client.put(f"/ds/{bucket}")
    path = f"/ds/{bucket}/streams"
    cursor = changes(client, "", path=path)["changes_cursor"]
    outside = changes(client, "")["changes_cursor"]
    client.put(f"/ds/{bucket}/one", headers={"Content-Type": "application/json"})
    (entry,) = changes(client, "", cursor, path)["streams"]
    assert entry["name"] == "one"
    json_stream(client, f"{bucket}/two")
    assert [entry["name"] for entry in changes(client, "", outside)["streams"]] == [f"{bucket}/two"]
    assert_problem(client.get("/ds/no-such/streams", params={"live": "long-poll"}), 404, "bucket_not_found")


def test_listing_validates_its_limit_and_allows_only_get(client: httpx.Client) -> None:
    assert_problem(client.get(LISTING, params={"limit": "1001"}), 400, "bad_request")
    assert client.post(LISTING).status_code == 405
