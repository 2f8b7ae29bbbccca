"""The subscription resource: create or confirm, read, delete, list, and change explicit links (protocol §6)."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from headwater.core.buckets import check_page_limit
from headwater.core.expiry import format_instant
from headwater.core.subscription_errors import InvalidSubscription
from headwater.core.subscriptions import LEASE_TTL_DEFAULT_MS, Kind, link_name, make_config
from headwater.engine.subscriptions import Put, View
from headwater.http.context import Context
from headwater.http.headers import CREATED, JSON_TYPE, NO_CONTENT, NO_STORE, OK
from headwater.http.json_bodies import json_response, read_json
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response


class _WebhookBody(msgspec.Struct):
    url: str


class _SubscriptionBody(msgspec.Struct):
    type: Kind
    pattern: str | None = None
    streams: list[str] | None = None
    webhook: _WebhookBody | None = None
    wake_stream: str | None = None
    lease_ttl_ms: int = LEASE_TTL_DEFAULT_MS
    description: str | None = None


class _StreamsBody(msgspec.Struct):
    streams: list[str]


_subscriptions: Final = msgspec.json.Decoder(_SubscriptionBody)
_streams: Final = msgspec.json.Decoder(_StreamsBody)


def put(context: Context, request: Request, address: Address) -> Deferred:
    body = read_json(request, _subscriptions)
    config = make_config(
        body.type,
        body.pattern,
        body.streams or (),
        body.webhook.url if body.webhook is not None else None,
        body.wake_stream,
        body.lease_ttl_ms,
        body.description,
        context.limits.max_name_bytes,
        context.subscriptions.limits,
    )
    base_url = context.base_url(request)
    begin = partial(context.subscriptions.put, address.subscription, config, base_url)
    return Deferred(begin, partial(_render_put, base_url, context.location(request)))


def get(context: Context, request: Request, address: Address) -> Deferred:
    limit = check_page_limit(address.query.get("limit"))
    api = context.subscriptions
    view = partial(api.get, address.subscription, address.query.get("after"), limit)
    return Deferred(partial(api.run, view), partial(_render_view, context.base_url(request)))


def index(context: Context, request: Request, address: Address) -> Deferred:
    """List all subscriptions in pages, with few fields (our extension)."""
    limit = check_page_limit(address.query.get("limit"))
    api = context.subscriptions
    return Deferred(partial(api.run, partial(api.page, address.query.get("after"), limit)), _render_page)


def delete(context: Context, request: Request, address: Address) -> Deferred:
    api = context.subscriptions
    return Deferred(partial(api.run, partial(api.delete, address.subscription)), _render_nothing)


def add_streams(context: Context, request: Request, address: Address) -> Deferred:
    streams = read_json(request, _streams).streams
    if not streams:
        raise InvalidSubscription("streams must name at least one stream.")
    api = context.subscriptions
    api.limits.check_request(len(streams))
    names = [link_name(stream, context.limits.max_name_bytes) for stream in streams]
    return Deferred(partial(api.run, partial(api.link, address.subscription, names)), _render_nothing)


def remove_stream(context: Context, request: Request, address: Address) -> Deferred:
    name = link_name(address.name, context.limits.max_name_bytes)
    api = context.subscriptions
    return Deferred(partial(api.run, partial(api.unlink, address.subscription, name)), _render_nothing)


def _render_put(base_url: str, location: bytes, put_: Put) -> Response:
    headers = NO_STORE + JSON_TYPE
    if put_.is_new:
        headers += b"Location: " + location + b"\r\n"
    return json_response(CREATED if put_.is_new else OK, _view(base_url, put_.view), headers)


def _render_view(base_url: str, view: View) -> Response:
    return json_response(OK, _view(base_url, view))


def _render_page(page: tuple[list[View], bool]) -> Response:
    views, has_more = page
    listed = [
        {"id": view.id, "type": view.config.kind, "status": _status(view), "stream_count": view.link_count}
        | _failure(view)
        for view in views
    ]
    return json_response(
        OK, {"subscriptions": listed, "next_cursor": views[-1].id if has_more else None, "has_more": has_more}
    )


def _status(view: View) -> str:
    return "failed" if view.is_failing else "active"


def _failure(view: View) -> dict[str, object]:
    """Why its worker cannot be woken, and the time of the next retry (extension)."""
    failure = view.failure
    if failure is None:
        return {}
    rendered: dict[str, object] = {"attempts": failure.attempts, "reason": failure.reason}
    if failure.retry_at_ms is not None:
        rendered["retry_at"] = format_instant(failure.retry_at_ms)
    return {"failure": rendered}


def _render_nothing(nothing: None) -> Response:
    return Response(NO_CONTENT, NO_STORE)


def _view(base_url: str, view: View) -> dict[str, object]:
    config = view.config
    rendered: dict[str, object] = {
        "id": view.id,
        "subscription_id": view.id,
        "type": config.kind,
        "streams": [
            {"path": link.path, "link_type": link.link_type, "acked_offset": link.token(link.acked)}
            for link in view.links
        ],
        "stream_count": view.link_count,
        "has_more": view.has_more_links,
        "next_cursor": view.links[-1].path if view.has_more_links else None,
        "lease_ttl_ms": config.lease_ttl_ms,
        "created_at": format_instant(view.created_ms),
        "status": _status(view),
    } | _failure(view)
    if view.is_incomplete:
        rendered["has_unlinked_streams"] = True
    if config.pattern is not None:
        rendered["pattern"] = config.pattern
    if config.webhook_url is not None:
        keys_url = f"{base_url}/v1/stream/__ds/jwks.json"
        signing = {"alg": "ed25519", "kid": view.kid, "jwks_url": keys_url}
        rendered["webhook"] = {"url": config.webhook_url, "signing": signing}
    if config.wake_stream is not None:
        rendered["wake_stream"] = config.wake_stream
    if config.description is not None:
        rendered["description"] = config.description
    return rendered
