"""What workers say: claim, ack and release of pull-wake, and the callback of a webhook (protocol §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from headwater.core.errors import InvalidSubscription
from headwater.core.subscriptions import Ack, check_worker
from headwater.engine.wakes import Claimed, render_told
from headwater.http.bodies import bearer_token, read_json, reply_json
from headwater.http.request import Request
from headwater.http.response import NO_CONTENT, NO_STORE, OK

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection


class _Claim(msgspec.Struct):
    worker: str


class _Ack(msgspec.Struct):
    offset: str
    stream: str | None = None
    path: str | None = None


class _Progress(msgspec.Struct):
    wake_id: str
    generation: int
    acks: list[_Ack] | None = None
    done: bool = False


def claim(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "claim"
    worker = check_worker(read_json(request, _Claim).worker)
    api = app.subscription_api
    api.answer(partial(api.claim, target.name, worker), partial(connection.settle, _render_claimed))


def ack(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "ack"
    _progress(app, connection, request, target, app.subscription_api.ack)


def call_back(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "callback"
    _progress(app, connection, request, target, app.subscription_api.call_back)


def release(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "release"
    token = bearer_token(request)
    body = read_json(request, _Progress)
    api = app.subscription_api
    work = partial(api.release, target.name, token, body.generation, body.wake_id)
    api.answer(work, partial(connection.settle, _render_released))


def _progress(
    app: App,
    connection: Connection,
    request: Request,
    target: Target,
    acked: Callable[[str, str, int, str, Sequence[Ack], bool], bool],
) -> None:
    token = bearer_token(request)
    body = read_json(request, _Progress)
    acks = [Ack(_stream_of(one), one.offset) for one in body.acks or ()]
    work = partial(acked, target.name, token, body.generation, body.wake_id, acks, body.done)
    app.subscription_api.answer(work, partial(connection.settle, _render_progress))


def _stream_of(one: _Ack) -> str:
    stream = one.stream if one.stream is not None else one.path
    if stream is None:
        raise InvalidSubscription("Each ack names its stream.")
    return stream


def _render_claimed(connection: Connection, claimed: Claimed) -> None:
    reply_json(
        connection,
        OK,
        {
            "wake_id": claimed.wake_id,
            "generation": claimed.generation,
            "token": claimed.token,
            "streams": [render_told(told) for told in claimed.streams],
            "lease_ttl_ms": claimed.lease_ttl_ms,
        },
    )


def _render_progress(connection: Connection, next_wake: bool) -> None:
    reply_json(connection, OK, {"ok": True, "next_wake": next_wake})


def _render_released(connection: Connection, nothing: None) -> None:
    connection.reply(NO_CONTENT, NO_STORE)
