"""Requests of workers: claim, ack and release of pull-wake, and the callback of a webhook (protocol §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from headwater.core.subscription_errors import InvalidSubscription
from headwater.core.subscriptions import Ack, check_worker
from headwater.engine.wakes import Claimed, render_link
from headwater.http.context import Context
from headwater.http.headers import NO_CONTENT, NO_STORE, OK
from headwater.http.json_bodies import bearer_token, json_response, read_json
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response


class _ClaimBody(msgspec.Struct):
    worker: str


class _AckBody(msgspec.Struct):
    offset: str
    stream: str | None = None
    path: str | None = None


class _ProgressBody(msgspec.Struct):
    wake_id: str
    generation: int
    acks: list[_AckBody] | None = None
    done: bool = False


_claim_bodies: Final = msgspec.json.Decoder(_ClaimBody)
_progress_bodies: Final = msgspec.json.Decoder(_ProgressBody)


def claim(context: Context, request: Request, address: Address) -> Deferred:
    worker = check_worker(read_json(request, _claim_bodies).worker)
    api = context.subscriptions
    work = partial(api.claim, address.subscription, worker)
    return Deferred(partial(api.run, work), _render_claimed)


def ack(context: Context, request: Request, address: Address) -> Deferred:
    return _progress(context, request, address, context.subscriptions.ack)


def call_back(context: Context, request: Request, address: Address) -> Deferred:
    return _progress(context, request, address, context.subscriptions.call_back)


def release(context: Context, request: Request, address: Address) -> Deferred:
    token = bearer_token(request)
    body = read_json(request, _progress_bodies)
    api = context.subscriptions
    work = partial(api.release, address.subscription, token, body.generation, body.wake_id)
    return Deferred(partial(api.run, work), _render_released)


def _progress(
    context: Context,
    request: Request,
    address: Address,
    acked: Callable[[str, str, int, str, Sequence[Ack], bool], bool],
) -> Deferred:
    token = bearer_token(request)
    body = read_json(request, _progress_bodies)
    context.subscriptions.limits.check_request(len(body.acks or ()))
    acks = [Ack(_stream_of(one), one.offset) for one in body.acks or ()]
    api, id_ = context.subscriptions, address.subscription

    def work() -> tuple[bool, str]:
        next_wake = acked(id_, token, body.generation, body.wake_id, acks, body.done)
        return next_wake, "" if body.done else api.write_token(id_)

    return Deferred(partial(api.run, work), _render_progress)


def _stream_of(one: _AckBody) -> str:
    stream = one.stream if one.stream is not None else one.path
    if stream is None:
        raise InvalidSubscription("Each ack must name its stream; send it as stream (or path).")
    return stream


def _render_claimed(claimed: Claimed) -> Response:
    answer: dict[str, object] = {
        "wake_id": claimed.wake_id,
        "generation": claimed.generation,
        "token": claimed.token,
        "streams": [render_link(link) for link in claimed.streams],
        "lease_ttl_ms": claimed.lease_ttl_ms,
    }
    if claimed.write_token:
        answer["write_token"] = claimed.write_token
    return json_response(OK, answer)


def _render_progress(progress: tuple[bool, str]) -> Response:
    next_wake, write_token = progress
    answer: dict[str, object] = {"ok": True, "next_wake": next_wake}
    if write_token:
        answer["write_token"] = write_token
    return json_response(OK, answer)


def _render_released(nothing: None) -> Response:
    return Response(NO_CONTENT, NO_STORE)
