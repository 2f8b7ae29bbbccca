"""Lists of buckets and subscriptions, the time of the last write, and sandboxing of active content."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem

_numbers = itertools.count()


def walked(client: httpx.Client, path: str, key: str, limit: int) -> list[str]:
    """All ids of a list, page by page."""
    found: list[str] = []
    query: dict[str, str | int] = {"limit": limit}
    while True:
        page = client.get(path, params=query).json()
        assert len(page[key]) <= limit
        found += [entry.get("bucket_id") or entry["id"] for entry in page[key]]
        if not page["has_more"]:
            assert page["next_cursor"] is None
            return found
        query["after"] = page["next_cursor"]


def test_buckets_are_listed_in_order_page_by_page(client: httpx.Client) -> None:
    ids = [f"listed-{next(_numbers):04}" for _ in range(5)]
    for bucket_id in reversed(ids):
        assert client.put(f"/ds/{bucket_id}").status_code == 201
    client.put(f"/ds/{ids[0]}/one", headers={"Content-Type": "text/plain"})
    found = walked(client, "/ds", "buckets", 2)
    assert found == sorted(found)
    assert [bucket_id for bucket_id in found if bucket_id in ids] == ids
    [first] = [entry for entry in client.get("/ds").json()["buckets"] if entry["bucket_id"] == ids[0]]
    assert first["streams"] == 1
    client.delete(f"/ds/{ids[4]}")
    assert ids[4] not in walked(client, "/ds", "buckets", 1000)


def test_subscriptions_are_listed_in_order_page_by_page(client: httpx.Client) -> None:
    root = "/v1/stream/__ds/subscriptions"
    ids = [f"listed-{next(_numbers):04}" for _ in range(5)]
    for id_ in reversed(ids):
        body = {"type": "pull-wake", "streams": ["x/y"], "wake_stream": "wake"}
        assert client.put(f"{root}/{id_}", json=body).status_code == 201
    found = walked(client, root, "subscriptions", 2)
    assert found == sorted(found)
    assert [id_ for id_ in found if id_ in ids] == ids
    for id_ in ids:
        client.delete(f"{root}/{id_}")
    assert not set(ids) & set(walked(client, root, "subscriptions", 1000))


@pytest.mark.parametrize("path", ["/ds", "/v1/stream/__ds/subscriptions"])
def test_list_validates_its_limit_and_allows_only_get(client: httpx.Client, path: str) -> None:
    for limit in ("0", "1001", "-1", "many"):
        assert_problem(client.get(path, params={"limit": limit}), 400, "bad_request")
    assert client.put(path).status_code == 405


def test_head_has_the_time_of_the_last_write(stream: Stream) -> None:
    before = datetime.now(UTC)
    stream.create()
    stream.append("x")
    returned = datetime.fromisoformat(stream.head().headers["stream-last-write-at"])
    assert abs((returned - before).total_seconds()) < 30
    stream.get(offset="-1")
    assert datetime.fromisoformat(stream.head().headers["stream-last-write-at"]) == returned


@pytest.mark.parametrize(
    "kind", ["text/html", "TEXT/HTML; charset=utf-8", "image/svg+xml", "application/xhtml+xml", "text/xml", "x/y"]
)
def test_active_content_is_sandboxed(client: httpx.Client, stream_url: str, kind: str) -> None:
    body = "<script>document.title = 'ran'</script>"
    client.put(stream_url, headers={"Content-Type": kind}, content=body)
    for query in ({}, {"offset": "-1"}, {"offset": "now"}, {"offset": "-1", "live": "long-poll"}):
        answer = client.get(stream_url, params=query)
        assert answer.headers["content-type"] == kind
        assert answer.headers["content-security-policy"].startswith("sandbox")


def test_other_content_is_not_sandboxed(stream: Stream, json_stream: Stream) -> None:
    assert "content-security-policy" not in stream.create("x").get(offset="-1").headers
    assert "content-security-policy" not in json_stream.create("[1]").get(offset="-1").headers


@pytest.fixture
def stream_url() -> str:
    return f"/v1/stream/active-{next(_numbers)}"
