"""HEAD: what a stream is, without its data and without restarting its TTL (protocol §5.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headwater.core.expiry import format_instant
from headwater.http.ranges import position
from headwater.http.request import Request
from headwater.http.response import NO_STORE, OK, STREAM_CLOSED, header, next_offset

if TYPE_CHECKING:
    from headwater.http.app import App, Target
    from headwater.http.connection import Connection

EXTENSIONS: Final = b"Stream-Extensions: until, splits, frames, position, digest\r\n"
"""What this server adds to the protocol (docs/extensions.md), so that a client need not try it out."""


def handle(app: App, connection: Connection, request: Request, target: Target) -> None:
    connection.operation = "head"
    stream = app.engine.look_up(target.name)
    headers = [
        NO_STORE,
        header("Content-Type", stream.type.header),
        next_offset(stream.durable_index, stream.durable_position),
        position(stream.durable_index),
        EXTENSIONS,
    ]
    if stream.ttl_secs is not None:
        headers.append(b"Stream-TTL: %d\r\n" % stream.ttl_secs)
    if stream.expires_at_ms is not None:
        headers.append(header("Stream-Expires-At", format_instant(stream.expires_at_ms)))
    if stream.durable_closed:
        headers.append(STREAM_CLOSED)
    connection.reply(OK, b"".join(headers))
