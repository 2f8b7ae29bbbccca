"""OPTIONS: CORS preflight, and the allowed methods."""

from __future__ import annotations

from typing import Final

from headwater.http.context import Context
from headwater.http.headers import ALLOWED_METHODS, NO_CONTENT, NO_STORE
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response

_ALLOW: Final = NO_STORE + f"Allow: {ALLOWED_METHODS}\r\n".encode()


def handle(context: Context, request: Request, address: Address) -> Response:
    return Response(NO_CONTENT, _ALLOW + context.common_headers.preflight)
