"""Writer leases: `POST ?lease=acquire`, `renew` or `release` and `GET ?lease=show` on a stream (extension)."""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec

from headwater.core.errors import InvalidLease
from headwater.core.leases import LeaseTerms, check_holder, final_body
from headwater.engine.leases import LeaseView
from headwater.http.context import Context
from headwater.http.headers import NO_CONTENT, NO_STORE, OK
from headwater.http.json_bodies import json_response, read_json
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response

LEASE_TYPE: Final = "application/vnd.headwater.lease+json"
"""The required Content-Type: a server without leases, which takes the request for an append, then refuses it."""


class _LeaseBody(msgspec.Struct):
    holder: str
    ttl_ms: int = 30_000
    append: msgspec.Raw = msgspec.Raw()
    close: bool = True
    producer_id: str | None = None
    take_over: bool = False


_bodies: Final = msgspec.json.Decoder(_LeaseBody)


def change(context: Context, request: Request, address: Address) -> Response | Deferred:
    if request.header(b"content-type") != LEASE_TYPE:
        raise InvalidLease(
            f"A lease request must have the Content-Type {LEASE_TYPE}, not {request.header(b'content-type') or 'none'}."
        )
    body = read_json(request, _bodies, InvalidLease)
    leases = context.engine.leases
    match address.query["lease"]:
        case "acquire":
            is_json = context.engine.look_up(address.name).type.json
            final = final_body(body.append, json=is_json)
            terms = LeaseTerms(body.holder, body.ttl_ms, final, body.close, body.producer_id)
            begin = partial(leases.acquire, address.name, terms, take_over=body.take_over)
            return Deferred(lambda done: begin(done=done), _render)
        case "renew":
            return _render(leases.renew(address.name, check_holder(body.holder)))
        case "release":
            release = partial(leases.release, address.name, check_holder(body.holder))
            return Deferred(release, _render_released)
        case other:
            raise InvalidLease(f"lease={other} is not known; use acquire, renew or release.")


def show(context: Context, request: Request, address: Address) -> Response:
    return _render(context.engine.leases.show(address.name))


def _render(view: LeaseView) -> Response:
    return json_response(OK, view)


def _render_released(nothing: None) -> Response:
    return Response(NO_CONTENT, NO_STORE)
