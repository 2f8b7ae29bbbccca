"""JSON bodies of the other APIs: requests are parsed strictly and within a limit, responses are never cached."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from headwater.core.errors import PayloadTooLarge, Refusal
from headwater.core.subscription_errors import InvalidSubscription, TokenInvalid
from headwater.http.headers import JSON_TYPE, NO_STORE
from headwater.http.request import Request
from headwater.http.responses import Response

BODY_MAX_BYTES: Final = 1024 * 1024
"""The limit of these bodies; the limit for stream data does not apply to them."""

BodyT = TypeVar("BodyT")

_encode: Final = msgspec.json.Encoder().encode


def read_json(
    request: Request, decoder: msgspec.json.Decoder[BodyT], error: type[Refusal] = InvalidSubscription
) -> BodyT:
    """Parse the request's body. Unknown members are ignored; a malformed body is refused with `error`."""
    if len(request.body) > BODY_MAX_BYTES:
        raise PayloadTooLarge(
            f"The body has {len(request.body)} bytes; requests of this kind may have {BODY_MAX_BYTES}."
        )
    try:
        return decoder.decode(request.body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        raise error(f"The body is not valid: {reason}.") from None
    except RecursionError:
        raise error("The body is nested too deeply; use fewer arrays and objects inside each other.") from None


def bearer_token(request: Request) -> str:
    scheme, _, token = (request.header(b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise TokenInvalid("The token of the wake is missing; send it as Authorization: Bearer TOKEN.")
    return token.strip()


def json_response(status: int, value: object, headers: bytes = NO_STORE + JSON_TYPE) -> Response:
    return Response(status, headers, _encode(value))
