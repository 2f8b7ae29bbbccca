"""Subscriptions as a resource: create or confirm, read, delete, list, and change explicit links (protocol §6)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headwater.core.buckets import check_page_limit
from headwater.core.errors import InvalidSubscription
from headwater.core.expiry import format_instant
from headwater.core.subscriptions import LEASE_TTL_DEFAULT_MS, Kind, link_name, make_config
from headwater.engine.subscriptions import Put, View
from headwater.http.bodies import JSON_TYPE, read_json, reply_json
from headwater.http.create import location
from headwater.http.request import Request
from headwater.http.response import CREATED, NO_CONTENT, NO_STORE, OK

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection


class _Webhook(msgspec.Struct):
    url: str


class _Subscription(msgspec.Struct):
    type: Kind
    pattern: str | None = None
    streams: list[str] | None = None
    webhook: _Webhook | None = None
    wake_stream: str | None = None
    lease_ttl_ms: int = LEASE_TTL_DEFAULT_MS
    description: str | None = None


class _Streams(msgspec.Struct):
    streams: list[str]


def put(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "subscription-put"
    body = read_json(request, _Subscription)
    config = make_config(
        body.type,
        body.pattern,
        body.streams or (),
        body.webhook.url if body.webhook is not None else None,
        body.wake_stream,
        body.lease_ttl_ms,
        body.description,
        app.limits.max_name_bytes,
    )
    app.subscription_api.put(target.name, config, _base_url(connection), partial(connection.settle, _render_put))


def get(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "subscription-get"
    api = app.subscription_api
    api.answer(partial(api.get, target.name), partial(connection.settle, _render_view))


def index(app: App, connection: Connection, request: Request, target: Target) -> None:
    """Every subscription there is, page by page, in short (our extension; a bucket is listed alike)."""
    connection.operation = "subscription-list"
    limit = check_page_limit(target.query.get("limit"))
    api = app.subscription_api
    api.answer(partial(api.page, target.query.get("after"), limit), partial(connection.settle, _render_page))


def delete(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "subscription-delete"
    api = app.subscription_api
    api.answer(partial(api.delete, target.name), partial(connection.settle, _render_nothing))


def add_streams(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "subscription-link"
    streams = read_json(request, _Streams).streams
    if not streams:
        raise InvalidSubscription("streams names no stream.")
    names = [link_name(stream, app.limits.max_name_bytes) for stream in streams]
    api = app.subscription_api
    api.answer(partial(api.link, target.name, names), partial(connection.settle, _render_nothing))


def remove_stream(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "subscription-unlink"
    name = link_name(target.below, app.limits.max_name_bytes)
    api = app.subscription_api
    api.answer(partial(api.unlink, target.name, name), partial(connection.settle, _render_nothing))


def _render_put(connection: Connection, put_: Put) -> None:
    headers = NO_STORE + JSON_TYPE
    if put_.is_new:
        headers += b"Location: " + location(connection) + b"\r\n"
    reply_json(connection, CREATED if put_.is_new else OK, _view(connection, put_.view), headers)


def _render_view(connection: Connection, view: View) -> None:
    reply_json(connection, OK, _view(connection, view))


def _render_page(connection: Connection, page: tuple[list[View], bool]) -> None:
    views, has_more = page
    listed = [
        {"id": view.id, "type": view.config.kind, "status": _status(view), "stream_count": len(view.links)}
        for view in views
    ]
    reply_json(
        connection,
        OK,
        {"subscriptions": listed, "next_cursor": views[-1].id if has_more else None, "has_more": has_more},
    )


def _status(view: View) -> str:
    return "failed" if view.is_failing else "active"


def _render_nothing(connection: Connection, nothing: None) -> None:
    connection.reply(NO_CONTENT, NO_STORE)


def _view(connection: Connection, view: View) -> dict[str, object]:
    config = view.config
    rendered: dict[str, object] = {
        "id": view.id,
        "subscription_id": view.id,
        "type": config.kind,
        "streams": [
            {"path": link.path, "link_type": link.link_type, "acked_offset": str(link.acked)} for link in view.links
        ],
        "lease_ttl_ms": config.lease_ttl_ms,
        "created_at": format_instant(view.created_ms),
        "status": _status(view),
    }
    if config.pattern is not None:
        rendered["pattern"] = config.pattern
    if config.webhook_url is not None:
        keys_url = f"{_base_url(connection)}/v1/stream/__ds/jwks.json"
        signing = {"alg": "ed25519", "kid": view.kid, "jwks_url": keys_url}
        rendered["webhook"] = {"url": config.webhook_url, "signing": signing}
    if config.wake_stream is not None:
        rendered["wake_stream"] = config.wake_stream
    if config.description is not None:
        rendered["description"] = config.description
    return rendered


def _base_url(connection: Connection) -> str:
    """Where clients reach this server: as it was told, or as this one did."""
    app = connection.app
    return app.public_url or connection.request.origin(app.scheme)
