"""Listings of a server: buckets, the streams of a bucket, and the registry. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from headwater.client.effects import Emit, HttpRequest, Operation, Policy, send
from headwater.client.errors import ConflictError
from headwater.client.operations import StreamOperations
from headwater.client.reading import Position, read
from headwater.client.results import BEGINNING, Batch, BucketEntry, ChangedStreams, StreamEntry, decode

PAGE_ENTRIES: Final = 1000
REGISTRY: Final = "__registry__"
NAME_SAFE: Final = "/-._~!$&'()*+,;=:@"


class _Page(msgspec.Struct):
    streams: list[dict[str, Any]] = []
    buckets: list[dict[str, Any]] = []
    has_more: bool = False
    next_cursor: str | None = None
    changes_cursor: str = ""
    reset: bool = False


_pages: Final = msgspec.json.Decoder(_Page)


def buckets(policy: Policy, base_url: str) -> Operation[None]:
    """Emit a `BucketEntry` for each bucket, in the order of their ids."""
    query = {"limit": str(PAGE_ENTRIES)}
    while True:
        page = yield from _page(policy, f"{base_url}/ds", query)
        for found in page.buckets:
            yield Emit(BucketEntry(found["bucket_id"], found.get("streams", 0), found.get("created_at_ms"), found))
        if not page.has_more or not page.buckets:
            return
        query["after"] = page.next_cursor or page.buckets[-1]["bucket_id"]


def bucket_streams(policy: Policy, bucket_url: str, prefix: str) -> Operation[None]:
    """Emit a `StreamEntry` for each stream of a bucket, in the order of their names."""
    return listed_streams(policy, f"{bucket_url}/streams", prefix)


def listed_streams(policy: Policy, listing_url: str, prefix: str) -> Operation[None]:
    """Emit a `StreamEntry` for each stream of a listing, in the order of their names."""
    query = {"limit": str(PAGE_ENTRIES)} | ({"prefix": prefix} if prefix else {})
    while True:
        page = yield from _page(policy, listing_url, query)
        for found in page.streams:
            yield Emit(_entry(found))
        if not page.has_more or not page.streams:
            return
        query["after"] = page.next_cursor or _entry(page.streams[-1]).name


def changed_streams(
    policy: Policy, listing_url: str, prefix: str, cursor: str | None
) -> Operation[ChangedStreams | None]:
    """Wait for streams of a listing that change after a cursor; None if none did within the server's timeout."""
    query = {"limit": str(PAGE_ENTRIES), "live": "long-poll", "prefix": prefix}
    if cursor is not None:
        query["cursor"] = cursor
    request = HttpRequest("GET", listing_url, urlencode(query), timeout_s=policy.live_timeout_s)
    response = yield from send(policy, request, 200, 204)
    if response.status == 204:
        return None
    page = decode(response.body, _pages)
    return ChangedStreams([_entry(found) for found in page.streams], page.changes_cursor, page.has_more, page.reset)


def _entry(found: Mapping[str, Any]) -> StreamEntry:
    return StreamEntry(
        found.get("name") or found["stream_id"],
        found.get("next_offset", ""),
        found.get("content_type", ""),
        found.get("created_at_ms"),
        found,
    )


def _page(policy: Policy, url: str, query: Mapping[str, str]) -> Operation[_Page]:
    response = yield from send(policy, HttpRequest("GET", url, urlencode(query)), 200)
    return decode(response.body, _pages)


def create_bucket(policy: Policy, bucket_url: str, *, exist_ok: bool) -> Operation[bool]:
    """Create a bucket; return whether it is new."""
    try:
        yield from send(policy, HttpRequest("PUT", bucket_url), 200, 201)
    except ConflictError:
        if not exist_ok:
            raise
        return False
    return True


def delete_bucket(policy: Policy, bucket_url: str) -> Operation[None]:
    yield from send(policy, HttpRequest("DELETE", bucket_url), 200, 204)


def registered_streams(policy: Policy, stream_root: str, prefix: str) -> Operation[list[StreamEntry]]:
    """The streams that the server's registry reports, in the order of their names."""
    registry = StreamOperations(f"{stream_root}/{REGISTRY}", policy)
    found: dict[str, StreamEntry] = {}

    def fold(batch: Batch) -> None:
        for event in batch.values:
            apply_registry_event(found, event)

    yield from read(registry, Position(BEGINNING), fold)
    return [found[name] for name in sorted(found) if name.startswith(prefix)]


def apply_registry_event(found: dict[str, StreamEntry], event: Any) -> None:
    """Apply one state event of the registry. Messages that are not such events are ignored."""
    if not isinstance(event, Mapping) or event.get("type") != "stream" or not isinstance(event.get("key"), str):
        return
    headers, value = event.get("headers"), event.get("value")
    name: str = event["key"]
    if isinstance(headers, Mapping) and headers.get("operation") == "delete":
        found.pop(name, None)
    elif isinstance(headers, Mapping) and isinstance(value, Mapping):
        content_type, created_at_ms = value.get("contentType"), value.get("createdAt")
        found[name] = StreamEntry(
            name,
            content_type=content_type if isinstance(content_type, str) else "",
            created_at_ms=created_at_ms if isinstance(created_at_ms, int) else None,
        )


def stream_url(base_url: str, name: str) -> str:
    """The URL of a stream: `name` is a name, a path such as `/ds/bucket/stream`, or a URL."""
    if name.startswith(("http://", "https://")):
        return name.rstrip("/")
    if name.startswith("/"):
        return base_url + quote(name, safe=NAME_SAFE)
    return f"{base_url}/v1/stream/{quote(name, safe=NAME_SAFE)}"


def bucket_stream_url(bucket_url: str, stream_id: str) -> str:
    return f"{bucket_url}/{quote(stream_id, safe='')}"
