"""DELETE: remove a stream and all its data (protocol §5.4)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headwater.engine.engine import Deleted
from headwater.http.request import Request
from headwater.http.response import NO_CONTENT, NO_STORE

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection


def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "delete"
    app.engine.delete(target.name, partial(connection.settle, _render))


def _render(connection: Connection, deleted: Deleted) -> None:
    connection.reply(NO_CONTENT, NO_STORE)
