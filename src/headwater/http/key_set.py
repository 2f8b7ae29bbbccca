"""The key set to verify webhooks (RFC 7517): public keys only."""

from __future__ import annotations

from typing import Final

from headwater.core.signing import JWKS_MAX_AGE_S, jwk
from headwater.http.context import Context
from headwater.http.headers import OK
from headwater.http.json_bodies import json_response
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response

_HEADERS: Final = (
    f"Cache-Control: public, max-age={JWKS_MAX_AGE_S}\r\nContent-Type: application/jwk-set+json\r\n".encode()
)


def handle(context: Context, request: Request, address: Address) -> Response:
    keys = context.subscriptions.public_keys()
    return json_response(OK, {"keys": [jwk(key) for key in keys]}, _HEADERS)
