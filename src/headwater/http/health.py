"""`/healthz` and `/readyz`: whether the process is alive, and whether it takes writes."""

from __future__ import annotations

from typing import Final

from headwater.http.context import Context
from headwater.http.headers import NO_STORE, OK, SERVICE_UNAVAILABLE
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response

_TEXT: Final = NO_STORE + b"Content-Type: text/plain; charset=utf-8\r\n"


def health(context: Context, request: Request, address: Address) -> Response:
    return Response(OK, _TEXT, b"ok")


def ready(context: Context, request: Request, address: Address) -> Response:
    """Ready means that writes are taken. A server that drains or whose storage failed still answers reads."""
    if context.draining:
        return Response(SERVICE_UNAVAILABLE, _TEXT, b"draining")
    if context.engine.failure is not None:
        return Response(SERVICE_UNAVAILABLE, _TEXT, b"storage does not take writes")
    return Response(OK, _TEXT, b"ready")
