"""Operations of the subscription API: create, describe, list, link and delete subscriptions. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from headwater.client.effects import Emit, HttpRequest, Operation, Policy, send
from headwater.client.results import any_object, decode

ROOT: Final = "/v1/stream/__ds/subscriptions"
PAGE_ENTRIES: Final = 1000
_JSON: Final = {"Content-Type": "application/json"}


class _SubscriptionPage(msgspec.Struct):
    subscriptions: list[dict[str, Any]]
    has_more: bool = False
    next_cursor: str | None = None


_pages: Final = msgspec.json.Decoder(_SubscriptionPage)


def _url(base_url: str, id_: str) -> str:
    return f"{base_url}{ROOT}/{quote(id_, safe='')}"


def put(policy: Policy, base_url: str, id_: str, configuration: Mapping[str, Any]) -> Operation[bool]:
    """Create a subscription, or confirm that it exists with the same configuration; return whether it is new."""
    request = HttpRequest("PUT", _url(base_url, id_), "", _JSON, msgspec.json.encode(configuration))
    response = yield from send(policy, request, 200, 201)
    return response.status == 201


def describe(policy: Policy, base_url: str, id_: str) -> Operation[dict[str, Any]]:
    """A subscription with all of its streams, as the server describes it."""
    query = {"limit": str(PAGE_ENTRIES)}
    found: dict[str, Any] = {}
    while True:
        response = yield from send(policy, HttpRequest("GET", _url(base_url, id_), urlencode(query)), 200)
        page = decode(response.body, any_object)
        page["streams"] = [*found.get("streams", ()), *page.get("streams", ())]
        found = page
        if not page.get("has_more"):
            return found
        query["after"] = page["next_cursor"]


def every(policy: Policy, base_url: str) -> Operation[None]:
    """Emit a short description of each subscription, in the order of their ids (extension)."""
    query = {"limit": str(PAGE_ENTRIES)}
    while True:
        response = yield from send(policy, HttpRequest("GET", base_url + ROOT, urlencode(query)), 200)
        page = decode(response.body, _pages)
        for found in page.subscriptions:
            yield Emit(found)
        if not page.has_more or page.next_cursor is None:
            return
        query["after"] = page.next_cursor


def delete(policy: Policy, base_url: str, id_: str) -> Operation[None]:
    yield from send(policy, HttpRequest("DELETE", _url(base_url, id_)), 204)


def link(policy: Policy, base_url: str, id_: str, streams: Sequence[str]) -> Operation[None]:
    """Link streams explicitly."""
    body = msgspec.json.encode({"streams": streams})
    yield from send(policy, HttpRequest("POST", f"{_url(base_url, id_)}/streams", "", _JSON, body), 204)


def unlink(policy: Policy, base_url: str, id_: str, stream: str) -> Operation[None]:
    yield from send(policy, HttpRequest("DELETE", f"{_url(base_url, id_)}/streams/{quote(stream, safe='')}"), 204)
