"""`/healthz` and `/readyz`: whether the process is alive, and whether it accepts writes."""

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
    """Ready means that writes are accepted. A server that drains or whose storage failed still serves reads."""
    return render_ready(not_ready(context))


def not_ready(context: Context) -> str:
    """Why writes are not accepted; empty if they are."""
    if context.draining:
        return "draining"
    return "storage does not take writes" if context.engine.failure is not None else ""


def render_ready(reason: str) -> Response:
    return Response(SERVICE_UNAVAILABLE, _TEXT, reason.encode()) if reason else Response(OK, _TEXT, b"ready")
