"""The key set that webhooks are verified with (RFC 7517): public keys only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headwater.core.signing import JWKS_MAX_AGE_S, jwk
from headwater.http.bodies import reply_json
from headwater.http.request import Request
from headwater.http.response import OK

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection

_HEADERS: Final = (
    f"Cache-Control: public, max-age={JWKS_MAX_AGE_S}\r\nContent-Type: application/jwk-set+json\r\n".encode()
)


def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "jwks"
    keys = app.subscription_api.public_keys()
    reply_json(connection, OK, {"keys": [jwk(key) for key in keys]}, _HEADERS)
