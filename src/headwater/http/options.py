"""OPTIONS: CORS preflight, and which methods an address takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwater.http.request import Request
from headwater.http.response import ALLOWED_METHODS, NO_CONTENT, NO_STORE

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection


def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "options"
    allow = f"Allow: {ALLOWED_METHODS}\r\n".encode()
    connection.reply(NO_CONTENT, NO_STORE + allow + app.common_headers.preflight)
