"""DELETE: remove a stream and all its data (protocol §5.4)."""

from __future__ import annotations

from functools import partial

from headwater.engine.results import Deleted
from headwater.http.context import Context
from headwater.http.headers import NO_CONTENT, NO_STORE
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Deferred, Response


def handle(context: Context, request: Request, address: Address) -> Deferred:
    return Deferred(partial(context.engine.delete, address.name), _render)


def _render(deleted: Deleted) -> Response:
    return Response(NO_CONTENT, NO_STORE)
