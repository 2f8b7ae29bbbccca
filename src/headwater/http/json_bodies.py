"""JSON in and out of the subscription API: bodies read strictly and within a limit, answers never cached."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from headwater.core.errors import InvalidSubscription, TokenInvalid, TooLarge
from headwater.http.headers import JSON_TYPE, NO_STORE
from headwater.http.request import Request
from headwater.http.responses import Response

BODY_MAX_BYTES: Final = 1024 * 1024
"""No sensible subscription is larger; the limit for stream data does not apply here."""

BodyT = TypeVar("BodyT")

_encode: Final = msgspec.json.Encoder().encode


def read_json(request: Request, kind: type[BodyT]) -> BodyT:
    """The request's body as `kind`. Unknown members are ignored."""
    if len(request.body) > BODY_MAX_BYTES:
        raise TooLarge(f"The body is larger than {BODY_MAX_BYTES} bytes.")
    try:
        return msgspec.json.decode(request.body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidSubscription(f"The body is not valid: {error}.") from None
    except RecursionError:
        raise InvalidSubscription("The body is nested too deeply.") from None


def bearer_token(request: Request) -> str:
    scheme, _, token = (request.header(b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise TokenInvalid("Send the token of the wake as Authorization: Bearer.")
    return token.strip()


def json_response(status: int, value: object, headers: bytes = NO_STORE + JSON_TYPE) -> Response:
    return Response(status, headers, _encode(value))
