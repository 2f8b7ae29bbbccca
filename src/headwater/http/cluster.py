"""The state of the cluster that a server is a node of, for the stream browser. A node replaces this handler."""

from __future__ import annotations

from typing import Final

from headwater.http.context import Context
from headwater.http.headers import NO_STORE, OK
from headwater.http.json_bodies import json_response
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response

_HEADERS: Final = NO_STORE + b"Content-Type: application/json\r\n"


def handle(context: Context, request: Request, address: Address) -> Response:
    """The answer of a server that is not a node."""
    return render_cluster(None)


def render_cluster(cluster: object) -> Response:
    return json_response(OK, {"cluster": cluster}, _HEADERS)
